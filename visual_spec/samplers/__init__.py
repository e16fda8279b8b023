"""Decoding methods, one file each, and the parts they share. Names are resolved at first use (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from visual_spec.samplers.autoregressive import AutoregressiveSampler
    from visual_spec.samplers.columns import ColumnAutoregressiveSampler
    from visual_spec.samplers.columns_drafted import DraftedColumnSampler
    from visual_spec.samplers.columns_jacobi import ColumnJacobiSampler
    from visual_spec.samplers.core.law import TokenLaw
    from visual_spec.samplers.core.noise import CounterNoise
    from visual_spec.samplers.core.trace import DecodeTrace, SampleResult
    from visual_spec.samplers.drafted import DraftedSampler
    from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
    from visual_spec.samplers.masked import MaskedSampler
    from visual_spec.samplers.masked_hybrid import hybrid_decode
    from visual_spec.samplers.mulo import MultiscaleSampler
    from visual_spec.samplers.parallel_jacobi import ParallelJacobiSampler
    from visual_spec.samplers.proactive import ProactiveJacobiSampler
    from visual_spec.samplers.scales import ScaleWiseSampler
    from visual_spec.samplers.tree import TreeSampler
    from visual_spec.samplers.zipar import ZipARSampler

_HOME = {
    "AutoregressiveSampler": "autoregressive",
    "ColumnAutoregressiveSampler": "columns",
    "ColumnJacobiSampler": "columns_jacobi",
    "CounterNoise": "core.noise",
    "DecodeTrace": "core.trace",
    "DraftedColumnSampler": "columns_drafted",
    "DraftedSampler": "drafted",
    "MaskedSampler": "masked",
    "MultiscaleSampler": "mulo",
    "ParallelJacobiSampler": "parallel_jacobi",
    "ProactiveJacobiSampler": "proactive",
    "SampleResult": "core.trace",
    "ScaleWiseSampler": "scales",
    "SpeculativeJacobiSampler": "jacobi",
    "TokenLaw": "core.law",
    "TreeSampler": "tree",
    "ZipARSampler": "zipar",
    "hybrid_decode": "masked_hybrid",
}

__all__ = [
    "AutoregressiveSampler",
    "ColumnAutoregressiveSampler",
    "ColumnJacobiSampler",
    "CounterNoise",
    "DecodeTrace",
    "DraftedColumnSampler",
    "DraftedSampler",
    "MaskedSampler",
    "MultiscaleSampler",
    "ParallelJacobiSampler",
    "ProactiveJacobiSampler",
    "SampleResult",
    "ScaleWiseSampler",
    "SpeculativeJacobiSampler",
    "TokenLaw",
    "TreeSampler",
    "ZipARSampler",
    "hybrid_decode",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"visual_spec.samplers.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
