"""Functions recorded as CUDA graphs. Without a GPU a recording is stood in for by the traced operations: what they read
and write is fixed then, as it is in a graph, and no Python runs at a replay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visual_spec.samplers.core import graph
from visual_spec.samplers.core.graph import RecordedFunction


def points(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))


def test_replays_read_the_inputs_of_their_call(recordings):
    layer, calls = nn.Linear(3, 3).requires_grad_(False), []

    def function(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        return layer(x) * y.sin()

    recorded = RecordedFunction(layer, function)
    kept = []
    for seed in range(5):
        for rows in (2, 4):
            x, y = points(rows, seed), points(rows, seed + 50)
            kept.append((recorded(x, y), layer(x) * y.sin()))
    for found, want in kept:  # none was overwritten by a later one
        assert found.equal(want)
    assert len(recordings) == 2 and sorted(calls) == [2, 2, 4, 4]


def test_weights_change_in_place_or_move(recordings):
    layer = nn.Linear(3, 3).requires_grad_(False)
    recorded = RecordedFunction(layer, lambda x: layer(x))
    for _ in range(3):
        recorded(points(2, 0))
    layer.weight.mul_(2)
    assert recorded(points(2, 1)).equal(layer(points(2, 1))) and len(recordings) == 1
    layer.weight = nn.Parameter(layer.weight * 3, False)
    for seed in range(3):
        assert recorded(points(2, seed)).equal(layer(points(2, seed)))
    assert len(recordings) == 2


def test_what_cannot_be_recorded_is_computed(monkeypatch):
    tried = []

    def fails(run: Callable[[], Any], memory: Any) -> Any:
        tried.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "capture", fails)
    layer = nn.Linear(3, 3).requires_grad_(False)
    recorded = RecordedFunction(layer, lambda x: layer(x))
    recorded(points(2, 0))
    with pytest.warns(UserWarning, match="could not be recorded as a CUDA graph .*; going on without"):
        assert recorded(points(2, 1)).equal(layer(points(2, 1)))
    assert recorded(points(2, 2)).equal(layer(points(2, 2))) and len(tried) == 1
