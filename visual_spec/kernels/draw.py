"""One kernel from logits to the token that a slot's own noise draws from its law.

The chain of `TokenLaw` and `CounterNoise.categorical` (guidance, temperature, top-k, top-p, Gumbel race) writes and
reads B x W x V numbers a dozen times. Here they stay in registers. One program serves one slot and passes over its
logits

    once                without filters; the race needs no normaliser;
    1 + s + 1 times     with top-k or top-p: once for the smallest and the largest logit, s times for the threshold
                        (`law.least_kept`), once for the race.

Where slots are few and the vocabulary is large, `split_draw` takes its place: it gives the same tokens.

Results equal the reference except for rounding: a race that ties to within a few units in the last place may
go either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import launcher, most_registers, on_gpu, rows_of_numbers, triton
from visual_spec.kernels.law import (
    TILE,
    WARPS,
    LawNumbers,
    as_round,
    check_logits,
    finite_reference,
    kernel_numbers,
    kernel_switches,
    largest_reference,
    law_reference,
    tiles,
)
from visual_spec.kernels.philox import philox_log_exponential
from visual_spec.kernels.split_draw import split_draw_triton, splits


def draw(
    logits: Tensor,
    keys: Tensor,
    slots: Tensor,
    law: LawNumbers,
    *,
    stream: int,
    round: int | Tensor = 0,
    margins: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens from the laws of a window: argmax(law + gumbel), with the noise of `CounterNoise`.

    Args:
        logits: [R, W, V] in float32, bfloat16 or float16; R = 2B when guided (B conditional rows first), else B.
        keys: int64 [B].
        slots: int64 [B, W], the slots that the positions predict.
        law: turns logits into laws.
        stream, round: address of the noise; the round is an int, or an int64 tensor of shape [] on the device.
        margins: also return by how much the best score exceeds the second best, in units of the largest logit, that of
            both rows as guidance enlarges them (`law.largest_reference`): rounding moves scores by so much.

    Returns:
        Tokens, long [B, W], always within the allowed ids; BoolTensor [B, W], False where the logits define no law
        (nan, +inf, or all -inf in one of the rows), which the caller must refuse; and the margins, float32 [B, W], inf
        where one token is certain, or [0] if they were not asked for. On CUDA by the Triton kernel, elsewhere by
        `draw_reference`.

    Raises:
        ValueError: the shapes do not fit each other.
        TypeError: the logits have another dtype.
    """
    check_logits(logits, keys, slots, law)
    # Round 0, of a slot's own noise, needs no tensor: filling one would be a launch.
    first = isinstance(round, int) and round == 0
    return _draw_op(logits, keys, slots, None if first else as_round(round, slots), stream, *law, margins)


def categorical_reference(
    log_probs: Tensor, keys: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0
) -> Tensor:
    """Draw tokens from laws [B, W, V] by the Gumbel-max rule, argmax(log_probs + gumbel): long [B, W].

    In PyTorch, on any device. It runs as a race: each token has an exponential time, divided by its probability, and
    the least time wins. See `CounterNoise.categorical`.
    """
    noise = philox_log_exponential(keys, slots, log_probs.shape[-1], stream, round, log_probs.dtype)
    return noise.sub_(log_probs).argmin(-1)


def race_reference(
    log_probs: Tensor, keys: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0
) -> tuple[Tensor, Tensor]:
    """As `categorical_reference`, and the margin of every winner: how much later the second token is, [B, W]."""
    times = philox_log_exponential(keys, slots, log_probs.shape[-1], stream, round, log_probs.dtype)
    times.sub_(log_probs)
    if times.shape[-1] == 1:
        return times.argmin(-1), torch.full_like(times[..., 0], torch.inf)
    first, second = times.topk(2, -1, largest=False).values.unbind(-1)
    return times.argmin(-1), second - first


