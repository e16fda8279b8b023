"""Launching of kernels: whether Triton is available, and how tensors are passed to it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton
from torch.nn import Parameter

# Untyped: to a type checker a kernel is a function that cannot be called.
triton: Any
try:
    triton = import_module("triton")
except ModuleNotFoundError:  # CPU-only builds of PyTorch have no Triton and need none
    triton = None
# Before Triton 3.3 (PyTorch 2.7), kernels take no tuples.
if triton is not None and not hasattr(triton.language, "tuple"):
    triton = None
# Its waits and signals between kernels; a kernel names them where it was launched with `launch_pdl`.
cuda: Any = None if triton is None else import_module("triton.language.extra.cuda")

# What kernels of layers compute with; their sums are float32.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a kernel can run on the tensor's device."""
    return triton is not None and tensor.device.type == "cuda"


def fits(logits: Tensor) -> bool:
    """Return whether the kernels of laws, which compute in float32, take these logits."""
    return on_gpu(logits) and logits.dtype != torch.float64


def fused(activations: Tensor) -> bool:
    """Return whether the kernels of a network's layers take these: on a GPU, not float64, and without gradients.

    Not where `torch.autocast` chooses the dtype of every operation.
    """
    plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"))
    return on_gpu(activations) and activations.dtype in FLOATS and plain


def on_host(tensor: Tensor) -> bool:
    """Return whether NumPy can read the tensor: it is on the CPU, and not a compiler's fake tensor."""
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, Parameter)


def nowhere(where: Tensor) -> bool:
    """Return whether the host sees that a small tensor is true nowhere, which spares work on larger ones."""
    return on_host(where) and not where.any()


def compiled(kernel: object) -> bool:
    """Return False for a kernel of Triton's interpreter, which tracers need not see."""
    return triton is not None and isinstance(kernel, triton.JITFunction)


@cache
def dependent(device: torch.device) -> bool:
    """Return whether a kernel may be launched before the one before it has ended, to wait for it itself.

    Such a kernel must wait, whether it reads what that one writes or not: those after it wait for it alone.
    """
    if device.type != "cuda" or not hasattr(cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launcher(kernel: Any) -> Any:
    """Return what `[grid](...)` launches a kernel with, in an operator that tracers look into."""
    return wrap_triton(kernel) if compiled(kernel) else kernel


def early_launch(kernel: object, wanted: bool, device: torch.device) -> dict[str, bool]:
    """Return the arguments of a kernel that calls `wait_for_others`: early where wanted, the device can, and no tracer
    takes the launch, which would lose that it is early.
    """
    early = wanted and dependent(device) and launcher(kernel) is kernel
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})


def most_registers(kernel: object, count: int) -> dict[str, int]:
    """Return the arguments of a kernel whose threads may take so many registers, where the assembler would give fewer
    and spill. Tracers do not know how to ask for more.
    """
    return {"maxnreg": count} if launcher(kernel) is kernel else {}


def rows_of_numbers(values: Tensor) -> Tensor:
    """Return the values with adjacent numbers of a row adjacent in memory."""
    return values if values.stride(-1) == 1 else values.contiguous()


if triton is not None:
    from triton import language as tl

    @triton.jit
    def wait_for_others(EARLY: tl.constexpr):
        """Let the next kernel start, and wait for the one before: at the beginning, before any read or write."""
        if EARLY:
            cuda.gdc_launch_dependents()
            cuda.gdc_wait()
