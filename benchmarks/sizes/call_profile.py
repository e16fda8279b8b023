"""Where the time of a call goes, by PyTorch's profiler: work of the device, gaps between, and the longest kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visual_spec.eval import measure

# Runs a decode with a callback of samplers, which is called after the prefill and after every call.
Decode = Callable[[Callable[[int, Tensor], Any]], Any]
_NAME = 90  # characters of a kernel's name that are kept: templates make them long


def profile_calls(decode: Decode, device: torch.device, top: int = 10) -> dict[str, Any]:
    """The calls of a decode, the prefill left out.

    Args:
        decode: is run twice, once without the profiler, whose own work would count; what has to be compiled or
            recorded is expected to be.

    Returns:
        `wall_ms_per_call` without the profiler; `busy_ms_per_call`, in which the device worked, `gap_ms_per_call`, the
        rest, and `kernels_per_call`, all three None where nothing of the device was seen; `top`: name, milliseconds
        and number of the kernels that took the longest, a call. On a CPU operators stand for kernels.
    """
    seconds, calls = _between_calls(decode, device)
    events, profiled = measure.device_events(decode, device)
    wall = 1000 * seconds / calls
    found: dict[str, Any] = dict(calls=calls, wall_ms_per_call=wall)
    if not events or not profiled:
        return found | dict(busy_ms_per_call=None, gap_ms_per_call=None, kernels_per_call=None, top=[])
    busy = measure.covered([span for _, span in events]) / 1000 / profiled
    by_name: dict[str, list[float]] = {}
    for name, (start, end) in events:
        by_name.setdefault(name[:_NAME], []).append(end - start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    return found | dict(
        busy_ms_per_call=busy,
        gap_ms_per_call=max(0.0, wall - busy),
        kernels_per_call=len(events) / profiled,
        top=[
            dict(name=name, ms_per_call=sum(times) / 1000 / profiled, count_per_call=len(times) / profiled)
            for name, times in longest
        ],
    )


def _between_calls(decode: Decode, device: torch.device) -> tuple[float, int]:
    """Seconds from the end of the prefill to the end of the decode, and how many calls that were."""
    calls, marks = 0, []

    def note(index: int, lengths: Tensor) -> None:
        nonlocal calls
        calls = index
        if index == 0:
            marks.append(_now(device))

    decode(note)
    return _now(device) - marks[0], max(1, calls)


def _now(device: torch.device) -> float:

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
