"""Load a saved pipeline, or a drafter, without knowing its class."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

from visual_spec.pipelines.base import VisualPipeline, refuse_no_pipeline
from visual_spec.pipelines.embedded import WEIGHTS_FOLDER, embedded_drafters

_HOME = {
    "ClassImagePipeline": "visual_spec.pipelines.class_image",
    "ImagePipeline": "visual_spec.pipelines.image",
    "ScaleImagePipeline": "visual_spec.pipelines.scale_image",
}
_DRAFTERS = {
    "EagleDrafter": "visual_spec.models.eagle",
    "LlamaGenTransformer": "visual_spec.models.llamagen",
    "MultiscaleDrafter": "visual_spec.models.multiscale",
}


def load_pipeline(name: str | os.PathLike, **kwargs: Any) -> Any:
    """The pipeline of an embedded model, a folder written by `save_pretrained`, or a Hub id, of the class saved there.

    Args:
        kwargs: for `from_pretrained`.

    Raises:
        ValueError: there is no pipeline, or one of a class that is not ours; names those that are.
    """
    refuse_no_pipeline(name)
    folder = Path(name if Path(name).is_dir() else VisualPipeline.download(name, **kwargs))
    saved_as = json.loads((folder / "model_index.json").read_text())["_class_name"]
    if saved_as not in _HOME:
        raise ValueError(f"{name} holds a {saved_as}; pass one of {', '.join(_HOME)}.")
    return getattr(importlib.import_module(_HOME[saved_as]), saved_as).from_pretrained(folder, **kwargs)


def load_drafter(name: str | os.PathLike, **kwargs: Any) -> Any:
    """An embedded drafter, or one in a folder written by `save_pretrained`, of the class saved there.

    Args:
        kwargs: for `from_pretrained`.

    Raises:
        ValueError: there is no drafter of this name, or the folder holds something else; says what is there.
    """
    folder = WEIGHTS_FOLDER / name if os.fspath(name) in embedded_drafters() else Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"no drafter {os.fspath(name)!r}; pass a folder written by save_pretrained, or an embedded one: "
            f"{', '.join(embedded_drafters()) or '(none)'}."
        )
    saved_as = json.loads((folder / "config.json").read_text()).get("_class_name")
    if saved_as not in _DRAFTERS:
        raise ValueError(f"{name} holds a {saved_as}; a drafter is one of {', '.join(_DRAFTERS)}.")
    return (
        getattr(importlib.import_module(_DRAFTERS[saved_as]), saved_as)
        .from_pretrained(folder, **kwargs)
        .eval()
    )
