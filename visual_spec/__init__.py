"""visual_spec: exact, fast decoding for autoregressive image, video and audio generators.

Importing this package loads nothing else: names are resolved at first use (PEP 562), so `import visual_spec` and
`visual-spec --help` do not wait for PyTorch. Editors read `__init__.pyi`, which `scripts/write_stub.py` writes.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from visual_spec.families import FORMER, PIPELINES, all_pipelines
from visual_spec.samplers.registry import SAMPLERS, all_samplers

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
    home = HOMES.get(name)
    if home is None and name.endswith(("Sampler", "Pipeline")):  # of prototype, or of another package
        registered = (*all_samplers(), *all_pipelines().values())
        home = next((entry.module for entry in registered if entry.class_name == name), None)
    if home is None:
        raise AttributeError(f"module 'visual_spec' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


class FormerModules:
    """Python asks it last for a module: it finds those of earlier versions, see `visual_spec.moved`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith("visual_spec."):
            return None
        from visual_spec.moved import MOVED, FormerModule

        return ModuleSpec(name, FormerModule()) if name in MOVED else None  # pyright: ignore[reportArgumentType]


sys.meta_path.append(FormerModules)


def __dir__() -> list[str]:
    return sorted(__all__)
