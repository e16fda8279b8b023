"""Philox4x32-10, the counter-based random generator of every sampler.

A counter-based generator is a pure function of (key, counter) without state, so a random number does not depend on
batch size, window, device or the order of work. The definition is in PyTorch; NumPy (for tensors on the CPU) and
Triton (for CUDA) give the same bits.

Sources: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3; for normal
numbers Box, Muller, "A note on the generation of random normal deviates", Annals of Mathematical Statistics 29, 1958.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from visual_spec.kernels.launch import on_host

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # CPU-only builds of PyTorch have no Triton and need none
    triton = None

Words = TypeVar("Words", Tensor, np.ndarray)

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Scalar draws use a counter block that no vocabulary reaches (it would need 2**34 tokens), so a scalar and a row of
# numbers of the same stream never share bits.
SCALAR_BLOCK = 0xFFFFFFFF

_DTYPES = (torch.float32, torch.float64)
# The largest float32 below 1: the top 128 words would round to 1. float64 represents every (word + 1/2) / 2**32.
_TOP_FLOAT32 = 1.0 - 2.0**-24
# Counters evaluated at once on the CPU: five int64 buffers of this size fit the second-level cache.
_PIECE = 16384
_BLOCK = 256  # counters that a Triton program evaluates


def philox_reference(
    key: Words, word0: Words, word1: Words, word2: Words, word3: Words
) -> tuple[Words, Words, Words, Words]:
    """Return Philox4x32-10 of a 64-bit key and a counter of four 32-bit words.

    Args:
        key: int64, any shape; the low 32 bits are the first key word.
        word0, word1, word2, word3: int64, the counter words, in [0, 2**32). All five broadcast against each
            other.

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    key0, key1 = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        # The products wrap to negative int64, but their 64 bits equal the unsigned product's. Odd words and keys
        # carry garbage above bit 31 until the mask after their xor, which saves passes. Words keep their own broadcast
        # shape as long as possible: the first rounds are cheap.
        product0, product1 = word0 * _MULTIPLIERS[0], word2 * _MULTIPLIERS[1]
        word0 = ((product1 >> 32) ^ (word1 ^ key0)) & _MASK
        word2 = ((product0 >> 32) ^ (word3 ^ key1)) & _MASK
        word1, word3 = product1, product0
        key0, key1 = key0 + _KEY_STEPS[0], key1 + _KEY_STEPS[1]
    return word0, word1 & _MASK, word2, word3 & _MASK


