"""Weights at addresses that products expect, so that every load of the same weights computes the same bits.

A safetensors file may hold a tensor at any multiple of its item size, and a mapped weight stands where the file has it.
PyTorch's own memory begins at multiples of 64 bytes. At other addresses the products of MKL take other paths on some
processors and round otherwise (3e-14 in float64, measured on an AMD EPYC), so a model that was loaded could differ from
the one that was saved.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes; of a cache line, of an AVX-512 register, and of PyTorch's allocator


@torch.no_grad()
def align_weights(*models: nn.Module) -> None:
    """Copy the weights that stand at odd addresses into memory of their own, one after the other.

    Parameters stay the same objects, and weights that share memory go on sharing it. Weights that stand well stay
    mapped; those on other devices, on the meta device or in a layout or class of their own (quantised, sharded) are
    left alone. A mapped page is the file's, which the system may drop: what a process needs is one model, not two.

    Args:
        models: modules whose parameters and buffers to look at, together.
    """
    held: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            if _is_plain(tensor):
                held[tensor.untyped_storage().data_ptr()][id(tensor)] = tensor
    while held:
        place, by_id = held.popitem()
        tensors = list(by_id.values())
        if not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
            continue
        if len(tensors) == 1:
            tensors[0].data = tensors[0].detach().clone()
        elif (
            place % ALIGNMENT
        ):  # else they are parts of memory that begins well, at the same places in every load
            _move(tensors)


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor) in (Tensor, nn.Parameter)
    return kind and tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized


def _move(tensors: list[Tensor]) -> None:
    """Copy one storage and put the tensors that lie in it at the same places of the copy."""
    mapped = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    storage = mapped.clone().untyped_storage()
    for tensor in tensors:
        moved = torch.empty(0, dtype=tensor.dtype)
        tensor.data = moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore
