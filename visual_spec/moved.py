"""Names that moved, as earlier versions had them. They warn, and go with version 0.3; CHANGELOG.md lists them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

# By module: where each name is now, "module" or "module:name"; "*" for all names of a module that is gone.
MOVED: dict[str, Mapping[str, str]] = {
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


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse, by ValueError, a setting that is not one of the allowed names. Declare it with `OneOf` in its place."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; pass one of {', '.join(allowed)}.")
