"""The verification of a window of drafts by the exact rule, in one kernel: law, test, residual, next drafts.

One program serves one position: the chain of `TokenLaw`, `exact_acceptance`, the residual race of a refused draft, and
the redraft of the slot from its new law. It passes over the logits as `draw` does, and twice more, because the law is
stored and must therefore be normalised first: without filters three passes (the largest logit, the mass, the rest), one
from memory and two from the caches. The stored draft law is read once, and only if the draft was refused. The law, the
label of the next drafts, is the only array of B x W x V that is written, once.

This file does not define the test a second time: samplers write out step by step what the kernel computes, and its
tests compare it with that.

The draft law of a position is a row of the laws that an earlier call stored, given by its number, or a point or uniform
law that needs no row. So no labels are copied as the window moves.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import launcher, on_gpu, rows_of_numbers, triton
from visual_spec.kernels.law import (
    TILE,
    WARPS,
    LawNumbers,
    as_round,
    check_logits,
    kernel_numbers,
    kernel_switches,
    tiles,
)

_NO_STREAM = -1


def verify(
    logits: Tensor, drafts: Tensor, stored_laws: Tensor, draft_laws: Tensor, keys: Tensor, slots: Tensor,
    law: LawNumbers, *, round: int | Tensor, accept_stream: int, residual_stream: int, draw_stream: int | None = None,
    draw_round: int | Tensor = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Test the drafts of a window, replace the refused ones, and draw the slots anew from their laws.

    Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023.

    Args:
        logits, keys, slots, law: as in `draw`.
        drafts: long [B, W].
        stored_laws: float32 [B, C, V] log-probabilities.
        draft_laws: long [B, W], the row of `stored_laws` that each draft was drawn from, or NO_DRAFT, POINT_LAW, or
            UNIFORM_LAW.
        round: round of the test and of the replacement.
        accept_stream, residual_stream: streams of their noise.
        draw_stream, draw_round: noise of the redraft; None for no redraft.

    Returns:
        laws: float32 [B, W, V] log-probabilities, -inf outside the support.
        accept: BoolTensor [B, W], whether each draft is kept; False without a draft.
        tokens: long [B, W], the draft if it is kept, else a draw from the residual (from the law, without a draft).
        drawn: long [B, W], draws from the laws; [B, 0] without a redraft.
        finite: as from `draw`.

    Raises:
        ValueError: the shapes do not fit, or the logits are not on a GPU, or Triton is missing there.
        TypeError: the logits or stored laws have another dtype.
    """
    check_logits(logits, keys, slots, law)
    if drafts.shape != slots.shape or draft_laws.shape != slots.shape:
        raise ValueError(
            f"drafts have shape {tuple(drafts.shape)} and draft_laws {tuple(draft_laws.shape)}; pass both as "
            f"{tuple(slots.shape)}, one a slot, and NO_DRAFT where there is none."
        )
    if stored_laws.dim() != 3 or stored_laws.shape[::2] != (slots.shape[0], logits.shape[-1]):
        raise ValueError(
            f"stored_laws have shape {tuple(stored_laws.shape)}; pass [{slots.shape[0]}, columns, {logits.shape[-1]}]."
        )
    if stored_laws.dtype != torch.float32:
        raise TypeError(f"stored_laws are {stored_laws.dtype}; pass float32, as `verify` returns them.")
    if not on_gpu(logits):
        raise ValueError(
            f"logits are on {logits.device}, and this kernel needs a GPU and Triton; elsewhere take the test step by "
            "step: `TokenLaw`, `exact_acceptance`, `residual` and `CounterNoise`, as samplers do."
        )
    return _verify_op(
        logits, drafts, stored_laws, draft_laws, keys, slots, as_round(round, slots), as_round(draw_round, slots),
        accept_stream, residual_stream, _NO_STREAM if draw_stream is None else draw_stream, *law,
    )  # fmt: skip


