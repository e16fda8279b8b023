"""Check that the cache of a decode fits its device, before anything is allocated."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that PyTorch can still allocate, including those it holds unused; None elsewhere."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def check_cache_fits(sample_bytes: int, batch_size: int, device: torch.device) -> None:
    """Refuse a batch whose cache does not fit the device.

    Args:
        sample_bytes: cache size of one sample, its unconditional row included.

    Raises:
        ValueError: the cache does not fit; gives the needed bytes, the free bytes, and how many samples fit.
    """
    free, needed = free_bytes(device), sample_bytes * batch_size
    if free is not None and needed > free:
        fits = free // sample_bytes
        raise ValueError(
            f"the cache of {batch_size} samples takes {needed / 1e9:.1f} GB, {device} has {free / 1e9:.1f} GB free; "
            + (f"pass at most {fits} samples at a time." if fits else "it has no room for a single one.")
        )
