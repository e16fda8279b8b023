"""`draw` for few slots and large vocabularies: a slot's tokens are split over programs, in two launches.

    split    a program serves the tokens of one chunk: their scores (guidance, temperature), their times in the race of
             `CounterNoise.categorical`, and of the chunk the extent, the soonest token and the second
    merge    a program serves one slot: the soonest of all chunks, if the filters keep it

The threshold of top-k or top-p is not searched for, one filter at a time. Both keep a token if what scores higher,
by number or by mass, is below a limit. So the merge asks it of the soonest token alone, which is a draw from the law
without filters, and passes once over the scores. If the token is refused, the next one to ask is the soonest of those
that score higher: whatever scores as much or less is refused as well. A law whose filters keep the mass m is asked
1 / m times or less on average, and the refused scores rise, so it ends. With both filters the limit of top-p depends on
the mass that top-k leaves, and the threshold of top-k is found as in `draw` (`law.least_kept`), from the scores.

Scores and times equal `draw`'s, and sums are added up in its order. So tokens and margins are its own, bit by bit,
and a sample does not depend on how many slots share a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_spec.kernels.launch import launcher, most_registers, rows_of_numbers, triton
from visual_spec.kernels.law import TILE, WARPS, LawNumbers, kernel_numbers, kernel_switches, tiles

# Tokens of a program of the first launch, a multiple of 4 and a power of two, and its warps.
CHUNK, _CHUNK_WARPS = 1024, 4
# Fewer tokens are not worth a second launch. More slots fill a GPU with one program each, and the scores and times of
# all their tokens would not fit into its second-level cache.
_FEWEST_TOKENS, _MOST_SLOTS = 4096, 256


def splits(slots: int, law: LawNumbers) -> bool:
    """Return whether to split the vocabulary for so many slots of this law."""
    return 0 < slots <= _MOST_SLOTS and law.stop - law.first >= _FEWEST_TOKENS


def split_draw_triton(
    logits: Tensor,
    keys: Tensor,
    slots: Tensor,
    round: Tensor | None,
    stream: int,
    law: LawNumbers,
    margins: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`draw` by the two Triton kernels; there must be a slot."""
    slots, logits = slots.contiguous(), rows_of_numbers(logits)
    tokens, finite = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.bool)
    count, chunks, switches = slots.numel(), tiles(law, CHUNK), kernel_switches(law)
    margin = torch.empty(slots.shape if margins else 0, dtype=torch.float32, device=slots.device)
    filtered = switches["TOP_K"] or switches["TOP_P"]
    numbers = logits.new_empty(8 if margins else 6, count, chunks, dtype=torch.float32)
    ids = logits.new_empty(2, count, chunks, dtype=torch.int32)
    # Score and time of every token, from the multiple of 4 at or before the first.
    raced = logits.new_empty(2, count if filtered else 0, chunks * CHUNK, dtype=torch.float32)
    between = raced, numbers, ids
    with torch.cuda.device_of(logits):
        launcher(_split_kernel)[(count, chunks)](
            *between, logits, keys.contiguous(), slots, slots if round is None else round, *slots.shape,
            logits.stride(0), logits.stride(1), *kernel_numbers(law), STREAM=stream, ROUNDS=round is not None,
            MARGINS=margins, GUIDED=switches["GUIDED"], GREEDY=switches["GREEDY"], FILTERED=filtered, CHUNK=CHUNK,
            CHUNKS=chunks, num_warps=_CHUNK_WARPS,
        )  # fmt: skip
        most = 96 if margins and switches["TOP_K"] and switches["TOP_P"] else 64
        enough = most_registers(_merge_kernel, most) if filtered else {}
        launcher(_merge_kernel)[(count,)](
            tokens, finite, margin, *between, law.first, law.stop, law.guidance_scale, *kernel_numbers(law)[4:6],
            MARGINS=margins, **switches, CHUNK=CHUNK, CHUNKS=chunks,
            PADDED=1 << (chunks - 1).bit_length(), TILE=TILE, TILES=tiles(law, TILE),
            num_warps=WARPS if filtered else 1, **enough,
        )  # fmt: skip
    return tokens, finite, margin


