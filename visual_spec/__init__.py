"""visual_spec: exact, fast decoding for autoregressive image, video and audio generators.

Importing this package loads nothing else: names are resolved at first use (PEP 562), so `import visual_spec` and
`visual-spec --help` do not wait for PyTorch. Editors read `__init__.pyi`, which `scripts/write_stub.py` writes.
"""

from __future__ import annotations

import importlib
from typing import Any

from visual_spec.families import FORMER, PIPELINES
from visual_spec.samplers.registry import SAMPLERS

__version__ = "0.2.0.dev0"

HOMES = {entry.class_name: entry.module for entry in (*SAMPLERS, *PIPELINES.values())} | {
    "AudioPipelineOutput": "visual_spec.pipelines.output",
    "CounterNoise": "visual_spec.samplers.core.noise",
    "DecodeTrace": "visual_spec.samplers.core.trace",
    "ImagePipelineOutput": "visual_spec.pipelines.output",
    "SampleResult": "visual_spec.samplers.core.trace",
    "Stage": "visual_spec.samplers.scales.stages",
    "TokenGrid": "visual_spec.models.core.protocol",
    "TokenLaw": "visual_spec.samplers.core.law",
    "VideoPipelineOutput": "visual_spec.pipelines.output",
    "VisualPipeline": "visual_spec.pipelines.base",
    "accelerate": "visual_spec.pipelines.accelerate",
    "code_stages": "visual_spec.samplers.scales.stages",
    "custom_generate": "visual_spec.pipelines.transformers_generate",
    "fuse_projections": "visual_spec.models.core.projections",
    "load_pipeline": "visual_spec.pipelines.loading",
    "restore": "visual_spec.pipelines.accelerate",
    "save_custom_generate": "visual_spec.pipelines.transformers_generate",
    "summary": "visual_spec.pipelines.accelerate",
}

__all__ = [*sorted(HOMES), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    name = FORMER.get(name, name)
    if name not in HOMES:
        raise AttributeError(f"module 'visual_spec' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
