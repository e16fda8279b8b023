"""The machine that measures: its devices, models on them, and the facts without which a number means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from visual_spec.eval.arguments import logger


def load(
    model: str,
    device: str | None,
    dtype: str | None,
    threads: int | None = None,
    masked: str | None = None,
    drafter: str | None = None,
) -> Any:
    """A silent pipeline on `device` (default: a GPU if there is one), with weights of `dtype` (None: as saved).

    Args:
        masked: a masked model of the same tokens beside it: the two come as a `MaskedPair`.
        drafter: in place of the pipeline's own.

    Raises:
        ValueError: a model or a device that is not there.
    """
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    from visual_spec.eval.pair import MaskedPair
    from visual_spec.pipelines.loading import load_drafter, load_pipeline

    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    place = {"device": choose_device(device)} | ({} if dtype is None else {"dtype": getattr(torch, dtype)})
    start = time.perf_counter()
    pipe = load_pipeline(model).to(**place)
    pipe.set_progress_bar_config(disable=True)
    logger.debug("%s loaded in %.1f s: %s", model, time.perf_counter() - start, type(pipe).__name__)
    if drafter is not None:
        pipe.drafter = load_drafter(drafter).to(**place)
    return pipe if masked is None else MaskedPair(pipe, load(masked, device, dtype))


def own_device(asked: str | None) -> str | None:
    """The device that was asked for; under torchrun, the GPU of this process."""
    if asked is not None or not os.environ.get("LOCAL_RANK", "").strip():
        return asked
    return f"cuda:{os.environ['LOCAL_RANK'].strip()}" if torch.cuda.is_available() else "cpu"


def choose_device(name: str | None) -> torch.device:
    """The device of a name; without one a GPU if there is one, else the CPU.

    Raises:
        ValueError: a name that PyTorch does not know, or a device that is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(("cuda" if count else "cpu") if name is None else name)
    except RuntimeError as error:
        raise ValueError(
            f"--device {name or repr(name)} is no device; pass cpu, cuda, or cuda:1 and the like."
        ) from error
    if device.type == "meta":
        raise ValueError("--device meta holds no numbers; pass --device cpu, or leave it out.")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"--device {name}, but PyTorch sees {count} GPUs here; pass --device cpu, or leave it out."
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--device {name} cannot be used ({reason}); pass --device cpu, or leave it out."
        ) from error
    return device


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
