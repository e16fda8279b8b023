"""What stands between the product of queries, keys and values and attention, in one launch.

Rotary embedding of queries and keys (Su et al., "RoFormer", 2021, section 3.2.2, with interleaved pairs), and the write
of keys and values into a static cache by place. As single operations they are over twenty launches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import FLOATS, early_launch, launcher, on_gpu, triton, wait_for_others

# Cosines and sines for `rotate`, `[R or 1, W, 1, 1, D / 2, 2]` each, the sines with the signs that they are added with.
Turns = tuple[Tensor, Tensor]

_HEADS = 8  # of a program


def rotate(x: Tensor, turns: Turns) -> Tensor:
    """Rotate interleaved pairs of `x [R, W, N, H, D]`, in the precision of the turns.

    Not a complex product, which is one operation but rounds by the shape of a call.
    """
    cosine, sine = turns
    pairs = x.to(cosine.dtype).unflatten(-1, (-1, 2))
    return (pairs * cosine + pairs.flip(-1) * sine).flatten(-2).to(x.dtype)


def rotary_write(
    projected: Tensor, turns: Turns, keys: Tensor, values: Tensor, places: Tensor, *, early: bool = False
) -> Tensor:
    """Rotate queries and keys, and write keys and values into a layer's cache.

    Args:
        projected: [R, W, H + 2 G, D], the heads of queries, keys and values, concatenated.
        turns: `[R or 1, W, 1, 1, D / 2, 2]` each.
        keys, values: [R, G, S, D], written in place; of the dtype of `projected`.
        places: long [R, W], 0 to S - 1, all different in a row.
        early: whether the kernel may be launched before the one before it has ended, where the device can.

    Returns:
        Queries [R, W, H, D]. On CUDA by the Triton kernel, elsewhere by `rotary_write_reference`.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    _check(projected, turns, keys, values, places)
    return _rotary_write_op(projected, *turns, keys, values, places, early)


def rotary_write_reference(
    projected: Tensor, cosine: Tensor, sine: Tensor, keys: Tensor, values: Tensor, places: Tensor,
    early: bool = False,
) -> Tensor:  # fmt: skip
    """The definition of `rotary_write`, in PyTorch, on any device."""
    groups = keys.shape[1]
    heads = projected.shape[2] - 2 * groups
    turned = rotate(projected[:, :, None, : heads + groups], (cosine, sine))[:, :, 0]
    rows = torch.arange(len(places), device=places.device)[:, None]
    keys.transpose(1, 2)[rows, places] = turned[:, :, heads:]
    values.transpose(1, 2)[rows, places] = projected[:, :, heads + groups :]
    return turned[:, :, :heads].contiguous()


