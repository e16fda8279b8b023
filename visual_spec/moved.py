"""Names that moved, as earlier versions had them. They warn, and go with version 0.3; CHANGELOG.md lists them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# By module: where each name is now, "module" or "module:name"; "*" for all names of a module that is gone.
MOVED: Mapping[str, Mapping[str, str]] = {
    "visual_spec.models.core.configuration": {"*": "visual_spec.models.core.settings"},
    "visual_spec.samplers.core.configuration": {"*": "visual_spec.models.core.settings"},
    "visual_spec.samplers.core.chain": {"*": "visual_spec.samplers.core.draft_chain"},
    "visual_spec.samplers.core.base": {"State": "visual_spec.samplers.core.state"},
    "visual_spec.samplers.core.checks": {
        "check_choice": "visual_spec.moved",
        "check_count": "visual_spec.models.core.settings:whole",
    },
    # What these packages offered is offered at the top.
    "visual_spec.samplers": {"*": "visual_spec"},
    "visual_spec.pipelines": {"*": "visual_spec"},
    "visual_spec.app": {"*": "visual_spec.commands.app"},
    "visual_spec.eval.arguments": {"*": "visual_spec.commands.options"},
    "visual_spec.eval.quality.command": {"*": "visual_spec.commands.eval"},
    "visual_spec.eval.quality.report_command": {"*": "visual_spec.commands.report"},
    "visual_spec.eval.quality.sample_command": {"*": "visual_spec.commands.sample"},
    "visual_spec.eval.quality.score_command": {"*": "visual_spec.commands.score"},
    "visual_spec.eval.speed.bench": {"*": "visual_spec.commands.bench"},
    "visual_spec.generate": {"*": "visual_spec.commands.drawing"},
    "visual_spec.serving.command": {"*": "visual_spec.commands.serve"},
} | {
    f"visual_spec.{former}": {"*": f"visual_spec.prototype.{now}"}
    for former, now in {
        "models.continuous.acdit": "acdit.model",
        "models.continuous.acdit_checkpoint": "acdit.checkpoint",
        "models.continuous.flow_net": "flowar.flow_net",
        "models.continuous.flowar": "flowar.model",
        "models.core.distilled": "students.base",
        "models.drafters.column_eagle": "drafted_columns.eagle",
        "models.drafters.local_speculation": "local_speculation.drafter",
        "models.drafters.skipped": "skipped",
        "models.masked.causal_layer": "self_speculative.causal_layer",
        "models.masked.shortcut": "reuse.shortcut",
        "models.next_scale.var_student": "students.var",
        "models.next_token.controlar": "controlar",
        "models.next_token.llamagen_student": "students.llamagen",
        "pipelines.distilled_image": "students.image_pipelines",
        "pipelines.distilled_scales": "students.scale_pipeline",
        "samplers.continuous.block_diffusion": "acdit.sampler",
        "samplers.continuous.flow_scales": "flowar.sampler",
        "samplers.distilled": "students.sampler",
        "samplers.masked.recap": "reuse.recap",
        "samplers.masked.segments": "segments",
        "samplers.masked.self_speculative": "self_speculative.sampler",
        "samplers.orders.parallel_jacobi": "parallel_jacobi",
        "samplers.raster.columns_drafted": "drafted_columns.sampler",
        "samplers.raster.local_speculation": "local_speculation.sampler",
        "samplers.raster.proactive": "proactive",
    }.items()
}


def find(module: str, name: str) -> Any:
    """What a module of `MOVED` offered under a name; warns."""
    place = MOVED[module].get(name, MOVED[module].get("*"))
    home, _, now = (place or "").partition(":")
    value = (
        None
        if name.startswith("__") or not home
        else getattr(importlib.import_module(home), now or name, None)
    )
    if value is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    text = f"{module}.{name} moved to {home}.{now or name}; the old name goes with visual_spec 0.3."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return value


class FormerModule:
    """Loads a module that is gone: its names are found elsewhere."""

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = lambda name: find(module.__name__, name)


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse, by ValueError, a setting that is not one of the allowed names. Declare it with `OneOf` in its place."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; pass one of {', '.join(allowed)}.")
