"""The files of `gpu_hour`: one for each stage, which its runner writes and its tables read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, FAILED, RUNNING, STOPPED = "ok", "failed", "running", "over its limit"


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: on the command line, and in the name of its file.
        title: what it measures.
        parts: "module:function"; the function takes `dry` (tiny sizes on a CPU) and returns {name: what measures it}, a
            part's result being JSON. A result with a key "problem" counts as failed, and is kept.
        limit: seconds after which it is stopped.
        essential: False for what can be left out of a short loan.
    """

    name: str
    title: str
    parts: str
    limit: int
    essential: bool = True


def result_path(folder: Path, stage: Stage) -> Path:
    """The file of a stage."""
    return folder / f"stage-{stage.name}.json"


def read_result(path: Path) -> dict[str, Any]:
    """What a file of a stage says; empty where there is none, or no whole one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else {}
