"""Decoding methods, one file each; `core` holds the parts they share. Names are resolved at first use (PEP 562)."""

from __future__ import annotations

import importlib
from typing import Any

from visual_spec.samplers.registry import SAMPLERS

_HOME = {entry.class_name: entry.module for entry in SAMPLERS} | {
    "CounterNoise": "visual_spec.samplers.core.noise",
    "DecodeTrace": "visual_spec.samplers.core.trace",
    "SampleResult": "visual_spec.samplers.core.trace",
    "TokenLaw": "visual_spec.samplers.core.law",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
