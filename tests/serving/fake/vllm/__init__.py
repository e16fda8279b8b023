"""In place of vLLM: as much of it as `VllmPainter` calls, with faults by the seed of a picture."""

from types import SimpleNamespace

__version__ = "0.32.0"


class EngineArgs(SimpleNamespace):
    """Any arguments."""


class SamplingParams(SimpleNamespace):
    """Any arguments."""
