"""Saved pipelines on the device that computes, for commands and servers."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch

logger = logging.getLogger("visual_spec")


def load(
    model: str, device: str | None, dtype: str | None, threads: int | None = None, drafter: str | None = None
) -> Any:
    """A silent pipeline on `device` (default: a GPU if there is one), with weights of `dtype` (None: as saved).

    Args:
        drafter: in place of the pipeline's own.

    Raises:
        ValueError: a model or a device that is not there.
    """
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

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
    return pipe


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
