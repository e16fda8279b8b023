"""The law of a token: its one definition, in PyTorch, and the parts that all kernels of laws share.

`law_reference` is what `samplers.core.law.TokenLaw` computes, on every device. Kernels that draw from a law or test
drafts against it do not compute the whole law: they find the threshold of top-k and top-p, and compare with it.

The search for the threshold (`least_kept`) does not sort. It quarters its interval by counting the logits above, until
the interval holds one value: s passes over the logits, 4 to 6 for bfloat16 and 6 to 9 for float32, at V = 16384 and
65536. With both filters there are two searches, and one more pass sums the mass that top-k leaves. The logits are read
from memory once; later passes find the row, a few hundred KiB, in the caches. Kernels compute in float32; a logit that
ties with the threshold to within a few units in the last place may fall on either side of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from visual_spec.kernels.launch import on_host, triton

# Tokens that a program handles together, and its warps: there are few programs, so each should fill a multiprocessor.
TILE = 2048
WARPS = 16
EVERY_SLOT = 2**31 - 1  # `guidance_until` of a law that guides every slot
# Values in place of the number of a stored draft law.
NO_DRAFT = -1
POINT_LAW = -2  # all mass on the draft
UNIFORM_LAW = -3  # over the allowed ids


class LawNumbers(NamedTuple):
    """A `TokenLaw` in plain numbers.

    Attributes:
        guided: whether the logits hold unconditional rows.
        guidance_scale, temperature, top_k, top_p: as in `TokenLaw`.
        first, stop: the allowed ids, half-open.
        guidance_until: slots from this one on are not guided; `EVERY_SLOT` guides all.
    """

    guided: bool
    guidance_scale: float
    temperature: float
    top_k: int
    top_p: float
    first: int
    stop: int
    guidance_until: int = EVERY_SLOT

    def unfiltered(self) -> LawNumbers:
        """The law before top-k and top-p. Greedy decoding also counts as a filter: without it, temperature is 1."""
        return self._replace(top_k=0, top_p=1.0, temperature=self.temperature or 1.0)


# ------------------------------------------------------------------------------------------------------ the definition


def law_reference(logits: Tensor, slots: Tensor | None, law: LawNumbers, *, finite: bool = False) -> Tensor:
    """Return the law at every position of a window, in PyTorch, on any device.

    Guidance, allowed ids, temperature, top-k, top-p, in this order, then normalised; see `TokenLaw`.

    Args:
        logits: [R, W, V]; R = 2B when guided (B conditional rows, then B unconditional ones), else B.
        slots: long [B, W], the slots that the positions predict; may be None if every slot or no slot is guided.
        law: the law's numbers.
        finite: whether all logits are known to be finite; so nobody looks for forbidden tokens.

    Returns:
        Log-probabilities [B, W, V], -inf outside the support; float64 for float64 logits, else float32.
    """
    scores = logits[..., law.first : law.stop]  # [R, W, stop - first]
    if scores.dtype != torch.float64:
        scores = scores.float()
    if law.guided:
        scores = mixed_logits(scores, slots, law, finite=finite)  # [B, W, stop - first]
    log_probs = _greedy(scores) if law.temperature == 0 else _filter(scores, law)
    vocab_size = logits.shape[-1]
    if law.stop - law.first == vocab_size:
        return log_probs
    full = log_probs.new_full((*log_probs.shape[:-1], vocab_size), -torch.inf)
    full[..., law.first : law.stop] = log_probs
    return full


def unfiltered_reference(logits: Tensor, slots: Tensor | None, law: LawNumbers, log_probs: Tensor) -> Tensor:
    """Return the law before its filters (`LawNumbers.unfiltered`), [B, W, V]; `log_probs` is the law itself."""
    whole = law.unfiltered()
    return log_probs if whole == law else law_reference(logits, slots, whole)


def non_finite(logits: Tensor) -> Tensor:
    """Return where logits [R, W, V] define no law (nan, +inf, or all -inf): BoolTensor [R, W]. No host sync."""
    # The maximum shows all three: nan propagates, +inf wins, and -inf remains only if there is nothing else.
    return ~logits.amax(-1).isfinite()


def finite_reference(logits: Tensor, law: LawNumbers) -> Tensor:
    """Return BoolTensor [B, W], False where a row of the logits [R, W, V] defines no law."""
    bad = non_finite(logits[..., law.first : law.stop])
    return ~(torch.stack(bad.chunk(2)).any(0) if law.guided else bad)


def largest_reference(logits: Tensor, guided: bool, scale: float) -> Tensor:
    """Return the largest finite logit in absolute value, of both rows as far as guidance enlarges them: [B, ...].

    Args:
        logits: [R, ..., V], raw, of the allowed ids.
        guided, scale: whether there are unconditional rows, and the guidance scale.
    """
    largest = logits.masked_fill(~logits.isfinite(), 0).abs().amax(-1).float()  # [R, ...]
    if not guided:
        return largest
    conditional, unconditional = largest.chunk(2)
    return scale * conditional + abs(scale - 1) * unconditional


def mixed_logits(logits: Tensor, slots: Tensor | None, law: LawNumbers, *, finite: bool = False) -> Tensor:
    """Return logits [B, W, V] under guidance, from logits [2B, W, V]; the others as in `law_reference`."""
    conditional, unconditional = logits.chunk(2)  # [B, W, V] each
    guided = (conditional - unconditional).mul_(law.guidance_scale).add_(unconditional)
    # -inf minus -inf is nan: a token that either row forbids stays forbidden. nan survives the minimum.
    # The host looks first: few logits forbid a token.
    if not (finite or (on_host(logits) and math.isfinite(float(logits.sum())))):
        guided.masked_fill_(torch.minimum(conditional, unconditional).isneginf(), -torch.inf)
    if law.guidance_until == EVERY_SLOT:
        return guided
    assert slots is not None
    # The conditional logits themselves: scale 1 would round them, and let the unconditional row forbid tokens.
    return torch.where((slots < law.guidance_until)[..., None], guided, conditional)


def _greedy(logits: Tensor) -> Tensor:
    best = logits.argmax(-1, keepdim=True)  # the first among ties
    return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0)


def _filter(logits: Tensor, law: LawNumbers) -> Tensor:
    if law.temperature != 1:
        logits = logits / law.temperature
    count = logits.shape[-1]
    top_k = min(law.top_k, count) or count
    if law.top_p < 1:
        least = _least_in_top_p(logits, top_k, law.top_p)
    elif top_k < count:
        least = _kth_largest(logits, top_k)
    else:
        return logits.log_softmax(-1)
    # By value, not by index: equal logits are kept or dropped together, whatever order a sort leaves them in.
    return logits.masked_fill(logits < least, -torch.inf).log_softmax(-1)


def _least_in_top_p(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the smallest logit that top-k and then top-p keep: [..., 1]."""
    ordered = descending(logits)
    ordered = ordered.masked_fill(ordered < ordered[..., top_k - 1, None], -torch.inf)
    mass = ordered.softmax(-1).cumsum(-1)
    # A token is in the set if the mass before it is below top_p.
    last = (mass[..., :-1] < top_p).sum(-1, keepdim=True)
    # Rounding can leave the whole sum below a top_p near 1: then keep exactly what top-k left.
    last = last.clamp(max=top_k - 1)
    return ordered.gather(-1, last)


def descending(logits: Tensor) -> Tensor:
    """Return logits [..., V] from the largest on."""
    # NumPy selects and sorts with vector instructions, 6 to 30 times as fast as PyTorch on the CPU.
    if on_host(logits):
        return torch.from_numpy(np.sort(logits.detach().numpy(), axis=-1)).flip(-1)
    return logits.sort(-1, descending=True).values


def _kth_largest(logits: Tensor, k: int) -> Tensor:
    """Return the k-th largest logit: [..., 1]."""
    if on_host(logits):
        place = logits.shape[-1] - k
        return torch.from_numpy(np.partition(logits.detach().numpy(), place, axis=-1)[..., place, None])
    return logits.topk(k, sorted=False).values.amin(-1, keepdim=True)


# ---------------------------------------------------------------------------------------------- for all kernels of laws


def check_logits(logits: Tensor, keys: Tensor, slots: Tensor, law: LawNumbers) -> None:
    """Refuse shapes that do not fit each other (ValueError), and dtypes of logits that no kernel takes (TypeError)."""
    rows = slots.shape[0] * (2 if law.guided else 1)
    if slots.dim() != 2 or keys.shape != slots.shape[:1]:
        raise ValueError(
            f"keys have shape {tuple(keys.shape)} and slots {tuple(slots.shape)}; pass keys [B] and slots [B, W]."
        )
    if logits.dim() != 3 or logits.shape[:2] != (rows, slots.shape[1]):
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} for {'guided' if law.guided else 'unguided'} slots "
            f"{tuple(slots.shape)}; pass [{rows}, {slots.shape[1]}, vocabulary]."
        )
    if not 0 <= law.first < law.stop <= logits.shape[-1]:
        raise ValueError(
            f"the allowed ids ({law.first}, {law.stop}) are no range within the vocabulary of {logits.shape[-1]}; "
            f"pass 0 <= first < stop <= {logits.shape[-1]}."
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"logits are {logits.dtype}; the kernels compute in float32, so pass float32, bfloat16 or float16. "
            "`TokenLaw` takes float64."
        )


