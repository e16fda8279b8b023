"""What all kernels share: whether Triton is there, and how tensors are handed to it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn import Parameter

# Of no type: to a type checker a kernel is a function that nobody may call.
triton: Any
try:
    triton = import_module("triton")
except ModuleNotFoundError:  # CPU-only builds of PyTorch come without Triton, and need none
    triton = None
# Before 3.3 (PyTorch 2.7), kernels know no tuples.
if triton is not None and not hasattr(triton.language, "tuple"):
    triton = None


def on_gpu(tensor: Tensor) -> bool:
    """Whether a kernel can run where the tensor is."""
    return triton is not None and tensor.device.type == "cuda"


def on_host(tensor: Tensor) -> bool:
    """Whether NumPy can read the tensor: it is on the CPU, and no stand-in that a compiler traces with."""
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, Parameter)


def compiled(kernel: Any) -> bool:
    """False for a kernel of Triton's interpreter, which no tracer needs to see."""
    return triton is not None and isinstance(kernel, triton.JITFunction)


def rows_of_numbers(values: Tensor) -> Tensor:
    """The same, with neighbouring numbers of a row side by side in memory."""
    return values if values.stride(-1) == 1 else values.contiguous()
