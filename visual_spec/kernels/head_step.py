"""One level of a diffusion head: from a point of a token's chain to the next one.

The head (`visual_spec.models.continuous.head`) is an MLP of 6 to 12 residual blocks, and a chain calls it up to a
hundred times for a handful of rows. One operation after the other, a level of MAR-B takes some 150 launches, each of a
few microseconds at best, to read 25 MB of weights, which takes 8.

A product needs every column of the one before it, and programs of a launch cannot wait for each other, so one launch
for all blocks is not possible without a barrier across the device. Here a level takes 2 * depth + 1 launches:

    up      norm, modulation, first product, SiLU; of the first block also the input projection
    down    second product, gate, and the sum with the block's input
    final   norm, modulation, and product of the last layer, guidance, the law of the level, and the draw from it

Each program of `up` computes the norms of its rows anew: this reads them once more, from a cache, and saves a launch.
Rows between the blocks are float32, inner activations have the dtype of the weights, and sums are float32.

The law of every kind of chain is one form, with five numbers for each level (`LAW_NUMBERS`):

    mean  = of_x * x + of_output * prediction
    sigma = width * exp((low + share * (high - low)) / 2),    share = (v + 1) / 2

where v is what the head says of the variance. A head that says nothing of it has sigma = width.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import FLOATS, launcher, on_gpu, rows_of_numbers, triton

# Rows, of which a guided sample has two, that the kernel takes: more are work for a library's product.
MOST_ROWS = 128
LAW_NUMBERS = ("of_x", "of_output", "low", "high", "width")
# Tensors of a head: weight and bias of the input projection, six of each block, weight and bias of the last layer.
_OF_BLOCK = 6
# Columns that a program computes, numbers of a row that it reads at a time (the last kernel half of them), and warps:
# more numbers a warp do not fit into the registers.
_COLUMNS, _READ, _WARPS = 16, 64, 8
# A tile of a product has at least so many rows, and more do not fit into the registers.
_FEWEST, _MOST = 16, 64


def head_step(
    x: Tensor,
    modulations: Tensor,
    weights: Sequence[Tensor],
    scales: Tensor | None,
    law: Tensor,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The head at points of one level, guidance, the law of the next points, and a draw from it.

    Li, Tian, Li, Deng, He, "Autoregressive image generation without vector quantization", NeurIPS 2024, section 3.2 and
    appendix B.

    Args:
        x: [N, d] in float32 (float64 on the CPU).
        modulations: [R, (3 depth + 2) width] in the dtype of the weights; R = 2N when guided (N conditional rows
            first), else N.
        weights: of the head, in the order of `DiffusionHead.step_weights`.
        scales: of guidance, [N]; None: not guided.
        law: `LAW_NUMBERS` of the level, [5], or [N, 5] where rows differ; in the dtype of x.
        noise: [N, d], standard normal; None: the next point is the mean.

    Returns:
        Next point, mean, and standard deviation, each [N, d] in the dtype of x. On CUDA by the Triton kernels,
        elsewhere by `head_step_reference`.

    Raises:
        ValueError: the shapes do not fit each other.
        TypeError: points or weights of a dtype that the kernels do not take, on CUDA.
    """
    _check(x, modulations, weights, scales, law, noise)
    return _head_step_op(x, modulations, list(weights), scales, law, noise)


def takes(x: Tensor, rows: int, weights: Sequence[Tensor]) -> bool:
    """Return whether the kernels take these points [N, d] and weights: rows few enough, on a GPU, no gradients."""
    plain = all(type(one) in (Tensor, torch.nn.Parameter) and one.is_contiguous() for one in weights)
    return (
        on_gpu(x)
        and 0 < rows <= MOST_ROWS
        and x.dtype == torch.float32
        and plain
        and len(weights) >= 4 + _OF_BLOCK
        and weights[0].dtype in FLOATS
        and not torch.is_grad_enabled()
    )


