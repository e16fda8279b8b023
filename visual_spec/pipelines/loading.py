"""Load a saved pipeline without knowing its class."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

from visual_spec.pipelines.base import VisualPipeline, refuse_no_pipeline

_HOME = {
    "ClassImagePipeline": "visual_spec.pipelines.class_image",
    "ImagePipeline": "visual_spec.pipelines.image",
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
