"""A fixture for tests that look into single steps of a batch."""

import pytest

from visual_spec.models.cached_decoder import CachedState
from visual_spec.models.eagle import EagleState
from visual_spec.models.llamagen import LlamaGenState
from visual_spec.models.protocol import DecodeState
from visual_spec.models.tabular import TabularState


@pytest.fixture
def whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are complete stay in the batch, so that row b of every call is sample b."""
    for state in (TabularState, LlamaGenState, EagleState, CachedState):
        monkeypatch.setattr(state, "select", DecodeState.select)
