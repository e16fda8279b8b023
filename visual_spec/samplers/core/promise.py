"""What a run keeps of plain decoding: the one place that decides it.

A rule keeps the tokens or the law of plain decoding *with the same settings of the law*, such as an order, or the steps
of a denoising chain. So what a run keeps follows from what its rule keeps, from the law settings of the run
(`Sampler.law_settings`), and from those of the plain decoding that it is compared with. Traces, comparisons, scores and
evaluations read it from here. What a model's numeric precision leaves of it is told by `DecodeTrace.promise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from visual_spec.files.reading import shortened

IDENTICAL = "identical"  # the tokens of plain decoding with the same generator
NEAR_TIES = "near-ties"  # the same, but for near-ties that rounding decides
LOSSLESS = "lossless"  # its law
LOSSY = "lossy"  # another law, which the rule makes of it
OTHER = "another law"  # another law, because settings of the law are others
UNKNOWN = "not known"

# Gives the plain decoding of the model that a pipeline decodes with; None: plain decoding with its default settings.
PLAIN: ContextVar[Callable[[], Any] | None] = ContextVar("PLAIN", default=None)


def changed(law: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a law that are not those of plain decoding. A setting that is not there is None."""
    return {name: law.get(name) for name in dict.fromkeys((*law, *plain)) if law.get(name) != plain.get(name)}


def promised(sampler: Any, plain: Any = None) -> str:
    """Return what a sampler keeps of a plain decoding; None: of plain decoding with its defaults.

    A sampler that is not ours says only whether it is `identical` or `lossless`.
    """
    if hasattr(sampler, "promise"):
        return sampler.promise(plain)
    return IDENTICAL if getattr(sampler, "identical", False) else LOSSLESS if sampler.lossless else LOSSY


def named(law: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Return the settings that `changed` tells, in words."""
    return ", ".join(
        f"{name}={value if isinstance(value, str) else shortened(value)}"
        for name, value in changed(law, plain).items()
    )


def kept(keeps: str, law: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Return what a run keeps of plain decoding.

    Args:
        keeps: what its rule keeps where both have the same law settings, in the words of this module.
        law, plain: law settings of the run, and of plain decoding.
    """
    return OTHER if keeps != LOSSY and changed(law, plain) else keeps