def philox_uniform(
    keys: Tensor,
    slots: Tensor,
    count: int,
    stream: int,
    round: int | Tensor = 0,
    first_block: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return uniform numbers in (0, 1), `count` for every slot of a window.

    Number `v` of a slot is word `v % 4` of the counter (slot, first_block + v // 4, stream, round) under
    the key of the slot's row: u = (word + 1/2) / 2**32, rounded to `dtype` and kept below 1. Near 0 float32
    thus keeps the resolution of the 32-bit word.

    Args:
        keys: int64 [B].
        slots: int64 [B, W]; only the low 32 bits of these and of `round` are used.
        count: N, at least 1.
        stream, first_block: from 0 to 2**32 - 1.
        round: an int, or an int64 tensor of shape [], [B] or [B, W].
        dtype: float32 or float64.

    Returns:
        [B, W, N] of `dtype`, on the device of `slots`.

    Raises:
        ValueError: the shapes do not fit, `count` is below 1, or the dtype is another one.
    """
    _check_arguments(keys, slots, round, count, dtype)
    if slots.device.type == "cuda" and triton is not None:
        out = torch.empty((*slots.shape, count), dtype=dtype, device=slots.device)
        return philox_uniform_triton(out, keys, slots, stream, round, first_block)
    if not on_host(slots):
        return philox_uniform_reference(keys, slots, count, stream, round, first_block, dtype)
    # NumPy, because its calls cost a quarter of PyTorch's, and a window needs 100 calls on small arrays.
    blocks = np.arange(first_block, first_block + _cdiv(count, 4))[None, None]  # [1, 1, N / 4]
    key, slot = keys.numpy()[:, None, None], slots.numpy()[:, :, None] & _MASK  # [B, 1, 1], [B, W, 1]
    rounds = _round_grid(round, slots).numpy()[:, :, None] & _MASK  # [1 or B, 1 or W, 1]
    out = torch.empty((*slots.shape, blocks.size, 4), dtype=dtype)
    view = out.numpy()
    stream_word = np.full((1, 1, 1), stream)
    step = max(_PIECE // (len(key) * blocks.size), 1)
    for start in range(0, slot.shape[1], step):
        part = slice(start, start + step)
        round_part = rounds if rounds.shape[1] == 1 else rounds[:, part]
        words = philox_reference(key, slot[:, part], blocks, stream_word, round_part)
        for index, word in enumerate(words):
            view[:, part, :, index] = word
    return _to_unit(out.flatten(2)[..., :count])


def philox_uniform_reference(
    keys: Tensor,
    slots: Tensor,
    count: int,
    stream: int,
    round: int | Tensor = 0,
    first_block: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The definition of `philox_uniform`, in PyTorch, on any device."""
    words = philox_reference(
        keys[:, None, None],
        slots[:, :, None] & _MASK,
        torch.arange(first_block, first_block + _cdiv(count, 4), device=slots.device),
        torch.full((), stream, device=slots.device),
        _round_grid(round, slots)[:, :, None] & _MASK,
    )  # four of [B, W, N / 4]
    return _to_unit(torch.stack([word.to(dtype) for word in words], dim=-1).flatten(2)[..., :count])


def philox_log_exponential(
    keys: Tensor,
    slots: Tensor,
    count: int,
    stream: int,
    round: int | Tensor = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return log of standard exponential noise, which is minus a Gumbel, from the numbers of `philox_uniform`.

    Returns:
        [B, W, N] of `dtype`, always finite; in PyTorch, on any device.
    """
    # -log(1 - u), not -log(u): small exponentials decide who wins a race, and floats are dense near u = 0. Otherwise a
    # token of probability 1e-6 would win at a rate quantised to 10%.
    uniform = philox_uniform(keys, slots, count, stream, round, 0, dtype)
    return uniform.neg_().log1p_().neg_().log_()


def philox_normal(
    keys: Tensor,
    slots: Tensor,
    count: int,
    stream: int,
    round: int | Tensor = 0,
    first_block: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return standard normal numbers, `count` for every slot of a window: `box_muller` of `philox_uniform`'s numbers.

    They use up those uniform numbers, so no stream may serve both. Arguments and errors are as for `philox_uniform`.

    Returns:
        [B, W, N], computed in float64 and rounded to `dtype`; at most 6.77 in size, so always finite. PyTorch and
        Triton agree to a few units in the last place of float64: their logarithms and cosines differ.
    """
    _check_arguments(keys, slots, round, count, dtype)
    if slots.device.type == "cuda" and triton is not None:
        out = torch.empty((*slots.shape, count), dtype=dtype, device=slots.device)
        return philox_normal_triton(out, keys, slots, stream, round, first_block)
    uniform = philox_uniform(keys, slots, count + count % 2, stream, round, first_block, torch.float64)
    return box_muller(uniform)[..., :count].to(dtype)


def box_muller(uniform: Tensor) -> Tensor:
    """Return independent normal numbers from as many uniform ones in (0, 1): float64 [..., 2 N] both.

    The first number of a pair gives the radius, the second the angle. In float64, because float32 has no number between
    1 - 2**-24 and 1: the smallest radii would all be equal.
    """
    pairs = uniform.unflatten(-1, (-1, 2))
    radius = pairs[..., 0].log().mul_(-2).sqrt_()
    angle = pairs[..., 1] * (2 * math.pi)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)


def _to_unit(words: Tensor) -> Tensor:
    """Map words in [0, 2**32), stored as floats, to (0, 1), in place."""
    unit = words.add_(0.5).mul_(2.0**-32)
    return unit.clamp_(max=_TOP_FLOAT32) if words.dtype == torch.float32 else unit


def _round_grid(round: int | Tensor, slots: Tensor) -> Tensor:
    """Return the round as [1 or B, 1 or W]."""
    if isinstance(round, int):
        return torch.full((1, 1), round, device=slots.device)
    return round.reshape(-1, 1) if round.dim() < 2 else round


def _cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _check_arguments(
    keys: Tensor, slots: Tensor, round: int | Tensor, count: int, dtype: torch.dtype
) -> None:
    if slots.dim() != 2 or keys.shape != slots.shape[:1]:
        raise ValueError(
            f"keys have shape {tuple(keys.shape)} and slots {tuple(slots.shape)}; "
            "pass keys [B] and slots [B, W]."
        )
    if isinstance(round, Tensor) and round.shape not in ((), slots.shape[:1], slots.shape):
        raise ValueError(
            f"round has shape {tuple(round.shape)} beside slots {tuple(slots.shape)}; "
            "pass an int, or a tensor of shape [], [B] or [B, W]."
        )
    if count < 1:
        raise ValueError(f"count={count}; pass at least 1.")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype}; uniform numbers come in torch.float32 or torch.float64.")


if triton is not None:

    @triton.jit
    def _philox_kernel(
        out, keys, slots, rounds, stream, first_block, window, count, NORMAL: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64)  # row * window + position
        block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        # Integers equal to 1 arrive as constants; adding a tensor gives each argument one known type.
        zero = tl.zeros([BLOCK], dtype=tl.int64)
        # A 64-bit counter word would select Philox4x64; the cast to 32 bits selects Philox4x32.
        word0, word1, word2, word3 = tl.philox(
            tl.load(keys + place // window),
            (zero + tl.load(slots + place)).to(tl.int32),
            (zero + first_block + block).to(tl.int32),
            (zero + stream).to(tl.int32),
            (zero + tl.load(rounds + place)).to(tl.int32),
        )
        if NORMAL:
            value0, value1 = normal_pair(word0, word1)
            value2, value3 = normal_pair(word2, word3)
        else:
            value0, value1 = _unit(word0, out.dtype.element_ty), _unit(word1, out.dtype.element_ty)
            value2, value3 = _unit(word2, out.dtype.element_ty), _unit(word3, out.dtype.element_ty)
        first = block.to(tl.int64) * 4
        base = out + place * count + first
        # Written out four times: Triton cannot loop over a tuple of tensors, and a join would cost a shuffle.
        tl.store(base, value0, mask=first < count)
        tl.store(base + 1, value1, mask=first + 1 < count)
        tl.store(base + 2, value2, mask=first + 2 < count)
        tl.store(base + 3, value3, mask=first + 3 < count)

    @triton.jit
    def _unit(word, dtype: tl.constexpr):
        # A product with a power of two is exact, so a fused multiply-add would not change the bits.
        value = (word.to(dtype) + 0.5) * 2.3283064365386963e-10
        if dtype == tl.float32:
            value = tl.minimum(value, 0.999999940395355224609375)
        return value

    @triton.jit
    def normal_pair(word0, word1):
        """Return two normal numbers from two words, in float64: `box_muller`."""
        radius = tl.sqrt(-2.0 * tl.log(_unit(word0, tl.float64)))
        # A literal might be taken for a float32.
        angle = _unit(word1, tl.float64) * tl.full([1], 6.283185307179586, tl.float64)
        return radius * tl.cos(angle), radius * tl.sin(angle)

    @triton.jit
    def uniform_tile(key, slot, round, start, STREAM: tl.constexpr, BLOCKS: tl.constexpr):
        """Numbers start, ..., start + 4 * BLOCKS - 1 of a slot: float32 [BLOCKS, 4]. `start`: a multiple of 4."""
        zero = tl.zeros([BLOCKS], dtype=tl.int64)
        word0, word1, word2, word3 = tl.philox(
            key,
            (zero + slot).to(tl.int32),
            (zero + start // 4 + tl.arange(0, BLOCKS)).to(tl.int32),
            (zero + STREAM).to(tl.int32),
            (zero + round).to(tl.int32),
        )
        # The four words of a block become adjacent without leaving the thread that made them.
        words = tl.reshape(tl.join(tl.join(word0, word2), tl.join(word1, word3)), [BLOCKS, 4])
        return _unit(words, tl.float32)

    @triton.jit
    def uniform_scalar(key, slot, round, block, STREAM: tl.constexpr):
        """Return number 0 of block `block` of a slot as float32."""
        zero = tl.zeros([1], dtype=tl.int64)
        word, _, _, _ = tl.philox(
            key,
            (zero + slot).to(tl.int32),
            (zero + block).to(tl.int32),
            (zero + STREAM).to(tl.int32),
            (zero + round).to(tl.int32),
        )
        return tl.max(_unit(word, tl.float32))

    @triton.jit
    def log_exponential(uniform):
        """Return log(-log(1 - u)), minus a Gumbel, as `CounterNoise` computes it."""
        # log1p(-u) from a logarithm: the rounding error of 1 - u cancels in the quotient (Kahan). Triton's language has
        # no log1p.
        rest = 1.0 - uniform
        ratio = tl.where(rest < 1.0, uniform / (1.0 - rest), 1.0)
        exponential = tl.where(rest < 1.0, -tl.log(rest) * ratio, uniform)
        return tl.log(exponential)


def philox_uniform_triton(
    out: Tensor, keys: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0, first_block: int = 0
) -> Tensor:
    """`philox_uniform` by the Triton kernel. Fills and returns `out` [B, W, N], contiguous."""
    return _fill(out, keys, slots, stream, round, first_block, normal=False)


def philox_normal_triton(
    out: Tensor, keys: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0, first_block: int = 0
) -> Tensor:
    """`philox_normal` by the Triton kernel. Fills and returns `out` [B, W, N], contiguous."""
    return _fill(out, keys, slots, stream, round, first_block, normal=True)


def _fill(
    out: Tensor,
    keys: Tensor,
    slots: Tensor,
    stream: int,
    round: int | Tensor,
    first_block: int,
    *,
    normal: bool,
) -> Tensor:
    batch_size, window, count = out.shape
    if out.numel() == 0:  # a window of one slot has no drafts to test
        return out
    rounds = _round_grid(round, slots).expand(batch_size, window).contiguous()
    grid = (batch_size * window, _cdiv(_cdiv(count, 4), _BLOCK))
    kernel: Any = _philox_kernel
    with torch.cuda.device_of(out):
        kernel[grid](
            out, keys.contiguous(), slots.contiguous(), rounds, stream, first_block, window, count, NORMAL=normal,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return out
