"""One kernel for each position of a masked decoder: a token drawn from the law, and its log-probability.

Masked decoders (MaskGIT, Chang et al., CVPR 2022; MAGNeT, Ziv et al., ICLR 2024) draw all open positions at every step
and keep the most confident draws. Guidance, temperature, filters and race are as in `draw`. The pass of the race
also sums the mass, and needs one extra pass for the largest logit.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.draw import categorical_reference
from visual_spec.kernels.launch import launcher, on_gpu, rows_of_numbers, triton
from visual_spec.kernels.law import (
    TILE,
    WARPS,
    LawNumbers,
    as_round,
    check_logits,
    finite_reference,
    kernel_numbers,
    kernel_switches,
    law_reference,
    tiles,
    unfiltered_reference,
)


def masked_sample(
    logits: Tensor, keys: Tensor, slots: Tensor, law: LawNumbers, *, stream: int, round: int | Tensor = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw tokens from the laws of some positions, with their log-probabilities.

    Args:
        logits, keys, slots, law, stream, round: as in `draw`; `slots` are the positions.

    Returns:
        tokens: long [B, W], as from `draw`.
        log_probs: float32 [B, W], of the tokens under the law.
        log_kept: float32 [B, W], log of the mass that the filters keep of the law after guidance and temperature: 0
            without top-k and top-p, and at temperature 0 the mass of the likeliest token at temperature 1.
            log_probs + log_kept is the log-probability before the filters, MAGNeT's confidence.
        finite: BoolTensor [B, W], as from `draw`.
        On CUDA by the Triton kernel, elsewhere by `masked_sample_reference`.

    Raises:
        ValueError, TypeError: as in `draw`.
    """
    check_logits(logits, keys, slots, law)
    return _masked_sample_op(logits, keys, slots, as_round(round, slots), stream, *law)


def masked_sample_reference(
    logits: Tensor, keys: Tensor, slots: Tensor, round: Tensor, stream: int, law: LawNumbers
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The definition of `masked_sample`, in PyTorch, on any device."""
    target = law_reference(logits, slots, law)  # [B, W, V]
    tokens = categorical_reference(target, keys, slots, stream, round).clamp(law.first, law.stop - 1)
    at = tokens[..., None]
    log_probs = target.gather(-1, at).squeeze(-1)
    whole = unfiltered_reference(logits, slots, law, target)
    log_kept = whole.gather(-1, at).squeeze(-1) - log_probs
    return tokens, log_probs, log_kept, finite_reference(logits, law)


@triton_op("visual_spec::masked_sample", mutates_args=())
def _masked_sample_op(
    logits: Tensor, keys: Tensor, slots: Tensor, round: Tensor, stream: int, guided: bool, guidance_scale: float,
    temperature: float, top_k: int, top_p: float, first: int, stop: int, guidance_until: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    law = LawNumbers(guided, guidance_scale, temperature, top_k, top_p, first, stop, guidance_until)
    by = masked_sample_triton if on_gpu(logits) else masked_sample_reference
    return by(logits, keys, slots, round, stream, law)


@_masked_sample_op.register_fake
def _masked_sample_outputs(
    logits: Tensor, keys: Tensor, slots: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = partial(torch.empty_like, slots)
    return like(), like(dtype=torch.float32), like(dtype=torch.float32), like(dtype=torch.bool)


def masked_sample_triton(
    logits: Tensor, keys: Tensor, slots: Tensor, round: Tensor, stream: int, law: LawNumbers
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`masked_sample` by the Triton kernel."""
    slots = slots.contiguous()
    tokens, log_probs, log_kept, finite = _masked_sample_outputs(logits, keys, slots)
    if slots.numel() == 0:
        return tokens, log_probs, log_kept, finite
    logits = rows_of_numbers(logits)
    with torch.cuda.device_of(logits):
        launcher(_masked_kernel)[(slots.numel(),)](
            tokens, log_probs, log_kept, finite, logits, keys.contiguous(), slots, round, *slots.shape,
            logits.stride(0), logits.stride(1), *kernel_numbers(law), STREAM=stream, **kernel_switches(law),
            TILE=TILE, TILES=tiles(law, TILE), num_warps=WARPS,
        )  # fmt: skip
    return tokens, log_probs, log_kept, finite


if triton is not None:
    from triton import language as tl

    from visual_spec.kernels.draw import race
    from visual_spec.kernels.law import filter_law, guided_logits, is_finite, logits_row, tile_ids
    from visual_spec.kernels.philox import uniform_tile

    @triton.jit
    def _masked_kernel(
        tokens, log_probs, log_kept, finite, logits, keys, slots, round, batch_size, window, row_stride,
        column_stride, first, stop, scale, inverse, top_k, top_p, until, STREAM: tl.constexpr, GUIDED: tl.constexpr,
        GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        infinity = float("inf")
        place = tl.program_id(0).to(tl.int64)  # sample * window + position
        sample = place // window
        key, slot, at_round = tl.load(keys + sample), tl.load(slots + place), tl.load(round)
        numbers = (first, stop, scale, inverse, top_k, top_p, until)
        row = logits_row(
            logits, sample, place % window, slot, batch_size, row_stride, column_stride, numbers, GUIDED
        )
        least, peak, best = filter_law(row, numbers, GUIDED, GREEDY, TOP_K, TOP_P, True, TILE, TILES)
        BLOCKS: tl.constexpr = TILE // 4
        seen = tl.full([BLOCKS, 4], -infinity, tl.float32)
        other = tl.full([BLOCKS, 4], -infinity, tl.float32)
        kept = tl.zeros([BLOCKS, 4], tl.float32)
        whole = tl.zeros([BLOCKS, 4], tl.float32)
        soonest = infinity
        winner = -1
        for tile in range(TILES):
            start = first // 4 * 4 + tile * TILE
            ids = tile_ids(start, BLOCKS)
            scores, seen_here, other_here = guided_logits(row, ids, (ids >= first) & (ids < stop), GUIDED)
            seen, other = tl.maximum(seen, seen_here), tl.maximum(other, other_here)
            mass = tl.exp(scores - peak)
            whole += mass
            if GREEDY:
                scores = tl.where(ids == best, 0.0, -infinity)
            else:
                kept += tl.where(scores >= least, mass, 0.0)
                scores = tl.where(scores >= least, scores, -infinity)
            uniform = uniform_tile(key, slot, at_round, start, STREAM, BLOCKS)
            soonest, winner = race(uniform, scores, ids, soonest, winner, True)
        token = tl.maximum(winner, first)
        all_mass = tl.log(tl.sum(tl.sum(whole, 1), 0))
        log_prob = 0.0
        kept_here = -all_mass  # greedy: only the peak is kept, of mass 1
        if not GREEDY:
            score, _, _ = guided_logits(row, token, winner >= 0, GUIDED)
            total = tl.log(tl.sum(tl.sum(kept, 1), 0))
            log_prob = score - peak - total
            kept_here = 0.0
            if TOP_K or TOP_P:
                kept_here = total - all_mass
        tl.store(tokens + place, token.to(tl.int64))
        tl.store(log_probs + place, log_prob)
        tl.store(log_kept + place, kept_here)
        tl.store(finite + place, is_finite(seen, other))
