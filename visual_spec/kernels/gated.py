"""The gate of a SwiGLU layer, in one launch: SiLU(gate) times the other projection.

Shazeer, "GLU variants improve transformer", arXiv 2002.05202, section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import FLOATS, fused, launcher, on_gpu, rows_of_numbers, triton

_BLOCK = 1024  # numbers of a program


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
    def _gated_kernel(out, gate, up, width, gate_stride, up_stride, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        kind = out.dtype.element_ty
        number = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
        opened = (number / (1.0 + tl.exp(-number))).to(kind).to(tl.float32)  # rounded as by the definition
        other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + columns, (opened * other).to(kind), mask=inside)
