"""The machine that measures: the facts without which a number means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch


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


def environment_line(environment: dict[str, Any]) -> str:
    """Return one line that says where the numbers come from."""
    parts = [environment["device_name"]]
    if environment["device"] == "cpu":
        parts.append(f"{environment['threads']} threads, load {environment['load_average']}")
    parts += [
        environment["dtype"],
        f"torch {environment['torch']}",
        f"commit {environment['commit'] or 'unknown'}",
    ]
    if "copy_bandwidth" in environment:
        parts.append(f"copies {environment['copy_bandwidth'] / 1e9:.1f} GB/s")
        if environment["device"] == "cpu":
            parts.append("peak memory is of the process so far")
        if "picture_ms" in environment:
            parts.append(f"tokens to pixels {environment['picture_ms']:.1f} ms per image")
        if "clip_ms" in environment:
            parts.append(f"codes to waves {environment['clip_ms']:.0f} ms per clip")
    return ", ".join(parts)
