"""Stand-ins for recorded CUDA graphs, on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.fx.experimental.proxy_tensor import make_fx

from visual_spec.samplers.core import base, graph


def traced(patch: pytest.MonkeyPatch) -> list[Any]:
    """Record the operations: what they read and write is fixed, as in a graph. Lists the recordings."""
    made: list[Any] = []

    def capture(run: Callable[[], Any], memory: Any) -> tuple[Callable[[], Any], Any]:
        made.append(make_fx(run)())
        return made[-1], "the pool"

    patch.setattr(graph, "capture", capture)
    return made


def repeated(patch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """Record the call: replays run it again. As on a GPU, recording itself computes nothing. A fixture's body."""
    made: list[Callable[[], None]] = []

    def capture(run: Callable[[], None], memory: Any) -> tuple[Callable[[], None], Any]:
        made.append(run)
        return run, "the pool"

    patch.setattr(base, "wants_graph", lambda choice, model: choice is not False)
    patch.setattr(graph, "capture", capture)
    graph.forget()
    yield made
    graph.forget()
