"""Fingerprints of weights, so that outputs of different models are not mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from visual_spec.models.core.saved import stored_parts


def fingerprint(modules: Iterable[nn.Module]) -> str:
    """Return twelve hexadecimal digits that change with any weight of the modules."""
    digest = hashlib.sha256()
    for module in modules:
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            for part in stored_parts(tensor.detach()):
                digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def written(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return what changes when a weight is written in place or replaced: a key of what was computed from weights.

    Writing through `.data` does not count, nor do weights that were made in inference mode.
    """
    return tuple(
        (id(tensor), 0 if tensor.is_inference() else tensor._version)
        for tensor in (*module.parameters(), *module.buffers())
    )