def as_round(round: int | Tensor, slots: Tensor) -> Tensor:
    """Return the round as an int64 tensor of shape []."""
    if isinstance(round, int):
        return torch.full((), round, device=slots.device)
    if round.shape != ():
        raise ValueError(
            f"round has shape {tuple(round.shape)}; pass an int, or an int64 tensor of shape []."
        )
    return round


def kernel_numbers(law: LawNumbers) -> tuple[int, int, float, float, float, float, int]:
    """Return the numbers of a law in the order of the kernels' arguments, from `first` to `until`."""
    inverse = 1.0 if law.temperature == 0 else 1.0 / law.temperature
    return law.first, law.stop, law.guidance_scale, inverse, float(law.top_k), law.top_p, law.guidance_until


def tiles(law: LawNumbers, tile: int) -> int:
    """Return the number of tiles over the allowed ids, from the multiple of 4 at or before the first."""
    # A compile-time constant: a model has one vocabulary, and a loop of known length is faster.
    return -(-(law.stop - law.first // 4 * 4) // tile)


def kernel_switches(law: LawNumbers) -> dict[str, bool]:
    """Return the compile-time switches of a kernel."""
    warm = law.temperature != 0
    return dict(
        GUIDED=law.guided,
        GREEDY=not warm,
        TOP_K=warm and 0 < law.top_k < law.stop - law.first,
        TOP_P=warm and law.top_p < 1,
    )


if triton is not None:
    from triton import language as tl

    # A row of logits travels through the functions below as one tuple: the conditional and the unconditional logits
    # (pointers), the allowed ids, scale, 1 / temperature, and whether this slot is guided.

    @triton.jit
    def guided_logits(row, ids, inside, GUIDED: tl.constexpr):
        """Return the law's logits at some ids, -inf where forbidden; and the two loaded values, with nan as +inf."""
        conditional, unconditional, _, _, scale, inverse, guide_here = row
        infinity = float("inf")
        scores = tl.load(conditional + ids, mask=inside, other=-infinity).to(tl.float32)
        seen = tl.where(scores != scores, infinity, scores)
        other = seen
        if GUIDED:
            without = tl.load(unconditional + ids, mask=inside, other=-infinity).to(tl.float32)
            other = tl.where(without != without, infinity, without)
            mixed = without + scale * (scores - without)
            # -inf minus -inf is nan: a token that either row forbids stays forbidden.
            mixed = tl.where((scores == -infinity) | (without == -infinity), -infinity, mixed)
            scores = tl.where(guide_here, mixed, scores)
        return scores * inverse, seen, other

    @triton.jit
    def logits_row(
        logits, sample, column, slot, batch_size, row_stride, column_stride, numbers, GUIDED: tl.constexpr
    ):
        """Return the tuple for a position of a sample."""
        first, stop, scale, inverse, _, _, until = numbers
        conditional = logits + sample * row_stride + column * column_stride
        unconditional = conditional
        if GUIDED:
            unconditional += (sample * 0 + batch_size) * row_stride  # in 64 bits
        return conditional, unconditional, first, stop, scale, inverse, slot < until

    @triton.jit
    def tile_ids(start, BLOCKS: tl.constexpr):
        """Return the ids from `start` on, [BLOCKS, 4]: ids whose noise is in one counter block share a row."""
        return start + tl.arange(0, BLOCKS)[:, None] * 4 + tl.arange(0, 4)[None, :]

    @triton.jit
    def extent(row, GUIDED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
        """In one pass, return the smallest logit above -inf, the largest, and its id, the lowest among ties."""
        infinity = float("inf")
        low = tl.full([TILE], infinity, tl.float32)
        high = tl.full([TILE], -infinity, tl.float32)
        place = tl.zeros([TILE], tl.int32) + row[2]
        for tile in range(TILES):
            ids = row[2] // 4 * 4 + tile * TILE + tl.arange(0, TILE)
            scores, _, _ = guided_logits(row, ids, (ids >= row[2]) & (ids < row[3]), GUIDED)
            low = tl.minimum(low, tl.where(scores > -infinity, scores, infinity))
            place = tl.where(scores > high, ids, place)
            high = tl.where(scores > high, scores, high)
        peak = tl.max(high)
        return tl.min(low), peak, tl.min(tl.where(high == peak, place, 2147483647))

    @triton.jit
    def mass_from(row, least, peak, GUIDED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
        """In one pass, return the sum of exp(logit - peak) over the logits that are at least `least`."""
        total = tl.zeros([TILE], tl.float32)
        for tile in range(TILES):
            ids = row[2] // 4 * 4 + tile * TILE + tl.arange(0, TILE)
            scores, _, _ = guided_logits(row, ids, (ids >= row[2]) & (ids < row[3]), GUIDED)
            total += tl.where(scores >= least, tl.exp(scores - peak), 0.0)
        return tl.sum(total)

    @triton.jit
    def least_kept(
        row,
        low,
        high,
        limit,
        BY_MASS: tl.constexpr,
        GUIDED: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
    ):
        """The smallest logit that a filter keeps: the count (or the mass, in units of `high`) above it is < `limit`.

        Top-k and top-p both keep a logit, and its ties, if the count or mass of the logits above it is below the limit.
        The answer lies between `low`, the smallest candidate, and `high`, the largest logit, which is always kept.
        Three pivots cut that interval. The quarter with the answer becomes the next interval, shrunk to the logits it
        holds. So every pass removes at least one logit, and nearly always three quarters of the width.
        """
        infinity = float("inf")
        peak = high
        low = tl.where(high < infinity, low, high)  # the logits define no law: end at once
        while low < high:
            step = 0.25 * high - 0.25 * low  # cannot overflow
            pivot1 = tl.where(low + step < high, low + step, low)
            pivot2 = tl.maximum(tl.where(low + 2.0 * step < high, low + 2.0 * step, low), pivot1)
            pivot3 = tl.maximum(tl.where(low + 3.0 * step < high, low + 3.0 * step, low), pivot2)
            above1 = tl.zeros([TILE], tl.float32)
            above2 = tl.zeros([TILE], tl.float32)
            above3 = tl.zeros([TILE], tl.float32)
            # The largest logit up to each pivot, and the smallest above it.
            most1 = tl.full([TILE], -infinity, tl.float32)
            most2 = tl.full([TILE], -infinity, tl.float32)
            most3 = tl.full([TILE], -infinity, tl.float32)
            least1 = tl.full([TILE], infinity, tl.float32)
            least2 = tl.full([TILE], infinity, tl.float32)
            least3 = tl.full([TILE], infinity, tl.float32)
            for tile in range(TILES):
                ids = row[2] // 4 * 4 + tile * TILE + tl.arange(0, TILE)
                scores, _, _ = guided_logits(row, ids, (ids >= row[2]) & (ids < row[3]), GUIDED)
                weight = tl.full([TILE], 1.0, tl.float32)
                if BY_MASS:
                    weight = tl.exp(scores - peak)
                above1 += tl.where(scores > pivot1, weight, 0.0)
                above2 += tl.where(scores > pivot2, weight, 0.0)
                above3 += tl.where(scores > pivot3, weight, 0.0)
                most1 = tl.maximum(most1, tl.where(scores <= pivot1, scores, -infinity))
                most2 = tl.maximum(most2, tl.where(scores <= pivot2, scores, -infinity))
                most3 = tl.maximum(most3, tl.where(scores <= pivot3, scores, -infinity))
                least1 = tl.minimum(least1, tl.where(scores > pivot1, scores, infinity))
                least2 = tl.minimum(least2, tl.where(scores > pivot2, scores, infinity))
                least3 = tl.minimum(least3, tl.where(scores > pivot3, scores, infinity))
            # If less than the limit is above a pivot, the largest logit up to the pivot is kept; otherwise the answer
            # is above the pivot. Sums of subsets are ordered like the subsets, rounded or not.
            if tl.sum(above1) < limit:
                high = tl.max(most1)
            elif tl.sum(above2) < limit:
                low = tl.min(least1)
                high = tl.max(most2)
            elif tl.sum(above3) < limit:
                low = tl.min(least2)
                high = tl.max(most3)
            else:
                low = tl.min(least3)
        return high

    @triton.jit
    def filter_law(
        row, numbers, GUIDED: tl.constexpr, GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
        PEAK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        """Return the smallest logit that is kept; and, if PEAK or a filter needs it, the largest one and its id."""
        _, _, _, _, top_k, top_p, _ = numbers
        least = -float("inf")
        peak = 0.0
        best = 0
        if GREEDY or TOP_K or TOP_P or PEAK:
            least, peak, best = extent(row, GUIDED, TILE, TILES)
            if TOP_K:
                least = least_kept(row, least, peak, top_k, False, GUIDED, TILE, TILES)
            if TOP_P:
                limit = top_p * mass_from(row, least, peak, GUIDED, TILE, TILES)
                least = least_kept(row, least, peak, limit, True, GUIDED, TILE, TILES)
        return least, peak, best

    @triton.jit
    def largest_of(seen):
        """Return the largest absolute value of a tile from `guided_logits`, of what is finite."""
        size = tl.where(tl.abs(seen) < float("inf"), tl.abs(seen), 0.0)
        return tl.max(tl.max(size, 1), 0)

    @triton.jit
    def relative(margin, largest, largest_without, scale, GUIDED: tl.constexpr):
        """Return a margin in units of the largest logit, of both rows as guidance enlarges them."""
        if GUIDED:
            largest = scale * largest + tl.abs(scale - 1.0) * largest_without
        return tl.where(margin > 0, margin / largest, margin)

    @triton.jit
    def is_finite(seen, other):
        """Return whether the largest logits of both rows, nan as +inf, make a law."""
        worst, least = tl.max(tl.max(seen, 1), 0), tl.max(tl.max(other, 1), 0)
        return (tl.maximum(worst, least) < float("inf")) & (tl.minimum(worst, least) > -float("inf"))
