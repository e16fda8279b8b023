"""What `save_pretrained` writes beside weights: `pipeline.py`, so that diffusers finds the class, and a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from visual_spec.families import all_pipelines
from visual_spec.files.documents import json_text
from visual_spec.files.whole import write_atomically
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.pipelines.components import resolved

_SCRIPT = '''"""Written by visual_spec: lets DiffusionPipeline.from_pretrained find this pipeline's class."""

from visual_spec import {name}

__all__ = ["{name}"]
'''
COMPANIONS = ("pipeline.py", "README.md")
MEASURED = Path(__file__).parent / "measured.json"  # by fingerprint of the weights; scripts/write_measured.py


def write_companions(pipe: Any, folder: Path) -> None:
    """Make a saved folder loadable by `DiffusionPipeline`, and describe it.

    Writes `pipeline.py`, names it in `model_index.json`, and writes `README.md`. Files of these names that someone else
    wrote stay as they are. A class of someone's own is left to them.
    """
    name = type(pipe).__name__
    index = folder / "model_index.json"
    ours = name in all_pipelines() and all_pipelines()[name].module == type(pipe).__module__
    if not ours or not index.is_file():
        return
    script = folder / "pipeline.py"
    if not script.exists() or script.read_text().startswith(_SCRIPT[:30]):
        write_atomically(script, _SCRIPT.format(name=name), overwrite=True)
        saved = resolved(json.loads(index.read_text())) | {"_class_name": ["pipeline", name]}
        write_atomically(index, json_text(saved, indent=2, sort_keys=True) + "\n", overwrite=True)
    if not (folder / "README.md").exists():
        write_atomically(folder / "README.md", model_card(pipe), overwrite=True)


def model_card(pipe: Any) -> str:
    """The model card of a pipeline: how to load it, its parts, its settings, and what was measured of its weights."""
    name, measured = type(pipe).__name__, measured_of(pipe)
    front = ["library_name: diffusers", "tags:", "- visual_spec", "- autoregressive"]
    if name in all_pipelines():
        front.insert(1, f"pipeline_tag: {all_pipelines()[name].hub_tag}")
    if measured is not None:  # an embedded model
        front.insert(0, "license: apache-2.0")
    parts = [
        f"| {part} | {type(model).__name__} | {_size(model)} |"
        for part, model in pipe.components.items()
        if model is not None
    ]
    sampler = getattr(pipe.sampler, "config", {})
    settings = {key: value for key, value in sampler.items() if not key.startswith("_")}
    lines = [
        "---",
        *front,
        "---",
        "",
        f"# {name}",
        "",
        "```python",
        f"from visual_spec import {name}",
        "",
        f'pipe = {name}.from_pretrained("FOLDER")',
        "```",
        "",
        'Or, where visual_spec is installed, `DiffusionPipeline.from_pretrained("FOLDER", trust_remote_code=True)`.',
        "",
        "| part | class | parameters |",
        "|:--|:--|--:|",
        *parts,
        "",
        f"Settings of a token's law: `{json_text(pipe.default_settings(), default=str)}`. "
        f"Sampler: `{json_text(settings, default=str)}`.",
        "",
    ]
    if measured is not None:
        lines += ["## Measured", "", measured["conditions"], "", *measured["table"], ""]
    return "\n".join(lines)


def measured_of(pipe: Any) -> dict[str, Any] | None:
    """What was measured of a pipeline with these very weights: {conditions, table}, or None."""
    models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    count = sum(value.numel() for model in models for value in model.state_dict().values())
    known = json.loads(MEASURED.read_text())
    if all(entry["numbers"] != count for entry in known.values()):
        return None  # large weights are not read for nothing
    return known.get(fingerprint(models))


def _size(part: object) -> str:
    if not isinstance(part, torch.nn.Module):
        return "-"
    count = sum(weight.numel() for weight in part.parameters())
    return f"{count / 1e6:.1f}M" if count >= 100_000 else str(count)
