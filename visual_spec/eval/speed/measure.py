"""What a benchmark reads off the machine: seconds, peak memory, bandwidth, and the bytes that a call must read."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.samplers.core.graph import can_record
from visual_spec.samplers.core.trace import MEASURE

QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}


def timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
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


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80, interpolated linearly between the two nearest values.

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("no values; a quantile needs at least one")
    ordered = sorted(values)
    result = {}
    for name, share in QUANTILES.items():
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        result[name] = ordered[low] + (place - low) * (ordered[high] - ordered[low])
    return result


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that PyTorch had allocated since `reset_peak_memory`.

    On a CPU it is the high-water mark of the process, which never falls and covers the libraries too.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mark if sys.platform == "darwin" else mark * 1024  # macOS counts bytes, Linux KiB


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of `peak_memory` on a GPU; on a CPU there is none to start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: free on a GPU, on a CPU what the system says is available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # no Linux: all of the memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
    """Refuse a dtype that the device does not compute in, before anything is allocated.

    Raises:
        ValueError: names those that it does.
    """
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
    decode: Callable[[Callable[[int, Tensor], Any]], Any], device: torch.device
) -> float | None:
    """Milliseconds that a GPU worked on a call of a decode, the prefill left out, by PyTorch's profiler.

    Args:
        decode: runs a decode with a callback of samplers, which is called after the prefill and after every call.

    Returns:
        None on other devices, and where the profiler sees nothing of the device.
    """
    if device.type != "cuda":
        return None
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    calls = 0

    def note(index: int, lengths: Tensor) -> None:
        nonlocal calls
        calls = index
        if index == 0:
            torch.cuda.synchronize(device)
            profiler.start()

    decode(note)
    torch.cuda.synchronize(device)
    profiler.stop()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    return covered(spans) / 1000 / calls if spans and calls else None  # from microseconds


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def phase_figures(
    seconds: Sequence[float],
    phases: Sequence[dict[str, float]],
    calls: Sequence[int],
    *,
    device: torch.device,
    busy_ms: float | None = None,
) -> dict[str, Any]:
    """What a call spends its time on, medians over rounds.

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


def weight_bytes_per_call(model: nn.Module, call: Callable[[], Any]) -> int:
    """Bytes of the parameters that `call`, one forward of the model, reads.

    Every module that runs counts with its own parameters, each tensor once. Embedding tables do not count, as a few
    rows are read; nor does what only the prefill runs.
    """
    sizes: dict[int, int] = {}

    def note(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            sizes[id(parameter)] = parameter.numel() * parameter.element_size()

    handles = [m.register_forward_pre_hook(note) for m in model.modules() if not isinstance(m, nn.Embedding)]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return sum(sizes.values())


def bytes_per_call(model: Any, condition: Any, *, batch_size: int, guided: bool) -> tuple[int, int]:
    """Weight and cache bytes that one call cannot but read, whatever its window.

    Weights: `weight_bytes_per_call`. Cache: the prefix and half of the grid, the mean over plain decoding. The size of
    a slot is read off two prefills that differ in the window, since the cache has room for prefix + tokens + window.
    """
    one, two = (
        model.prefill(condition, batch_size=batch_size, guided=guided, window=window) for window in (1, 2)
    )
    pairs = zip(one.buffers(), two.buffers(), strict=True) if can_record(one) else ()
    # The cache is what has room for the window; masks are small and of fixed size.
    sizes = [(a.nbytes, b.nbytes) for a, b in pairs if _grew(a, b)]
    slot = sum(b - a for a, b in sizes)
    prefix = sum(a for a, _ in sizes) - (model.grid.num_tokens + 1) * slot
    tokens = torch.zeros(batch_size, 1, dtype=torch.long, device=one.logits.device)
    weights = weight_bytes_per_call(model, lambda: model(one, tokens, tokens))
    return weights, prefix + slot * model.grid.num_tokens // 2


def _grew(one: Tensor, two: Tensor) -> bool:
    return one.is_floating_point() and one.shape != two.shape


def sampler_settings(sampler: Any) -> dict[str, Any]:
    """A sampler's class and its settings, those left at their defaults too."""
    config = {name: value for name, value in dict(sampler.config).items() if not name.startswith("_")}
    return {"class": type(sampler).__name__, **config}


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's as the operating system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        names[0] if names and names[0] not in ("", "unknown") else platform.processor() or platform.machine()
    )


def git_commit() -> str | None:
    """Commit of the source tree that runs, with `-dirty` for uncommitted changes; None outside of a checkout."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # An installed copy may lie within somebody else's checkout, whose commit says nothing about this code.
    return done.stdout.strip() if tracked.returncode == 0 and done.returncode == 0 else None


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Facts without which a number means nothing; JSON types only."""
    import visual_spec

    return {
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "visual_spec": visual_spec.__version__,
        "commit": git_commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
