"""Fixtures for tests that look into single steps of a batch."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.recordings import traced
from tests.helpers.tabular import TabularState
from visual_spec.models.core.protocol import DecodeState
from visual_spec.models.drafters.eagle import EagleState
from visual_spec.models.next_token.cached_decoder import CachedState
from visual_spec.models.next_token.llamagen import LlamaGenState
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.state import Run


@pytest.fixture
def whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are complete stay in the batch, so that row b of every call is sample b."""
    for state in (TabularState, LlamaGenState, EagleState, CachedState):
        monkeypatch.setattr(state, "select", DecodeState.select)


class Operations(TorchDispatchMode):
    """Names of all operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    @property
    def names(self) -> set[str]:
        return set(map(str, self.seen))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))

    def that_ask_the_host(self) -> list[str]:
        """What would stall a GPU at every call: .item(), bool(tensor), nonzero and masked selection."""
        asking = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero")
        assert self.names
        return [name for name in self.names if name.startswith(asking)]


@pytest.fixture
def operations_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Sampler]], Operations]:
    """Takes the class of a sampler, and tells of the operations of its `step` from then on, run as on CUDA."""

    def watch(sampler: type[Sampler]) -> Operations:
        operations, real_step = Operations(), sampler.step

        def step(self: Sampler, run: Run, state: Any) -> None:
            run.law.deferred, run.noise.keep = True, 0
            with operations:
                real_step(self, run, state)

        monkeypatch.setattr(sampler, "step", step)
        return operations

    return watch


@pytest.fixture
def recordings(monkeypatch) -> list[Any]:
    return traced(monkeypatch)
