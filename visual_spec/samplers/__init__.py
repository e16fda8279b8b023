"""Decoding methods, one file each, and the parts they share. Names are resolved at first use (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from visual_spec.samplers.autoregressive import AutoregressiveSampler
    from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
    from visual_spec.samplers.law import TokenLaw
    from visual_spec.samplers.randomness import CounterNoise
    from visual_spec.samplers.trace import DecodeTrace, SampleResult

_HOME = {
    "AutoregressiveSampler": "autoregressive",
    "CounterNoise": "randomness",
    "DecodeTrace": "trace",
    "SampleResult": "trace",
    "SpeculativeJacobiSampler": "jacobi",
    "TokenLaw": "law",
}

__all__ = [
    "AutoregressiveSampler",
    "CounterNoise",
    "DecodeTrace",
    "SampleResult",
    "SpeculativeJacobiSampler",
    "TokenLaw",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"visual_spec.samplers.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
