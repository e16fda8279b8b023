"""From logits to the token that a slot's own noise draws from its law, in one kernel.

The chain of `samplers.law.TokenLaw` and `CounterNoise.categorical` (guidance, temperature, top-k, top-p, Gumbel race)
writes and reads back B x W x V numbers a dozen times. Here they stay in registers: one program serves one slot, and
passes over its logits

    once                without filters; the race needs no normaliser;
    1 + s + 1 times     with top-k or top-p: for the smallest and the largest logit, s times for the threshold, and for
                        the race. With both there are two searches, and one more pass sums the mass that top-k leaves.

The search (`least_kept`) quarters the interval of the threshold by counting what is above, instead of sorting, until it
holds one value: s is 4 to 6 for bfloat16 logits and 6 to 9 for float32 ones, at V = 16384 and 65536. The logits come
from memory once; later passes find the row, a few hundred KiB, in the caches.

Arithmetic is float32. Results are those of the reference but for rounding: a logit that ties with the threshold, or a
race that ends in a tie, to within a few units in the last place may fall either way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from visual_spec.kernels.philox import philox_uniform_reference

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # CPU-only builds of PyTorch come without Triton, and need none
    triton = None
if triton is not None and not hasattr(tl, "tuple"):  # before 3.3 (PyTorch 2.7), kernels know no tuples
    triton = None

# Tokens that a program looks at together, and its warps: there are few programs, so each is to fill a multiprocessor.
_TILE = 2048
_WARPS = 16
EVERY_SLOT = 2**31 - 1  # `guided_until` of a law that guides every slot


class LawNumbers(NamedTuple):
    """A `TokenLaw` in plain numbers.

    Attributes:
        guided: the unconditional rows are there.
        guidance_scale, temperature, top_k, top_p: as in `TokenLaw`.
        first, stop: the allowed ids, half-open.
        guided_until: slots at or beyond it are not guided; `EVERY_SLOT` if there are none.
    """

    guided: bool
    guidance_scale: float
    temperature: float
    top_k: int
    top_p: float
    first: int
    stop: int
    guided_until: int = EVERY_SLOT


def draw(
    logits: Tensor, keys: Tensor, slots: Tensor, law: LawNumbers, *, stream: int, round: int | Tensor = 0
) -> tuple[Tensor, Tensor]:
    """Tokens drawn from the laws of a window: argmax(law + gumbel), with the noise of `CounterNoise`.

    Args:
        logits: [R, W, V] in float32, bfloat16 or float16; R = 2B when guided (B conditional rows first), else B.
        keys: int64 [B]; slots: int64 [B, W], which the columns predict.
        law: what turns logits into laws.
        stream, round: of the noise; the round an int, or an int64 tensor of shape [] on the device.

    Returns:
        Tokens, long [B, W], always within the allowed ids; and BoolTensor [B, W], False where the logits define no law
        (nan, +inf, or all -inf in one of the rows), which the caller must refuse. On CUDA by the Triton kernel,
        elsewhere by `draw_reference`.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: logits of another dtype.
    """
    check_logits(logits, keys, slots, law)
    return _draw_op(logits, keys, slots, as_round(round, slots), stream, *law)


def law_reference(logits: Tensor, slots: Tensor, law: LawNumbers) -> Tensor:
    """Log-probabilities float32 [B, W, V], -inf outside the support: `TokenLaw` once more, as a chain of plain ops."""
    vocab_size = logits.shape[-1]
    scores = logits[..., law.first : law.stop].float()
    if law.guided:
        conditional, unconditional = scores.chunk(2)
        guided = unconditional + law.guidance_scale * (conditional - unconditional)
        guided = guided.masked_fill(torch.minimum(conditional, unconditional).isneginf(), -torch.inf)
        scores = torch.where((slots < law.guided_until)[..., None], guided, conditional)
    if law.temperature == 0:
        best = scores.argmax(-1, keepdim=True)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
    else:
        scores = scores / law.temperature
        if 0 < law.top_k < scores.shape[-1]:
            least = scores.topk(law.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if law.top_p < 1:
            ordered = scores.sort(-1, descending=True).values
            before = ordered.softmax(-1).cumsum(-1)[..., :-1]
            last = (before < law.top_p).sum(-1, keepdim=True)
            # Where rounding keeps the whole sum below top_p, all that top-k left is kept.
            scores = scores.masked_fill(scores < ordered.gather(-1, last), -torch.inf)
        scores = scores.log_softmax(-1)
    full = scores.new_full((*scores.shape[:-1], vocab_size), -torch.inf)
    full[..., law.first : law.stop] = scores
    return full


def log_exponential_reference(
    keys: Tensor, slots: Tensor, vocab_size: int, stream: int, round: Tensor
) -> Tensor:
    """Minus the Gumbel noise of `CounterNoise`: [B, W, V]."""
    uniform = philox_uniform_reference(keys, slots, vocab_size, stream, round)
    return uniform.neg_().log1p_().neg_().log_()


def finite_reference(logits: Tensor, law: LawNumbers) -> Tensor:
    """BoolTensor [B, W], False where the logits [R, W, V] define no law."""
    finite = logits[..., law.first : law.stop].amax(-1).isfinite()
    return torch.stack(finite.chunk(2)).all(0) if law.guided else finite


def draw_reference(
    logits: Tensor, keys: Tensor, slots: Tensor, round: Tensor, stream: int, law: LawNumbers
) -> tuple[Tensor, Tensor]:
    """The definition of `draw`, in PyTorch, on any device."""
    log_probs = law_reference(logits, slots, law)
    noise = log_exponential_reference(keys, slots, logits.shape[-1], stream, round)
    tokens = (noise - log_probs).argmin(-1).clamp(law.first, law.stop - 1)
    return tokens, finite_reference(logits, law)


@triton_op("visual_spec::draw", mutates_args=())
def _draw_op(
    logits: Tensor,
    keys: Tensor,
    slots: Tensor,
    round: Tensor,
    stream: int,
    guided: bool,
    guidance_scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    first: int,
    stop: int,
    guided_until: int,
) -> tuple[Tensor, Tensor]:
    law = LawNumbers(guided, guidance_scale, temperature, top_k, top_p, first, stop, guided_until)
    if not on_gpu(logits):
        return draw_reference(logits, keys, slots, round, stream, law)
    return draw_triton(logits, keys, slots, round, stream, law)


@_draw_op.register_fake
def _draw_outputs(logits: Tensor, keys: Tensor, slots: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(slots), torch.empty_like(slots, dtype=torch.bool)


def draw_triton(
    logits: Tensor, keys: Tensor, slots: Tensor, round: Tensor, stream: int, law: LawNumbers
) -> tuple[Tensor, Tensor]:
    """`draw` by the Triton kernel."""
    slots = slots.contiguous()
    tokens, finite = _draw_outputs(logits, keys, slots)
    if slots.numel() == 0:
        return tokens, finite
    logits = rows_of_numbers(logits)
    kernel: Any = wrap_triton(_draw_kernel) if compiled(_draw_kernel) else _draw_kernel
    with torch.cuda.device_of(logits):
        kernel[(slots.numel(),)](
            tokens,
            finite,
            logits,
            keys.contiguous(),
            slots,
            round,
            *slots.shape,
            logits.stride(0),
            logits.stride(1),
            *kernel_numbers(law),
            STREAM=stream,
            **kernel_switches(law),
            TILE=_TILE,
            TILES=tiles(law, _TILE),
            num_warps=_WARPS,
        )
    return tokens, finite


# ---------------------------------------------------------------------------------------------- for all kernels of laws


def check_logits(logits: Tensor, keys: Tensor, slots: Tensor, law: LawNumbers) -> None:
    """Refuse shapes that do not fit each other.

    Raises:
        ValueError: so.
        TypeError: logits of a dtype that the kernels do not compute in.
    """
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
    """The round as an int64 tensor of shape []."""
    if isinstance(round, int):
        return torch.full((), round, device=slots.device)
    if round.shape != ():
        raise ValueError(
            f"round has shape {tuple(round.shape)}; pass an int, or an int64 tensor of shape []."
        )
    return round


def on_gpu(tensor: Tensor) -> bool:
    """Whether a kernel can run where the tensor is."""
    return triton is not None and tensor.device.type == "cuda"


def compiled(kernel: Any) -> bool:
    """False for a kernel of Triton's interpreter, which no tracer needs to see."""
    return triton is not None and isinstance(kernel, triton.JITFunction)


