"""Pipelines: prompt in, picture, clip or music out.

Names are resolved at first use, because diffusers takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import Any

from visual_spec.families import PIPELINES

# `accelerate` is not offered here: the name is that of the sub-module.
_HOME = {entry.class_name: entry.module for entry in PIPELINES.values()} | {
    "AudioPipelineOutput": "visual_spec.pipelines.output",
    "ImagePipelineOutput": "visual_spec.pipelines.output",
    "VideoPipelineOutput": "visual_spec.pipelines.output",
    "VisualPipeline": "visual_spec.pipelines.base",
    "load_pipeline": "visual_spec.pipelines.loading",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'visual_spec.pipelines' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_HOME[name]), name)
