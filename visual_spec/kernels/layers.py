"""What stands between two products of a transformer layer, in one launch each: `add_norm` and `gated`.

`add_norm` is the residual sum and RMSNorm (Zhang, Sennrich, "Root mean square layer normalization", NeurIPS 2019). A
row of a few thousand numbers fits into the registers of one program, so both are read once and written once; as single
operations they are some six launches. `gated` is the gate of a SwiGLU layer, SiLU(gate) times the other projection
(Shazeer, "GLU variants improve transformer", arXiv 2002.05202, section 2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import FLOATS, fused, launcher, on_gpu, rows_of_numbers, triton

# Numbers of a row that a warp holds.
_OF_WARP = 512
_BLOCK = 1024  # numbers of a program of `gated`


def add_norm(hidden: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add, and normalise the sum by the root of its mean square.

    Args:
        hidden, change: [..., dim], of one dtype.
        weight: [dim], the factors after the norm.
        eps: added to the mean square.

    Returns:
        The sum and its norm, each [..., dim]. On CUDA by the Triton kernel where no gradients are asked for and all
        three have one dtype, elsewhere by `add_norm_reference`.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    if hidden.shape != change.shape or weight.shape != hidden.shape[-1:]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, change {tuple(change.shape)} and weight {tuple(weight.shape)}; "
            "pass [..., dim] twice, and [dim]."
        )
    if fused(hidden) and hidden.dtype == change.dtype == weight.dtype:
        return _add_norm_op(hidden, change, weight, eps)
    return add_norm_reference(hidden, change, weight, eps)


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x [..., dim]`, in PyTorch; half precision as official: the norm in float32, then the weight."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_norm_reference(hidden: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The definition of `add_norm`, in PyTorch, on any device."""
    total = hidden + change
    return total, norm_reference(total, weight, eps)


@triton_op("visual_spec::add_norm", mutates_args=())
def _add_norm_op(hidden: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    function = add_norm_triton if on_gpu(hidden) else add_norm_reference
    return function(hidden, change, weight, eps)


@_add_norm_op.register_fake
def _add_norm_outputs(hidden: Tensor, *_: Tensor | float) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)


def add_norm_triton(hidden: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_norm` by the Triton kernel.

    Raises:
        TypeError: a dtype that the kernel does not take.
    """
    if not hidden.dtype == change.dtype == weight.dtype or hidden.dtype not in FLOATS:
        raise TypeError(
            f"hidden is {hidden.dtype}, change {change.dtype} and weight {weight.dtype}; pass float32, bfloat16 or "
            "float16, three times the same."
        )
    total, normed = _add_norm_outputs(hidden)
    width = hidden.shape[-1]
    rows = hidden.numel() // max(1, width)
    if rows:
        block = 1 << (width - 1).bit_length()
        with torch.cuda.device_of(hidden):
            launcher(_add_norm_kernel)[(rows,)](
                total,
                normed,
                hidden.contiguous(),
                change.contiguous(),
                weight.contiguous(),
                width,
                eps,
                BLOCK=block,
                num_warps=min(16, max(1, block // _OF_WARP)),
            )
    return total, normed


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) * up, [..., hidden].

    Args:
        gate, up: [..., hidden], of one dtype; they may be the halves of one product.

    Returns:
        [..., hidden]. On CUDA by the Triton kernel where no gradients are asked for, elsewhere by `gated_reference`.

    Raises:
        ValueError: the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(
            f"gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; pass two of one shape."
        )
    if fused(gate) and gate.dtype == up.dtype:
        return _gated_op(gate, up)
    return gated_reference(gate, up)


def gated_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The definition of `gated`, in PyTorch, on any device."""
    return F.silu(gate) * up


@triton_op("visual_spec::gated", mutates_args=())
def _gated_op(gate: Tensor, up: Tensor) -> Tensor:
    return gated_triton(gate, up) if on_gpu(gate) else gated_reference(gate, up)


@_gated_op.register_fake
def _gated_output(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def gated_triton(gate: Tensor, up: Tensor) -> Tensor:
    """`gated` by the Triton kernel.

    Raises:
        TypeError: a dtype that the kernel does not take.
    """
    if gate.dtype != up.dtype or gate.dtype not in FLOATS:
        raise TypeError(
            f"gate is {gate.dtype} and up {up.dtype}; pass float32, bfloat16 or float16, twice the same."
        )
    out, width = _gated_output(gate, up), gate.shape[-1]
    if out.numel() == 0:
        return out
    gate, up = (rows_of_numbers(one).flatten(0, -2) for one in (gate, up))  # [rows, hidden], a view of a half
    with torch.cuda.device_of(gate):
        launcher(_gated_kernel)[(len(gate), -(-width // _BLOCK))](
            out, gate, up, width, gate.stride(0), up.stride(0), BLOCK=_BLOCK, num_warps=4
        )
    return out


if triton is not None:
    from triton import language as tl

    @triton.jit
    def _add_norm_kernel(total, normed, hidden, change, weight, width, eps, BLOCK: tl.constexpr):
        """One row: numbers are rounded where the definition rounds them."""
        columns = tl.arange(0, BLOCK)
        inside = columns < width
        at = tl.program_id(0).to(tl.int64) * width + columns
        kind = total.dtype.element_ty
        added = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
        added = (added + tl.load(change + at, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + at, added, mask=inside)
        numbers = added.to(tl.float32)
        scaled = numbers / tl.sqrt(tl.sum(numbers * numbers, 0) / width + eps)
        by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + at, (scaled.to(kind).to(tl.float32) * by).to(kind), mask=inside)

    @triton.jit
    def _gated_kernel(out, gate, up, width, gate_stride, up_stride, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        kind = out.dtype.element_ty
        number = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
        opened = (number / (1.0 + tl.exp(-number))).to(kind).to(tl.float32)  # rounded as by the definition
        other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + columns, (opened * other).to(kind), mask=inside)
