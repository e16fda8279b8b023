"""Decoding methods, one file each, and the parts they share. Names are resolved at first use (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from visual_spec.samplers.autoregressive import AutoregressiveSampler
    from visual_spec.samplers.drafted import DraftedSampler
    from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
    from visual_spec.samplers.law import TokenLaw
    from visual_spec.samplers.multiscale import MultiscaleSampler
    from visual_spec.samplers.parallel_jacobi import ParallelJacobiSampler
    from visual_spec.samplers.proactive import ProactiveJacobiSampler
    from visual_spec.samplers.randomness import CounterNoise
    from visual_spec.samplers.rows import ZipARSampler
    from visual_spec.samplers.trace import DecodeTrace, SampleResult
    from visual_spec.samplers.tree import TreeSampler

_HOME = {
    "AutoregressiveSampler": "autoregressive",
    "CounterNoise": "randomness",
    "DecodeTrace": "trace",
    "DraftedSampler": "drafted",
    "MultiscaleSampler": "multiscale",
    "ParallelJacobiSampler": "parallel_jacobi",
    "ProactiveJacobiSampler": "proactive",
    "SampleResult": "trace",
    "SpeculativeJacobiSampler": "jacobi",
    "TokenLaw": "law",
    "TreeSampler": "tree",
    "ZipARSampler": "rows",
}

__all__ = [
    "AutoregressiveSampler",
    "CounterNoise",
    "DecodeTrace",
    "DraftedSampler",
    "MultiscaleSampler",
    "ParallelJacobiSampler",
    "ProactiveJacobiSampler",
    "SampleResult",
    "SpeculativeJacobiSampler",
    "TokenLaw",
    "TreeSampler",
    "ZipARSampler",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"visual_spec.samplers.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