def _check(projected: Tensor, turns: Turns, keys: Tensor, values: Tensor, places: Tensor) -> None:
    if projected.dim() != 4 or keys.dim() != 4 or keys.shape != values.shape:
        raise ValueError(
            f"projected has shape {tuple(projected.shape)}, keys {tuple(keys.shape)} and values "
            f"{tuple(values.shape)}; pass [R, W, H + 2 G, D], and [R, G, S, D] twice."
        )
    (rows, window, heads, dim), groups = projected.shape, keys.shape[1]
    if heads <= 2 * groups or keys.shape[0] != rows or keys.shape[3] != dim or dim % 2:
        raise ValueError(
            f"projected has shape {tuple(projected.shape)} and keys {tuple(keys.shape)}; pass [R, W, H + 2 G, D] and "
            "[R, G, S, D] of the same R and D, with H at least 1 and D even."
        )
    if places.shape != (rows, window):
        raise ValueError(f"places have shape {tuple(places.shape)}; pass [{rows}, {window}].")
    for turn in turns:
        if turn.shape[0] not in (1, rows) or turn.shape[1:] != (window, 1, 1, dim // 2, 2):
            raise ValueError(
                f"a turn has shape {tuple(turn.shape)}; pass [{rows} or 1, {window}, 1, 1, {dim // 2}, 2]."
            )


@triton_op("visual_spec::rotary_write", mutates_args=("keys", "values"))
def _rotary_write_op(
    projected: Tensor, cosine: Tensor, sine: Tensor, keys: Tensor, values: Tensor, places: Tensor,
    early: bool = False,
) -> Tensor:  # fmt: skip
    function = rotary_write_triton if on_gpu(projected) else rotary_write_reference
    return function(projected, cosine, sine, keys, values, places, early)


@_rotary_write_op.register_fake
def _queries_like(projected: Tensor, cosine: Tensor, sine: Tensor, keys: Tensor, *_: Tensor | bool) -> Tensor:
    rows, window, heads, dim = projected.shape
    return projected.new_empty(rows, window, heads - 2 * keys.shape[1], dim)


def rotary_write_triton(
    projected: Tensor, cosine: Tensor, sine: Tensor, keys: Tensor, values: Tensor, places: Tensor,
    early: bool = False,
) -> Tensor:  # fmt: skip
    """`rotary_write` by the Triton kernel.

    Raises:
        TypeError: a dtype that the kernel does not take.
        ValueError: the numbers of a key or value are not adjacent in memory, or keys and values lie differently.
    """
    if not projected.dtype == keys.dtype == values.dtype or projected.dtype not in FLOATS:
        raise TypeError(
            f"projected is {projected.dtype}, keys {keys.dtype} and values {values.dtype}; pass float32, bfloat16 or "
            "float16, three times the same."
        )
    if keys.stride() != values.stride() or keys.stride(-1) != 1:
        raise ValueError(
            f"keys and values have strides {keys.stride()} and {values.stride()}; pass equal ones, the last one 1."
        )
    queries = _queries_like(projected, cosine, sine, keys)
    rows, window, heads, dim = projected.shape
    if queries.numel() == 0:
        return queries
    with torch.cuda.device_of(projected):
        launcher(_rotary_write_kernel)[(rows * window, -(-heads // _HEADS))](
            queries, keys, values, projected.contiguous(), cosine.contiguous(), sine.contiguous(),
            places.contiguous(), window, heads - 2 * keys.shape[1], keys.shape[1],
            0 if len(cosine) == 1 else window * dim, *keys.stride()[:3], DIM=dim, HEADS=_HEADS,
            WIDTH=1 << (dim - 1).bit_length(), num_warps=4,
            **early_launch(_rotary_write_kernel, early, projected.device),
        )  # fmt: skip
    return queries


if triton is not None:
    from triton import language as tl

    @triton.jit
    def _rotary_write_kernel(
        queries, keys, values, projected, cosine, sine, places, window, heads, groups, turn_stride, row_stride,
        head_stride, place_stride, DIM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """Some heads of one token."""
        wait_for_others(EARLY)
        token = tl.program_id(0).to(tl.int64)  # row * window + position
        row, position = token // window, token % window
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        number = tl.arange(0, WIDTH)[None]
        inside = (head < heads + 2 * groups) & (number < DIM)
        at = projected + (token * (heads + 2 * groups) + head) * DIM
        own = tl.load(at + number, mask=inside, other=0.0)
        turned = head < heads + groups
        other = tl.load(at + (number ^ 1), mask=inside & turned, other=0.0)  # the other number of the pair
        angle = row * turn_stride + position * DIM + number
        by_cosine = tl.load(cosine + angle, mask=number < DIM, other=0.0)
        by_sine = tl.load(sine + angle, mask=number < DIM, other=0.0)
        moved = (own.to(tl.float32) * by_cosine + other.to(tl.float32) * by_sine).to(own.dtype)
        place = tl.load(places + token) * place_stride + row * row_stride + number
        tl.store(queries + (token * heads + head) * DIM + number, moved, mask=inside & (head < heads))
        key = keys + place + (head - heads) * head_stride
        tl.store(key, moved, mask=inside & turned & (head >= heads))
        value = values + place + (head - heads - groups) * head_stride
        tl.store(value, own, mask=inside & (head >= heads + groups))