if triton is not None:
    from triton import language as tl

    from visual_spec.kernels.law import (
        guided_logits,
        is_finite,
        largest_of,
        least_kept,
        logits_row,
        mass_from,
        relative,
        tile_ids,
    )
    from visual_spec.kernels.philox import log_exponential, uniform_tile

    @triton.jit
    def _split_kernel(
        raced, numbers, ids, logits, keys, slots, round, batch_size, window, row_stride, column_stride, first, stop,
        scale, inverse, top_k, top_p, until, STREAM: tl.constexpr, ROUNDS: tl.constexpr, MARGINS: tl.constexpr,
        GUIDED: tl.constexpr, GREEDY: tl.constexpr, FILTERED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    ):  # fmt: skip
        """Scores and times of one chunk of a slot, if they are FILTERED, and what the merge needs of it."""
        infinity = float("inf")
        nobody = 2147483647
        BLOCKS: tl.constexpr = CHUNK // 4
        place = tl.program_id(0).to(tl.int64)  # sample * window + position
        sample = place // window
        slot = tl.load(slots + place)
        law = (first, stop, scale, inverse, top_k, top_p, until)
        row = logits_row(
            logits, sample, place % window, slot, batch_size, row_stride, column_stride, law, GUIDED
        )
        start = first // 4 * 4 + tl.program_id(1) * CHUNK
        token = tile_ids(start, BLOCKS)
        scores, seen, other = guided_logits(row, token, (token >= first) & (token < stop), GUIDED)
        slots_behind = tl.num_programs(0).to(tl.int64) * CHUNKS  # from one kind of number to the next
        to = place * CHUNKS + tl.program_id(1)
        low = tl.min(tl.min(tl.where(scores > -infinity, scores, infinity), 1), 0)
        high = tl.max(tl.max(tl.where(scores > -infinity, scores, -infinity), 1), 0)
        tl.store(numbers + to, low)
        tl.store(numbers + slots_behind + to, high)
        tl.store(numbers + 2 * slots_behind + to, tl.max(tl.max(seen, 1), 0))
        tl.store(numbers + 3 * slots_behind + to, tl.max(tl.max(other, 1), 0))
        best = tl.min(tl.min(tl.where(scores == high, token, nobody), 1), 0)
        tl.store(ids + to, best)
        if not GREEDY:
            at_round = 0
            if ROUNDS:
                at_round = tl.load(round)
            uniform = uniform_tile(tl.load(keys + sample), slot, at_round, start, STREAM, BLOCKS)
            time = tl.where(scores > -infinity, log_exponential(uniform) - scores, infinity)
            soonest = tl.min(tl.min(time, 1), 0)
            winner = tl.min(tl.min(tl.where(time == soonest, token, nobody), 1), 0)
            tl.store(numbers + 4 * slots_behind + to, soonest)
            tl.store(ids + slots_behind + to, tl.where(soonest < infinity, winner, -1))
            if MARGINS:
                second = tl.min(tl.min(tl.where(token == winner, infinity, time), 1), 0)
                tl.store(numbers + 5 * slots_behind + to, second)
                tl.store(numbers + 6 * slots_behind + to, largest_of(seen))
                tl.store(numbers + 7 * slots_behind + to, largest_of(other))
            if FILTERED:
                at = raced + to * CHUNK + (token - start)
                tl.store(at, scores)
                tl.store(at + slots_behind * CHUNK, time)

    @triton.jit
    def weight_above(row, level, peak, BY_MASS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
        """In one pass, return the number of scores above a level, or their mass in units of the peak."""
        total = tl.zeros([TILE], tl.float32)
        for tile in range(TILES):
            ids = row[2] // 4 * 4 + tile * TILE + tl.arange(0, TILE)
            scores, _, _ = guided_logits(row, ids, (ids >= row[2]) & (ids < row[3]), False)
            weight = tl.full([TILE], 1.0, tl.float32)
            if BY_MASS:
                weight = tl.exp(scores - peak)
            total += tl.where(scores > level, weight, 0.0)
        return tl.sum(total)

    @triton.jit
    def soonest_above(row, times, floor, besides, TILE: tl.constexpr, TILES: tl.constexpr):
        """In one pass, return the soonest time above a score, and whose, but of `besides`; inf and -1 for none."""
        infinity = float("inf")
        soonest = tl.full([TILE], infinity, tl.float32)
        holder = tl.full([TILE], -1, tl.int32)
        for tile in range(TILES):
            ids = row[2] // 4 * 4 + tile * TILE + tl.arange(0, TILE)
            inside = (ids >= row[2]) & (ids < row[3])
            scores, _, _ = guided_logits(row, ids, inside, False)
            time = tl.load(times + ids, mask=inside, other=infinity)
            time = tl.where((scores > floor) & (ids != besides), time, infinity)
            holder = tl.where(time < soonest, ids, holder)
            soonest = tl.minimum(soonest, time)
        first = tl.min(soonest)
        return first, tl.min(tl.where(soonest == first, holder, 2147483647))

    @triton.jit
    def score_of(row, token):
        """Return the score of a token; inf for -1, as if it were kept, so that nothing is asked further."""
        return tl.load(row[0] + token, mask=token >= 0, other=float("inf"))

    @triton.jit
    def _soonest_kept(
        row, times, low, peak, soonest, winner, top_k, top_p, MARGINS: tl.constexpr, TOP_K: tl.constexpr,
        TOP_P: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        """Return the soonest time of a token that the filters keep, whose, and the second; given the soonest of all."""
        limit = top_k
        if TOP_P:
            least = low
            if TOP_K:
                least = least_kept(row, low, peak, top_k, False, False, TILE, TILES)
            limit = top_p * mass_from(row, least, peak, False, TILE, TILES)
        floor = -float("inf")
        level = score_of(row, winner)
        above = weight_above(row, level, peak, TOP_P, TILE, TILES)
        while above >= limit:
            floor = level
            soonest, winner = soonest_above(row, times, floor, -1, TILE, TILES)
            level = score_of(row, winner)
            above = weight_above(row, level, peak, TOP_P, TILE, TILES)
        second = float("inf")
        if MARGINS:
            second, runner = soonest_above(row, times, floor, winner, TILE, TILES)
            score = score_of(row, runner)
            above = weight_above(row, score, peak, TOP_P, TILE, TILES)
            while (score < level) & (above >= limit):
                second, runner = soonest_above(row, times, score, winner, TILE, TILES)
                score = score_of(row, runner)
                above = weight_above(row, score, peak, TOP_P, TILE, TILES)
        return soonest, winner, second

    @triton.jit
    def _merge_kernel(
        tokens, finite, margin, raced, numbers, ids, first, stop, scale, top_k, top_p, MARGINS: tl.constexpr,
        GUIDED: tl.constexpr, GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, CHUNK: tl.constexpr,
        CHUNKS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        """The winner of one slot from what the split kernel found in its chunks."""
        infinity = float("inf")
        nobody = 2147483647
        place = tl.program_id(0).to(tl.int64)
        chunk = tl.arange(0, PADDED)
        there = chunk < CHUNKS
        at = place * CHUNKS + chunk
        slots_behind = tl.num_programs(0).to(tl.int64) * CHUNKS
        high = tl.load(numbers + slots_behind + at, mask=there, other=-infinity)
        seen = tl.load(numbers + 2 * slots_behind + at, mask=there, other=-infinity)
        other = tl.load(numbers + 3 * slots_behind + at, mask=there, other=-infinity)
        tl.store(finite + place, is_finite(seen[:, None], other[:, None]))
        peak = tl.max(high, 0)
        if GREEDY:
            best = tl.load(ids + at, mask=there, other=nobody)
            winner = tl.min(tl.where(high == peak, best, nobody), 0)
            winner = tl.where(peak > -infinity, winner, first)
            soonest = 0.0
            second = infinity
        else:
            sooner = tl.load(numbers + 4 * slots_behind + at, mask=there, other=infinity)
            winners = tl.load(ids + slots_behind + at, mask=there, other=nobody)
            soonest = tl.min(sooner, 0)
            winner = tl.min(tl.where(sooner == soonest, winners, nobody), 0)
            second = infinity
            if MARGINS:
                runner_up = tl.load(numbers + 5 * slots_behind + at, mask=there, other=infinity)
                second = tl.min(tl.where(winners == winner, runner_up, sooner), 0)
        if TOP_K or TOP_P:
            own = raced + place * (CHUNKS * CHUNK) - first // 4 * 4
            row = (own, own, first, stop, 1.0, 1.0, place < 0)
            low = tl.min(tl.load(numbers + at, mask=there, other=infinity), 0)
            soonest, winner, second = _soonest_kept(
                row, own + slots_behind * CHUNK, low, peak, soonest, winner, top_k, top_p, MARGINS, TOP_K, TOP_P,
                TILE, TILES,
            )  # fmt: skip
        tl.store(tokens + place, tl.maximum(winner, first).to(tl.int64))
        if MARGINS:
            largest = 0.0
            largest_without = 0.0
            if not GREEDY:
                largest = tl.max(tl.load(numbers + 6 * slots_behind + at, mask=there, other=0.0), 0)
                largest_without = tl.max(tl.load(numbers + 7 * slots_behind + at, mask=there, other=0.0), 0)
            tl.store(margin + place, relative(second - soonest, largest, largest_without, scale, GUIDED))
