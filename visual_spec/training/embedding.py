"""Write a pipeline into a folder of the package, as `from_pretrained` reads it there by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME

from visual_spec.pipelines.embedded import SHARED
from visual_spec.training.loop import write_json

RECORD = "training.json"


def embed(pipe: Any, out: Path, *, trained: Mapping[str, Path], shared: Mapping[str, str]) -> None:
    """Write the folder.

    Args:
        out: a folder beside those that hold the shared parts.
        trained: {part: folder that a trainer wrote}. Weights are copied as they are stored there, in 8 bits, with the
            record of the training where there is one.
        shared: {part: folder beside `out` that holds it; "folder/part" where it has another name there}.
    """
    pipe.save_pretrained(out)
    for part in shared:
        shutil.rmtree(out / part)
    if shared:
        write_json(out / SHARED, dict(shared))
    for part, folder in trained.items():
        for name in (SAFETENSORS_WEIGHTS_NAME, RECORD):
            if name != RECORD or (folder / name).exists():
                shutil.copyfile(folder / name, out / part / name)
        config = json.loads((out / part / "config.json").read_text())
        config.pop("_name_or_path", None)  # where it was trained is nobody's business
        write_json(out / part / "config.json", config)
    for written in ("pipeline.py", "README.md"):  # of saved folders; this one is part of the package
        (out / written).unlink(missing_ok=True)
    index = json.loads((out / "model_index.json").read_text())
    write_json(out / "model_index.json", index | {"_class_name": type(pipe).__name__})
