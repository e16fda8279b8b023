"""The classes that a saved pipeline names, by name. No PyTorch until one is asked for.

diffusers finds the class of a saved component in the module that model_index.json records, if that module was imported
before and also holds the component's base class. So a pipeline would have to import everything that any saved pipeline
may name, and a folder could not be loaded once a module moves. `resolved` therefore sends diffusers to this module,
whose attributes are our classes by name, each imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from visual_spec.families import PIPELINES, component_homes

# By these diffusers tells how a component is loaded.
_BASES = {
    "ModelMixin": "diffusers.models.modeling_utils",
    "SchedulerMixin": "diffusers.schedulers.scheduling_utils",
}


def resolved(index: Mapping[str, Any]) -> dict[str, Any]:
    """What model_index.json says, with our classes found by name, whatever module they lived in when it was saved.

    The class of the pipeline is its name alone; diffusers reads the pair ["pipeline", name].
    """
    found = {name: [__name__, value[1]] if _is_ours(value) else value for name, value in index.items()}
    kind = index.get("_class_name")
    return found | {"_class_name": kind[-1]} if isinstance(kind, list | tuple) and kind else found


def _is_ours(value: Any) -> bool:
    pair = (
        isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )
    return pair and value[0].startswith("visual_spec.") and value[1] in component_homes()


def __getattr__(name: str) -> Any:
    pipelines = {kind: entry.module for kind, entry in PIPELINES.items()}
    homes = component_homes() | pipelines | _BASES
    if name not in homes:
        raise AttributeError(
            f"{name!r} is no class that a saved pipeline names; those are {', '.join(homes)}"
        )
    return getattr(importlib.import_module(homes[name]), name)