def draw_reference(
    logits: Tensor,
    keys: Tensor,
    slots: Tensor,
    round: Tensor | None,
    stream: int,
    law: LawNumbers,
    margins: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `draw`, in PyTorch, on any device; no round is round 0."""
    target = law_reference(logits, slots, law)
    at = 0 if round is None else round
    if margins:
        tokens, margin = race_reference(target, keys, slots, stream, at)
        inside = logits[..., law.first : law.stop]
        largest = largest_reference(inside, law.guided, law.guidance_scale)
        margin = torch.where(margin > 0, margin / largest, margin)
    else:
        tokens = categorical_reference(target, keys, slots, stream, at)
        margin = target.new_empty(0)
    return tokens.clamp(law.first, law.stop - 1), finite_reference(logits, law), margin


@triton_op("visual_spec::draw", mutates_args=())
def _draw_op(
    logits: Tensor, keys: Tensor, slots: Tensor, round: Tensor | None, stream: int, guided: bool,
    guidance_scale: float, temperature: float, top_k: int, top_p: float, first: int, stop: int, guidance_until: int,
    margins: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    law = LawNumbers(guided, guidance_scale, temperature, top_k, top_p, first, stop, guidance_until)
    if not on_gpu(logits):
        return draw_reference(logits, keys, slots, round, stream, law, margins)
    return draw_triton(logits, keys, slots, round, stream, law, margins)


@_draw_op.register_fake
def _draw_outputs(logits: Tensor, keys: Tensor, slots: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    margins = len(rest) == 11 and rest[-1]  # the last argument of the operator, and optional
    margin = torch.empty_like(slots, dtype=torch.float32) if margins else logits.new_empty(0).float()
    return torch.empty_like(slots), torch.empty_like(slots, dtype=torch.bool), margin


def draw_triton(
    logits: Tensor,
    keys: Tensor,
    slots: Tensor,
    round: Tensor | None,
    stream: int,
    law: LawNumbers,
    margins: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`draw` by Triton: one kernel, or the two of `split_draw`."""
    run = split_draw_triton if splits(slots.numel(), law) else whole_draw_triton
    return run(logits, keys, slots, round, stream, law, margins)


def whole_draw_triton(
    logits: Tensor,
    keys: Tensor,
    slots: Tensor,
    round: Tensor | None,
    stream: int,
    law: LawNumbers,
    margins: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`draw` by the Triton kernel that serves a slot with one program."""
    slots = slots.contiguous()
    tokens, finite, margin = _draw_outputs(logits, keys, slots, round, stream, *law, margins)
    if slots.numel() == 0:
        return tokens, finite, margin
    logits = rows_of_numbers(logits)
    with torch.cuda.device_of(logits):
        launcher(_draw_kernel)[(slots.numel(),)](
            tokens, finite, margin, logits, keys.contiguous(), slots, slots if round is None else round, *slots.shape,
            logits.stride(0), logits.stride(1), *kernel_numbers(law), STREAM=stream, ROUNDS=round is not None,
            MARGINS=margins, **kernel_switches(law), TILE=TILE, TILES=tiles(law, TILE), num_warps=WARPS,
            **(most_registers(_draw_kernel, 80) if margins else {}),
        )  # fmt: skip
    return tokens, finite, margin


if triton is not None:
    from triton import language as tl

    from visual_spec.kernels.law import (
        filter_law,
        guided_logits,
        is_finite,
        largest_of,
        logits_row,
        relative,
        tile_ids,
    )
    from visual_spec.kernels.philox import log_exponential, uniform_tile

    @triton.jit
    def race(uniform, weights, ids, soonest, winner, LOGS: tl.constexpr):
        """The winner of a tile before `soonest`: the time log(exponential) - log(weight), and the id, -1 for none.

        Times are logarithms, as in `CounterNoise.categorical`; weights are logarithms if LOGS.
        """
        # -log(1 - u) >= u, so a token whose u alone is too late cannot win. This spares nearly all tiles the
        # logarithms, which are most of the work. The factor 1.01 far exceeds the rounding errors.
        if LOGS:
            gate = tl.exp(soonest + weights)
        else:
            gate = tl.exp(soonest) * weights
        if tl.max(tl.max((uniform < 1.01 * gate).to(tl.int32), 1), 0) > 0:
            log_weights = weights
            if not LOGS:
                log_weights = tl.log(weights)
            time = log_exponential(uniform) - log_weights
            first = tl.min(tl.min(time, 1), 0)
            if first < soonest:
                soonest = first
                winner = tl.min(tl.min(tl.where(time == first, ids, 2147483647), 1), 0)
        return soonest, winner

    @triton.jit
    def race_of_two(uniform, log_weights, ids, soonest, second, winner):
        """As `race` with logarithms, and the time of the second token."""
        gate = tl.exp(second + log_weights)
        if tl.max(tl.max((uniform < 1.01 * gate).to(tl.int32), 1), 0) > 0:
            time = log_exponential(uniform) - log_weights
            first = tl.min(tl.min(time, 1), 0)
            best = tl.min(tl.min(tl.where(time == first, ids, 2147483647), 1), 0)
            runner_up = tl.min(tl.min(tl.where(ids == best, float("inf"), time), 1), 0)
            if first < soonest:
                second = tl.minimum(soonest, runner_up)
                soonest = first
                winner = best
            else:
                second = tl.minimum(second, first)
        return soonest, second, winner

    @triton.jit
    def _draw_kernel(
        tokens, finite, margin, logits, keys, slots, round, batch_size, window, row_stride, column_stride, first,
        stop, scale, inverse, top_k, top_p, until, STREAM: tl.constexpr, ROUNDS: tl.constexpr, MARGINS: tl.constexpr,
        GUIDED: tl.constexpr, GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, TILE: tl.constexpr,
        TILES: tl.constexpr,
    ):  # fmt: skip
        infinity = float("inf")
        place = tl.program_id(0).to(tl.int64)  # sample * window + position
        sample = place // window
        key, slot = tl.load(keys + sample), tl.load(slots + place)
        at_round = 0
        if ROUNDS:
            at_round = tl.load(round)
        numbers = (first, stop, scale, inverse, top_k, top_p, until)
        row = logits_row(
            logits, sample, place % window, slot, batch_size, row_stride, column_stride, numbers, GUIDED
        )
        least, _, best = filter_law(row, numbers, GUIDED, GREEDY, TOP_K, TOP_P, False, TILE, TILES)
        BLOCKS: tl.constexpr = TILE // 4
        seen = tl.full([BLOCKS, 4], -infinity, tl.float32)
        other = tl.full([BLOCKS, 4], -infinity, tl.float32)
        soonest = infinity
        second = infinity
        winner = -1
        largest = 0.0
        largest_without = 0.0
        for tile in range(TILES):
            start = first // 4 * 4 + tile * TILE
            ids = tile_ids(start, BLOCKS)
            scores, seen_here, other_here = guided_logits(row, ids, (ids >= first) & (ids < stop), GUIDED)
            seen, other = tl.maximum(seen, seen_here), tl.maximum(other, other_here)
            if GREEDY:
                scores = tl.where(ids == best, 0.0, -infinity)
            else:
                scores = tl.where(scores >= least, scores, -infinity)
            uniform = uniform_tile(key, slot, at_round, start, STREAM, BLOCKS)
            if MARGINS:
                largest = tl.maximum(largest, largest_of(seen_here))
                largest_without = tl.maximum(largest_without, largest_of(other_here))
                soonest, second, winner = race_of_two(uniform, scores, ids, soonest, second, winner)
            else:
                soonest, winner = race(uniform, scores, ids, soonest, winner, True)
        # Logits that define no law have no winner, but the model must still be fed a token.
        tl.store(tokens + place, tl.maximum(winner, first).to(tl.int64))
        tl.store(finite + place, is_finite(seen, other))
        if MARGINS:
            tl.store(margin + place, relative(second - soonest, largest, largest_without, scale, GUIDED))