def rows_of_numbers(values: Tensor) -> Tensor:
    """The same, with neighbouring numbers of a row side by side in memory."""
    return values if values.stride(-1) == 1 else values.contiguous()


def kernel_numbers(law: LawNumbers) -> tuple[int, int, float, float, float, float, int]:
    """The numbers of a law as the kernels take them, in order: from `first` to `until`."""
    inverse = 1.0 if law.temperature == 0 else 1.0 / law.temperature
    return law.first, law.stop, law.guidance_scale, inverse, float(law.top_k), law.top_p, law.guided_until


def tiles(law: LawNumbers, tile: int) -> int:
    """Tiles over the allowed ids, from the multiple of 4 at or before the first."""
    # Known when a kernel is compiled: a model has one vocabulary, and a loop of known length is the faster one.
    return -(-(law.stop - law.first // 4 * 4) // tile)


def kernel_switches(law: LawNumbers) -> dict[str, bool]:
    """What a kernel is compiled for."""
    warm = law.temperature != 0
    return dict(
        GUIDED=law.guided,
        GREEDY=not warm,
        TOP_K=warm and 0 < law.top_k < law.stop - law.first,
        TOP_P=warm and law.top_p < 1,
    )


if triton is not None:
    from visual_spec.kernels.philox import log_exponential, uniform_tile

    # A row of logits travels through the functions below as one tuple: the conditional and the unconditional logits
    # (pointers), the allowed ids, scale, 1 / temperature, and whether this slot is guided.

    @triton.jit
    def guided_logits(row, ids, inside, GUIDED: tl.constexpr):
        """Logits of the law at some ids, -inf where forbidden; and the two that were read, with nan as +inf."""
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
        """The tuple for a column of a sample."""
        first, stop, scale, inverse, _, _, until = numbers
        conditional = logits + sample * row_stride + column * column_stride
        unconditional = conditional
        if GUIDED:
            unconditional += (sample * 0 + batch_size) * row_stride  # in 64 bits
        return conditional, unconditional, first, stop, scale, inverse, slot < until

    @triton.jit
    def tile_ids(start, BLOCKS: tl.constexpr):
        """Ids from `start` on, [BLOCKS, 4]: those whose noise is in one block of the counter are in one row."""
        return start + tl.arange(0, BLOCKS)[:, None] * 4 + tl.arange(0, 4)[None, :]

    @triton.jit
    def extent(row, GUIDED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
        """One pass: the smallest logit above -inf, the largest, and its id, the lowest where several are equal."""
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
        """One pass: the sum of exp(logit - peak) over the logits from `least` on."""
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
        """The smallest logit that a filter keeps: those above it count (or weigh, in units of `high`) below `limit`.

        Top-k and top-p both keep a logit, and all that equal it, when those above it fall short of the limit. The
        answer lies from `low`, the smallest candidate, to `high`, the largest logit, which is kept. Three pivots cut
        that interval; the quarter with the answer becomes the interval, closed in to the logits it holds. So every pass
        takes at least one logit out, and nearly always three quarters of the width.
        """
        infinity = float("inf")
        peak = high
        low = tl.where(high < infinity, low, high)  # no law: end at once
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
            # With less than the limit above a pivot, the largest logit up to it is kept; else the answer is above the
            # pivot. Sums of subsets are ordered like the subsets, rounded or not.
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
        row,
        numbers,
        GUIDED: tl.constexpr,
        GREEDY: tl.constexpr,
        TOP_K: tl.constexpr,
        TOP_P: tl.constexpr,
        PEAK: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
    ):
        """The smallest logit that is kept; and, if PEAK or a filter needs it, the largest one and its id."""
        _, _, _, _, top_k, top_p, _ = numbers
        least = -float("inf")
        peak = 0.0
        best = 0
        if GREEDY or TOP_K or TOP_P or PEAK:
            least, peak, best = extent(row, GUIDED, TILE, TILES)  # pyright: ignore[reportGeneralTypeIssues]
            if TOP_K:
                least = least_kept(row, least, peak, top_k, False, GUIDED, TILE, TILES)
            if TOP_P:
                limit = top_p * mass_from(row, least, peak, GUIDED, TILE, TILES)
                least = least_kept(row, least, peak, limit, True, GUIDED, TILE, TILES)
        return least, peak, best

    @triton.jit
    def race(uniform, weights, ids, soonest, winner, LOGS: tl.constexpr):
        """Who of a tile arrives before `soonest`: the time log(exponential) - log(weight), and the id, -1 for nobody.

        The race is run in logarithms as `CounterNoise.categorical` does; weights are logarithms where LOGS says so.
        """
        # -log(1 - u) >= u, so whose u alone is too late cannot win. That spares nearly all tiles their logarithms, most
        # of the work; the hundredth is far more than they err by.
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
    def is_finite(seen, other):
        """Whether the largest logits of both rows, nan as +inf, are those of a law."""
        worst, least = tl.max(tl.max(seen, 1), 0), tl.max(tl.max(other, 1), 0)
        return (tl.maximum(worst, least) < float("inf")) & (tl.minimum(worst, least) > -float("inf"))

    @triton.jit
    def _draw_kernel(
        tokens,
        finite,
        logits,
        keys,
        slots,
        round,
        batch_size,
        window,
        row_stride,
        column_stride,
        first,
        stop,
        scale,
        inverse,
        top_k,
        top_p,
        until,
        STREAM: tl.constexpr,
        GUIDED: tl.constexpr,
        GREEDY: tl.constexpr,
        TOP_K: tl.constexpr,
        TOP_P: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
    ):
        infinity = float("inf")
        place = tl.program_id(0).to(tl.int64)  # sample * window + column
        sample = place // window
        key, slot, at_round = tl.load(keys + sample), tl.load(slots + place), tl.load(round)
        numbers = (first, stop, scale, inverse, top_k, top_p, until)
        row = logits_row(
            logits, sample, place % window, slot, batch_size, row_stride, column_stride, numbers, GUIDED
        )
        least, _, best = filter_law(row, numbers, GUIDED, GREEDY, TOP_K, TOP_P, False, TILE, TILES)
        BLOCKS: tl.constexpr = TILE // 4
        seen = tl.full([BLOCKS, 4], -infinity, tl.float32)
        other = tl.full([BLOCKS, 4], -infinity, tl.float32)
        soonest = infinity
        winner = -1
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
            soonest, winner = race(uniform, scores, ids, soonest, winner, True)
        # Logits that define no law have no winner; what is fed to the model is then still a token.
        tl.store(tokens + place, tl.maximum(winner, first).to(tl.int64))
        tl.store(finite + place, is_finite(seen, other))
