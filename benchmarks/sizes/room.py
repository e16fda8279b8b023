"""Whether a device has room for a model of official size, asked before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: free on a GPU, on a CPU what the system says is available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def refuse_what_does_not_fit(
    needed: dict[str, int],
    device: torch.device,
    *,
    at: Callable[[int, int], dict[str, int]] | None = None,
    batch_size: int = 1,
    window: int = 1,
) -> None:
    """Refuse, before anything is allocated, what the device has no room for.

    Args:
        needed: bytes by what they are for.
        at: what is needed for a batch and a window; the message then says what fits.
        batch_size, window: what `needed` is for.

    Raises:
        ValueError: names what is needed, what is free, and what helps.
    """
    available, total = available_memory(device), sum(needed.values())
    if total <= available:
        return
    parts = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in needed.items())
    remedy = "pass a smaller --model, --dtype bfloat16, or smaller --batch-sizes and --windows."
    if at is not None:
        fitting = what_fits(at, available, batch_size, window)
        if fitting is None:
            least = sum(at(1, 1).values()) / 1e9
            remedy = (
                f"one sample with window 1 needs {least:.1f} GB: pass a smaller --model, or --dtype bfloat16."
            )
        elif fitting[1] == window:
            remedy = f"with window {window} the largest batch that fits is {fitting[0]}: pass smaller --batch-sizes."
        else:
            remedy = (
                f"at batch 1 the largest window that fits is {fitting[1]}: pass smaller --batch-sizes and "
                "--windows."
            )
    raise ValueError(
        f"this needs {total / 1e9:.1f} GB ({parts}), and {device} has {available / 1e9:.1f} GB free; {remedy}"
    )


def what_fits(
    at: Callable[[int, int], dict[str, int]], available: int, batch_size: int, window: int
) -> tuple[int, int] | None:
    """The largest batch that fits with this window, or with a batch of 1 the largest window; None: nothing does."""
    sizes = [(batch, window) for batch in range(batch_size, 0, -1)]
    sizes += [(1, width) for width in range(window - 1, 0, -1)]
    return next((size for size in sizes if sum(at(*size).values()) <= available), None)