@triton_op("visual_spec::verify", mutates_args=())
def _verify_op(
    logits: Tensor, drafts: Tensor, stored_laws: Tensor, draft_laws: Tensor, keys: Tensor, slots: Tensor,
    round: Tensor, draw_round: Tensor, accept_stream: int, residual_stream: int, draw_stream: int, guided: bool,
    guidance_scale: float, temperature: float, top_k: int, top_p: float, first: int, stop: int, guidance_until: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    law = LawNumbers(guided, guidance_scale, temperature, top_k, top_p, first, stop, guidance_until)
    return verify_triton(
        logits, drafts, stored_laws, draft_laws, keys, slots, round, draw_round, accept_stream, residual_stream,
        draw_stream, law,
    )  # fmt: skip


@_verify_op.register_fake
def _verify_outputs(
    logits: Tensor, drafts: Tensor, stored_laws: Tensor, draft_laws: Tensor, keys: Tensor, slots: Tensor,
    round: Tensor, draw_round: Tensor, accept_stream: int, residual_stream: int, draw_stream: int, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = partial(torch.empty_like, slots)
    laws = slots.new_empty(*slots.shape, logits.shape[-1], dtype=torch.float32)
    drawn = slots.new_empty(len(slots), 0 if draw_stream == _NO_STREAM else slots.shape[1])
    return laws, like(dtype=torch.bool), like(), drawn, like(dtype=torch.bool)


def verify_triton(
    logits: Tensor, drafts: Tensor, stored_laws: Tensor, draft_laws: Tensor, keys: Tensor, slots: Tensor,
    round: Tensor, draw_round: Tensor, accept_stream: int, residual_stream: int, draw_stream: int, law: LawNumbers,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`verify` by the Triton kernel."""
    slots, vocab_size = slots.contiguous(), logits.shape[-1]
    tensors = (logits, drafts, stored_laws, draft_laws, keys, slots, round, draw_round)
    outputs = _verify_outputs(*tensors, accept_stream, residual_stream, draw_stream)
    if slots.numel() == 0:
        return outputs
    logits, stored_laws = rows_of_numbers(logits), rows_of_numbers(stored_laws)
    with torch.cuda.device_of(logits):
        launcher(_verify_kernel)[(slots.numel(),)](
            *outputs, logits, drafts.contiguous(), stored_laws, draft_laws.contiguous(), keys.contiguous(), slots,
            round, draw_round, *slots.shape, logits.stride(0), logits.stride(1), stored_laws.stride(0),
            stored_laws.stride(1), vocab_size, *kernel_numbers(law), math.log(law.stop - law.first),
            ACCEPT_STREAM=accept_stream, RESIDUAL_STREAM=residual_stream, DRAW_STREAM=draw_stream,
            **kernel_switches(law), TILE=TILE, TILES=tiles(law, TILE), ALL_TILES=-(-vocab_size // TILE),
            num_warps=WARPS,
        )  # fmt: skip
    return outputs


if triton is not None:
    from triton import language as tl

    from visual_spec.kernels.draw import race
    from visual_spec.kernels.law import (
        filter_law,
        guided_logits,
        is_finite,
        logits_row,
        mass_from,
        tile_ids,
    )
    from visual_spec.kernels.philox import uniform_scalar, uniform_tile

    @triton.jit
    def _log_law(scores, ids, least, peak, best, log_mass, GREEDY: tl.constexpr):
        """Return the log-probabilities of ids with these logits."""
        infinity = float("inf")
        if GREEDY:
            law = tl.where(ids == best, 0.0, -infinity)
        else:
            law = tl.where(scores >= least, scores - peak - log_mass, -infinity)
        return law

    @triton.jit
    def _label_at(label_row, ids, inside, draft, kind, log_allowed):
        """Log-probabilities of ids under the law that the draft is labelled with; -inf for ids that are not inside.

        The kinds are the module's: 0 and above a stored law, -1 no draft, -2 a point law, -3 the uniform law.
        """
        label = tl.load(label_row + ids, mask=inside & (kind >= 0), other=-float("inf"))
        label = tl.where((kind == -2) & (ids == draft), 0.0, label)
        return tl.where((kind == -3) & inside, -log_allowed, label)

    @triton.jit
    def _verify_kernel(
        laws, accept, tokens, drawn, finite, logits, drafts, stored_laws, draft_laws, keys, slots, round, draw_round,
        batch_size, window, row_stride, column_stride, law_row_stride, law_column_stride, vocab_size, first, stop,
        scale, inverse, top_k, top_p, until, log_allowed, ACCEPT_STREAM: tl.constexpr, RESIDUAL_STREAM: tl.constexpr,
        DRAW_STREAM: tl.constexpr, GUIDED: tl.constexpr, GREEDY: tl.constexpr, TOP_K: tl.constexpr,
        TOP_P: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, ALL_TILES: tl.constexpr,
    ):  # fmt: skip
        infinity = float("inf")
        place = tl.program_id(0).to(tl.int64)  # sample * window + position
        sample = place // window
        key, slot, this_round = tl.load(keys + sample), tl.load(slots + place), tl.load(round)
        numbers = (first, stop, scale, inverse, top_k, top_p, until)
        row = logits_row(
            logits, sample, place % window, slot, batch_size, row_stride, column_stride, numbers, GUIDED
        )
        least, peak, best = filter_law(row, numbers, GUIDED, GREEDY, TOP_K, TOP_P, True, TILE, TILES)
        log_mass = 0.0
        if not GREEDY:
            log_mass = tl.log(mass_from(row, least, peak, GUIDED, TILE, TILES))

        # The test.
        kind = tl.load(draft_laws + place)
        draft = tl.load(drafts + place)
        label_row = stored_laws + sample * law_row_stride + tl.where(kind >= 0, kind, 0) * law_column_stride
        score, _, _ = guided_logits(row, draft, kind != -1, GUIDED)
        own = _log_law(score, draft, least, peak, best, log_mass, GREEDY)
        label = _label_at(label_row, draft, draft >= 0, draft, kind, log_allowed)
        chance = uniform_scalar(key, slot, this_round, 4294967295, ACCEPT_STREAM)
        kept = (kind != -1) & (draft >= first) & (draft < stop) & (chance < tl.exp(own - label))

        BLOCKS: tl.constexpr = TILE // 4
        seen = tl.full([BLOCKS, 4], -infinity, tl.float32)
        other = tl.full([BLOCKS, 4], -infinity, tl.float32)
        soonest = infinity
        winner = -1
        draw_soonest = infinity
        draw_winner = -1
        for tile in range(ALL_TILES):
            start = tile * TILE
            ids = tile_ids(start, BLOCKS)
            inside = (ids >= first) & (ids < stop)
            scores, seen_here, other_here = guided_logits(row, ids, inside, GUIDED)
            seen, other = tl.maximum(seen, seen_here), tl.maximum(other, other_here)
            law = _log_law(scores, ids, least, peak, best, log_mass, GREEDY)
            tl.store(laws + place * vocab_size + ids, law, mask=ids < vocab_size)
            if DRAW_STREAM >= 0:
                uniform = uniform_tile(key, slot, tl.load(draw_round), start, DRAW_STREAM, BLOCKS)
                draw_soonest, draw_winner = race(uniform, law, ids, draw_soonest, draw_winner, True)
            if not kept:
                label_here = _label_at(label_row, ids, inside, draft, kind, log_allowed)
                excess = tl.maximum(tl.exp(law) - tl.exp(label_here), 0.0)
                uniform = uniform_tile(key, slot, this_round, start, RESIDUAL_STREAM, BLOCKS)
                soonest, winner = race(uniform, excess, ids, soonest, winner, False)
        if (not kept) & (winner < 0):
            # Equal laws: the draft was refused only by rounding, and the residual is the law.
            for tile in range(TILES):
                start = first // 4 * 4 + tile * TILE
                ids = tile_ids(start, BLOCKS)
                scores, seen_here, other_here = guided_logits(row, ids, (ids >= first) & (ids < stop), GUIDED)
                law = _log_law(scores, ids, least, peak, best, log_mass, GREEDY)
                uniform = uniform_tile(key, slot, this_round, start, RESIDUAL_STREAM, BLOCKS)
                soonest, winner = race(uniform, law, ids, soonest, winner, True)
        tl.store(accept + place, kept)
        tl.store(tokens + place, tl.where(kept, draft, tl.maximum(winner, first).to(tl.int64)))
        if DRAW_STREAM >= 0:
            tl.store(drawn + place, tl.maximum(draw_winner, first).to(tl.int64))
        tl.store(finite + place, is_finite(seen, other))
