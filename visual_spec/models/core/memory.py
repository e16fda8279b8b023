"""Whether the cache of a decode fits its device, asked before anything is allocated."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that PyTorch can still allocate, those that it holds unused included; None elsewhere."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def check_cache_fits(sample_bytes: int, batch_size: int, device: torch.device) -> None:
    """Refuse a batch whose cache the device has no room for.

    Args:
        sample_bytes: of the cache of one sample, its unconditional row included.

    Raises:
        ValueError: names what is needed, what is free, and how many samples fit.
    """
    free, needed = free_bytes(device), sample_bytes * batch_size
    if free is not None and needed > free:
        fits = free // sample_bytes
        raise ValueError(
            f"the cache of {batch_size} samples takes {needed / 1e9:.1f} GB, {device} has {free / 1e9:.1f} GB free; "
            + (f"pass at most {fits} samples at a time." if fits else "it has no room for a single one.")
        )
