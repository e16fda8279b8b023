"""What a benchmark reads off the machine: seconds, memory, bandwidth, phases, and the weights that a call reads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import psutil
import torch
from torch import Tensor, nn

from visual_spec.eval.intervals import quantiles
from visual_spec.eval.machine import device_name
from visual_spec.samplers.core.trace import MEASURE, DecodeTrace

T = TypeVar("T")


def timed(function: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run a function; returns its result and its seconds, by CUDA events on a GPU, else by the clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        result = function()
        return result, time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record(torch.cuda.current_stream(device))
    result = function()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return result, begin.elapsed_time(end) / 1000


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that PyTorch had allocated since `reset_peak_memory`.

    On a CPU it is the high-water mark of the process, which never falls and covers the libraries too.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().peak_wset  # pyright: ignore[reportAttributeAccessIssue]
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mark if sys.platform == "darwin" else mark * 1024  # macOS counts bytes, Linux KiB


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of `peak_memory` on a GPU; on a CPU there is none to start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def copy_bandwidth(device: torch.device, mebibytes: int | None = None, repeats: int = 7) -> float:
    """Bytes per second of copying a buffer too large for the caches: the best of some runs, reads and writes counted.

    The buffer has 1 GiB on a GPU and 128 MiB on a CPU unless `mebibytes` says otherwise.
    """
    mebibytes = mebibytes or (1024 if device.type == "cuda" else 128)
    source = torch.ones(mebibytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    target.copy_(source)  # first touch maps the pages
    best = min(timed(lambda: target.copy_(source), device)[1] for _ in range(repeats))
    return 2 * source.numel() / best


def matmul_peak(
    device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 25
) -> float:
    """Operations per second of a square matrix product, the best of some runs: what arithmetic can reach here.

    The matrices have 8192 rows on a GPU and 1024 on a CPU unless `size` says otherwise.
    """
    size = size or (8192 if device.type == "cuda" else 1024)
    left, right = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
    out = left @ right
    best = min(timed(lambda: torch.mm(left, right, out=out), device)[1] for _ in range(repeats))
    return 2 * size**3 / best


def refuse_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse, by ValueError, a dtype that the device does not compute in, before anything is allocated."""
    if not _computes_in(device, dtype):
        known = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
        names = [str(other).removeprefix("torch.") for other in known if _computes_in(device, other)]
        raise ValueError(
            f"{device_name(device)} does not compute in {str(dtype).removeprefix('torch.')}; pass --dtype with one of "
            f"{', '.join(names)}."
        )


def _computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cuda" and dtype == torch.bfloat16:  # older chips emulate it, at a tenth of the speed
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        one = torch.ones(2, 2, dtype=dtype, device=device)
        return bool(((one @ one) == 2).all())
    except (RuntimeError, TypeError):
        return False


def busy_ms_per_call(
    decode: Callable[[Callable[[int, Tensor], None]], None], device: torch.device
) -> float | None:
    """Milliseconds that a GPU worked on a call of a decode, the prefill left out, by PyTorch's profiler.

    Args:
        decode: runs a decode with a callback of samplers, which is called after the prefill and after every call.

    Returns:
        None on other devices, and where the profiler sees nothing of the device.
    """
    if device.type != "cuda":
        return None
    events, calls = device_events(decode, device)
    return covered([span for _, span in events]) / 1000 / calls if events and calls else None


def device_events(
    decode: Callable[[Callable[[int, Tensor], None]], None], device: torch.device
) -> tuple[list[tuple[str, tuple[float, float]]], int]:
    """Return what PyTorch's profiler saw of a decode after its prefill, and the number of calls.

    Args:
        decode: as of `busy_ms_per_call`.

    Returns:
        The name of each kernel or copy on a GPU, or of each operator on a CPU, with its start and end in microseconds.
    """
    kind = "CUDA" if device.type == "cuda" else "CPU"
    profiler = torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)])
    calls = 0

    def note(index: int, lengths: Tensor) -> None:
        nonlocal calls
        calls = index
        if index == 0:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            profiler.start()

    decode(note)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    profiler.stop()
    events = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in profiler.events() or []
        if event.device_type.name == kind and not getattr(event, "is_user_annotation", False)
    ]
    return events, calls


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def without_prefill(traces: Sequence[DecodeTrace]) -> tuple[list[float], list[float], list[dict[str, float]]]:
    """Of decodes: seconds of the prefill, seconds after it, and seconds of the phases after it."""
    laps = [dict(trace.phase_seconds) for trace in traces]
    prefills = [lap.pop("prefill", 0.0) for lap in laps]
    return prefills, [trace.seconds - one for trace, one in zip(traces, prefills, strict=True)], laps


def phase_figures(
    seconds: Sequence[float],
    phases: Sequence[dict[str, float]],
    calls: Sequence[int],
    *,
    device: torch.device,
    busy_ms: float | None = None,
) -> dict[str, object]:
    """Return what a call spends its time on, medians over rounds.

    Args:
        seconds: of every round, the prefill left out, and phase `MEASURE` (as in a trace).
        phases: of every round, the seconds of its phases, the prefill left out.
        calls: of every round.
        busy_ms: what `busy_ms_per_call` found.

    Returns:
        `phase_ms_per_call`: by phase. On a GPU a phase ends where its last operation does, so that waiting for the
        host counts as part of it. `gap_ms_per_call`: on a GPU the time in which it had nothing to do (None: unknown),
        on a CPU what lies between the phases.
    """
    names = list(dict.fromkeys(name for laps in phases for name in laps))

    def median(values: Sequence[float]) -> float:
        return quantiles([1000 * value / count for value, count in zip(values, calls, strict=True)])["p50"]

    if device.type == "cuda":
        gap = None if busy_ms is None else max(0.0, median(seconds) - busy_ms)
    else:
        used = [sum(laps.values()) - laps.get(MEASURE, 0.0) for laps in phases]
        gap = median([whole - busy for whole, busy in zip(seconds, used, strict=True)])
    return {
        "phase_ms_per_call": {name: median([laps.get(name, 0.0) for laps in phases]) for name in names},
        "gap_ms_per_call": gap,
    }


def weight_bytes_per_call(model: nn.Module, call: Callable[[], object]) -> int:
    """Bytes of the parameters that `call`, one forward of the model, reads.

    Every module that runs counts with its own parameters, each tensor once, and with the parts that it hands to a
    kernel (`ordered`). Embedding tables do not count, as a few rows are read; nor does what only the prefill runs.
    """
    sizes: dict[int, int] = {}

    def note(module: nn.Module, *_: object) -> None:
        handed = getattr(module, "ordered", ()) if getattr(module, "one_order", False) else ()
        parts = [getattr(module, name).parameters() for name in handed]
        for parameter in chain(module.parameters(recurse=False), *parts):
            sizes[id(parameter)] = parameter.numel() * parameter.element_size()

    handles = [m.register_forward_pre_hook(note) for m in model.modules() if not isinstance(m, nn.Embedding)]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return sum(sizes.values())