def head_step_reference(
    x: Tensor,
    modulations: Tensor,
    weights: Sequence[Tensor],
    scales: Tensor | None,
    law: Tensor,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `head_step`, in PyTorch, on any device."""
    (first, first_bias), blocks, (last, last_bias) = weights[:2], weights[2:-2], weights[-2:]
    width = len(first)
    points = x.to(first.dtype)
    hidden = F.linear(
        points if scales is None else torch.cat([points, points]), first, first_bias
    )  # [R, width]
    parts = modulations.split(width, -1)
    for index in range(len(blocks) // _OF_BLOCK):
        norm, norm_bias, up, up_bias, down, down_bias = blocks[_OF_BLOCK * index : _OF_BLOCK * (index + 1)]
        shift, scale, gate = parts[3 * index : 3 * index + 3]
        inner = F.layer_norm(hidden, (width,), norm, norm_bias, 1e-6) * (1.0 + scale) + shift
        inner = F.linear(F.silu(F.linear(inner, up, up_bias)), down, down_bias)
        hidden = hidden + gate * inner
    shift, scale = parts[-2:]
    inner = F.layer_norm(hidden, (width,), eps=1e-6) * (1.0 + scale) + shift
    return law_step(x, F.linear(inner, last, last_bias).to(x.dtype), scales, law, noise)


def law_step(
    x: Tensor, output: Tensor, scales: Tensor | None, law: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `head_step` does after the head's `output [R, d or 2 d]`: guidance, law, draw."""
    centre, rest = output[:, : x.shape[1]], output[: len(x), x.shape[1] :]
    if scales is not None:
        centre, other = centre.chunk(2)
        centre = other + scales.to(x.dtype)[:, None] * (centre - other)
    of_x, of_output, low, high, width = law.expand(len(x), -1).unsqueeze(-1).unbind(1)  # each [N, 1]
    mean = of_x * x + of_output * centre
    sigma = width * torch.ones_like(x)
    if rest.shape[1]:
        sigma = sigma * ((low + (rest + 1.0) / 2.0 * (high - low)) / 2.0).exp()
    return mean if noise is None else mean + sigma * noise, mean, sigma


def _check(
    x: Tensor,
    modulations: Tensor,
    weights: Sequence[Tensor],
    scales: Tensor | None,
    law: Tensor,
    noise: Tensor | None,
) -> None:
    count, dim = x.shape if x.dim() == 2 else (-1, -1)
    depth, more = divmod(len(weights) - 4, _OF_BLOCK)
    if more or depth < 1 or count < 0 or weights[0].shape[1:] != (dim,):
        shapes = [tuple(one.shape) for one in weights[:1]]
        raise ValueError(
            f"points of shape {tuple(x.shape)} and {len(weights)} weights, the first of shape {shapes}; pass points "
            f"[N, d], and 2 + {_OF_BLOCK} * depth + 2 weights, the first [width, d]."
        )
    rows, size = count * (1 if scales is None else 2), len(weights[0]) * (3 * depth + 2)
    if modulations.shape != (rows, size):
        raise ValueError(f"modulations have shape {tuple(modulations.shape)}; pass [{rows}, {size}].")
    if len(weights[-2]) not in (dim, 2 * dim):
        raise ValueError(f"the head has {len(weights[-2])} outputs; it has {dim} or {2 * dim}.")
    if law.shape not in ((len(LAW_NUMBERS),), (count, len(LAW_NUMBERS))):
        raise ValueError(
            f"law has shape {tuple(law.shape)}; pass [{len(LAW_NUMBERS)}], or one such row a point."
        )
    if scales is not None and scales.shape != (count,):
        raise ValueError(f"scales have shape {tuple(scales.shape)}; pass [{count}], one a point.")
    if noise is not None and noise.shape != x.shape:
        raise ValueError(f"noise has shape {tuple(noise.shape)}; pass {tuple(x.shape)}.")


@triton_op("visual_spec::head_step", mutates_args=())
def _head_step_op(
    x: Tensor,
    modulations: Tensor,
    weights: typing.Sequence[Tensor],  # torch 2.6 knows no other spelling of a list
    scales: Tensor | None,
    law: Tensor,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = head_step_triton if on_gpu(x) else head_step_reference
    point, mean, sigma = kernel(x, modulations, weights, scales, law, noise)
    return (mean.clone() if point is mean else point), mean, sigma


@_head_step_op.register_fake
def _head_step_outputs(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)


def head_step_triton(
    x: Tensor,
    modulations: Tensor,
    weights: Sequence[Tensor],
    scales: Tensor | None,
    law: Tensor,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`head_step` by the Triton kernels."""
    x = x.contiguous()
    outputs = _head_step_outputs(x)
    (count, dim), (rows, size) = x.shape, modulations.shape
    if not count:
        return outputs
    (first, first_bias), blocks, (last, last_bias) = weights[:2], weights[2:-2], weights[-2:]
    width, kind = len(first), first.dtype
    if x.dtype != torch.float32 or kind not in FLOATS or modulations.dtype != kind:
        raise TypeError(
            f"points are {x.dtype}, weights {kind} and modulations {modulations.dtype}; pass points in float32, and "
            "weights and modulations in float32, bfloat16 or float16, both in the same."
        )
    modulations = rows_of_numbers(modulations)
    hidden = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    inner = torch.empty(rows, width, dtype=kind, device=x.device)
    law = law.expand(count, -1)

    tile = max(_FEWEST, min(_MOST, 1 << (rows - 1).bit_length()))
    grid = (-(-rows // tile), -(-width // _COLUMNS))
    sizes = (rows, count, dim, modulations.stride(0))
    shape: dict[str, Any] = dict(
        WIDTH=width, DIM=max(16, 1 << (dim - 1).bit_length()), READ=_READ, num_warps=_WARPS
    )
    with torch.cuda.device_of(x):
        for index in range(len(blocks) // _OF_BLOCK):
            norm, norm_bias, up, up_bias, down, down_bias = blocks[
                _OF_BLOCK * index : _OF_BLOCK * (index + 1)
            ]
            entry = (hidden, inner, x, first, first_bias)
            more = dict(FIRST=index == 0, ROWS=tile, COLUMNS=_COLUMNS, **shape)
            shift = 3 * index * width
            launcher(_up_kernel)[grid](
                *entry, norm, norm_bias, up, up_bias, modulations, *sizes, shift, **more
            )
            launcher(_down_kernel)[grid](
                *entry, down, down_bias, modulations, *sizes, shift + 2 * width, **more
            )
        launcher(_final_kernel)[(-(-count // _FEWEST),)](
            *outputs, hidden, x, last, last_bias, modulations,
            x if scales is None else scales.to(torch.float32).contiguous(), law,
            x if noise is None else noise.to(torch.float32).contiguous(), *sizes, size - 2 * width, law.stride(0),
            law.stride(1), GUIDED=scales is not None, LEARNED=len(last) == 2 * dim, NOISY=noise is not None,
            ROWS=_FEWEST, **shape | dict(READ=_READ // 2),
        )  # fmt: skip
    return outputs


if triton is not None:
    from triton import language as tl

    @triton.jit
    def _tile(entry, row, columns, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
        """Return what enters a block, float32 [ROWS, N]; for the first block, the input projection.

        Args:
            entry: hidden; points, weight and bias of the projection; numbers of rows and points, and d.
        """
        hidden, x, first, first_bias, rows, count, dim = entry
        if FIRST:
            numbers = tl.arange(0, DIM)
            sample = tl.where(row < count, row, row - count)  # unconditional rows are at the same points
            inside = (row < rows)[:, None] & (numbers < dim)[None]
            point = tl.load(x + sample[:, None] * dim + numbers[None], mask=inside, other=0.0)
            inside = (numbers < dim)[:, None] & (columns < WIDTH)[None]
            weight = tl.load(first + columns[None] * dim + numbers[:, None], mask=inside, other=0.0)
            bias = tl.load(first_bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
            tile = tl.dot(point.to(weight.dtype), weight, input_precision="ieee") + bias[None]
        else:
            inside = (row < rows)[:, None] & (columns < WIDTH)[None]
            tile = tl.load(hidden + row[:, None] * WIDTH + columns[None], mask=inside, other=0.0)
        return tile

    @triton.jit
    def _moments(
        entry, row, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
        READ: tl.constexpr,
    ):  # fmt: skip
        """Return mean and inverse standard deviation of rows, [ROWS] each.

        Tile by tile, the moments so far are joined with the tile's: a difference of large sums would cancel.
        """
        mean = tl.zeros([ROWS], tl.float32)
        apart = tl.zeros([ROWS], tl.float32)  # sum of squared distances from the mean
        before = 0.0
        for start in range(0, WIDTH, READ):
            columns = start + tl.arange(0, READ)
            inside = (columns < WIDTH)[None]
            seen = tl.sum((columns < WIDTH).to(tl.float32), 0)
            tile = _tile(entry, row, columns, FIRST, WIDTH, DIM)
            here = tl.sum(tl.where(inside, tile, 0.0), 1) / seen
            around = tl.where(inside, tile - here[:, None], 0.0)
            share = seen / (before + seen)
            apart += tl.sum(around * around, 1) + (here - mean) * (here - mean) * before * share
            mean += (here - mean) * share
            before += seen
        return mean, 1.0 / tl.sqrt(apart / WIDTH + 1e-6)

    @triton.jit
    def _modulated(normed, modulations, row, rows, columns, WIDTH: tl.constexpr):
        """Return normed * (1 + scale) + shift, [ROWS, N]; 0 outside.

        Args:
            modulations: shift of the first column and of each row, long [ROWS]; the scale follows it.
        """
        inside = (row < rows)[:, None] & (columns < WIDTH)[None]
        place = modulations[:, None] + columns[None]
        shift = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
        return tl.where(inside, normed * (1.0 + scale) + shift, 0.0)

    @triton.jit
    def _up_kernel(
        hidden, inner, x, first, first_bias, norm, norm_bias, up, up_bias, modulations, rows, count, dim, stride,
        shift, FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
        DIM: tl.constexpr, READ: tl.constexpr,
    ):  # fmt: skip
        """inner = silu(up(norm(hidden) * (1 + scale) + shift))."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        out = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        entry = (hidden, x, first, first_bias, rows, count, dim)
        mean, inverse = _moments(entry, row, FIRST, WIDTH, DIM, ROWS, READ)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, READ):
            columns = start + tl.arange(0, READ)
            tile = _tile(entry, row, columns, FIRST, WIDTH, DIM)
            weight = tl.load(norm + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
            bias = tl.load(norm_bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
            tile = (tile - mean[:, None]) * inverse[:, None] * weight[None] + bias[None]
            tile = _modulated(tile, modulations + row * stride + shift, row, rows, columns, WIDTH)
            inside = (columns < WIDTH)[:, None] & (out < WIDTH)[None]
            weight = tl.load(up + out[None] * WIDTH + columns[:, None], mask=inside, other=0.0)
            total = tl.dot(tile.to(weight.dtype), weight, total, input_precision="ieee")
        total += tl.load(up_bias + out, mask=out < WIDTH, other=0.0).to(tl.float32)[None]
        total = total * tl.sigmoid(total)
        inside = (row < rows)[:, None] & (out < WIDTH)[None]
        tl.store(inner + row[:, None] * WIDTH + out[None], total.to(inner.dtype.element_ty), mask=inside)

    @triton.jit
    def _down_kernel(
        hidden, inner, x, first, first_bias, down, down_bias, modulations, rows, count, dim, stride, gate,
        FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
        READ: tl.constexpr,
    ):  # fmt: skip
        """hidden = hidden + gate * down(inner), in place: of hidden, a program reads only the tile that it writes."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        out = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, READ):
            columns = start + tl.arange(0, READ)
            inside = (row < rows)[:, None] & (columns < WIDTH)[None]
            tile = tl.load(inner + row[:, None] * WIDTH + columns[None], mask=inside, other=0.0)
            inside = (columns < WIDTH)[:, None] & (out < WIDTH)[None]
            weight = tl.load(down + out[None] * WIDTH + columns[:, None], mask=inside, other=0.0)
            total = tl.dot(tile, weight, total, input_precision="ieee")
        total += tl.load(down_bias + out, mask=out < WIDTH, other=0.0).to(tl.float32)[None]
        inside = (row < rows)[:, None] & (out < WIDTH)[None]
        by = tl.load(modulations + row[:, None] * stride + gate + out[None], mask=inside, other=0.0)
        entry = (hidden, x, first, first_bias, rows, count, dim)
        tile = _tile(entry, row, out, FIRST, WIDTH, DIM)
        tl.store(hidden + row[:, None] * WIDTH + out[None], tile + by.to(tl.float32) * total, mask=inside)

    @triton.jit
    def _final_kernel(
        point, means, sigmas, hidden, x, last, last_bias, modulations, scales, law, noise, rows, count, dim, stride,
        shift, law_stride, number_stride, GUIDED: tl.constexpr, LEARNED: tl.constexpr, NOISY: tl.constexpr,
        ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, READ: tl.constexpr,
    ):  # fmt: skip
        """The last layer on the rows of some samples, guidance, the law of the level, and the draw."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        other_row = tl.where(row < count, count + row, rows)  # the unconditional one; none has number `rows`
        numbers = tl.arange(0, DIM)
        known = row < count
        entry = (hidden, x, x, x, rows, count, dim)  # after the first block: nothing is projected
        mean, inverse = _moments(entry, row, False, WIDTH, DIM, ROWS, READ)
        if GUIDED:
            other_mean, other_inverse = _moments(entry, other_row, False, WIDTH, DIM, ROWS, READ)
        total = tl.zeros([ROWS, DIM], tl.float32)
        rest = tl.zeros([ROWS, DIM], tl.float32)
        other = tl.zeros([ROWS, DIM], tl.float32)
        for start in range(0, WIDTH, READ):
            columns = start + tl.arange(0, READ)
            inside = (columns < WIDTH)[:, None] & (numbers < dim)[None]
            place = last + numbers[None] * WIDTH + columns[:, None]
            weight = tl.load(place, mask=inside, other=0.0)
            tile = (_tile(entry, row, columns, False, WIDTH, DIM) - mean[:, None]) * inverse[:, None]
            tile = _modulated(tile, modulations + row * stride + shift, row, count, columns, WIDTH)
            total = tl.dot(tile.to(weight.dtype), weight, total, input_precision="ieee")
            if LEARNED:
                rest_weight = tl.load(place + dim * WIDTH, mask=inside, other=0.0)
                rest = tl.dot(tile.to(weight.dtype), rest_weight, rest, input_precision="ieee")
            if GUIDED:
                tile = _tile(entry, other_row, columns, False, WIDTH, DIM)
                tile = (tile - other_mean[:, None]) * other_inverse[:, None]
                tile = _modulated(
                    tile, modulations + other_row * stride + shift, other_row, rows, columns, WIDTH
                )
                other = tl.dot(tile.to(weight.dtype), weight, other, input_precision="ieee")
        bias = tl.load(last_bias + numbers, mask=numbers < dim, other=0.0).to(tl.float32)[None]
        total += bias
        if GUIDED:
            other += bias
            scale = tl.load(scales + row, mask=known, other=0.0)[:, None]
            total = other + scale * (total - other)

        numbers_of = law + row * law_stride
        inside = known[:, None] & (numbers < dim)[None]
        at = row[:, None] * dim + numbers[None]
        of_x = tl.load(numbers_of, mask=known, other=0.0)[:, None]
        of_output = tl.load(numbers_of + number_stride, mask=known, other=0.0)[:, None]
        mean = of_x * tl.load(x + at, mask=inside, other=0.0) + of_output * total
        sigma = tl.load(numbers_of + 4 * number_stride, mask=known, other=0.0)[:, None] + tl.zeros_like(mean)
        if LEARNED:
            rest += tl.load(last_bias + dim + numbers, mask=numbers < dim, other=0.0).to(tl.float32)[None]
            low = tl.load(numbers_of + 2 * number_stride, mask=known, other=0.0)[:, None]
            high = tl.load(numbers_of + 3 * number_stride, mask=known, other=0.0)[:, None]
            sigma = sigma * tl.exp((low + (rest + 1.0) / 2.0 * (high - low)) / 2.0)
        tl.store(means + at, mean, mask=inside)
        tl.store(sigmas + at, sigma, mask=inside)
        if NOISY:
            mean += sigma * tl.load(noise + at, mask=inside, other=0.0)
        tl.store(point + at, mean, mask=inside)
