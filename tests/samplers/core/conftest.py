"""A stand-in for recorded CUDA graphs on the CPU, for all tests of this folder."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.fx.experimental.proxy_tensor import make_fx

from visual_spec.samplers.core import graph


@pytest.fixture
def recordings(monkeypatch) -> list[Any]:
    """Record the operations on the CPU."""
    made: list[Any] = []

    def capture(run: Callable[[], Any], memory: Any) -> tuple[Callable[[], Any], Any]:
        made.append(make_fx(run)())
        return made[-1], "the pool"

    monkeypatch.setattr(graph, "_capture", capture)
    return made
