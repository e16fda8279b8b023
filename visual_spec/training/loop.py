"""What every trainer shares: a cosine schedule, a resumable checkpoint and the record kept beside the weights."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import torch


def cosine_rate(step: int, total: int, peak: float, warmup: int) -> float:
    """Learning rate at `step`: linear warm-up, then a cosine down to 2 % of `peak`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def write_json(path: Path, document: dict) -> None:
    """Write a JSON document under a temporary name and rename it, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(temporary, path)


class Checkpoint:
    """Resumable state of a run: tensors, the step, the loss curve and the seconds spent, in one file."""

    def __init__(self, path: Path, every: int):
        self.path, self.every = path, every
        self.started = time.monotonic()
        self.seconds_before = 0.0
        self.curve: list[tuple[int, float]] = []

    @property
    def seconds(self) -> float:
        """Training seconds so far, earlier runs included."""
        return self.seconds_before + time.monotonic() - self.started

    def load(self) -> dict | None:
        """The saved tensors on the CPU, whichever device saved them, or None where there is nothing to resume."""
        if not self.path.exists():
            return None
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        self.curve, self.seconds_before = saved["curve"], saved["seconds"]
        return saved

    def save(self, **tensors) -> None:
        """Write atomically: an interrupted save leaves the previous file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".tmp")
        torch.save({**tensors, "curve": self.curve, "seconds": self.seconds}, temporary)
        os.replace(temporary, self.path)
