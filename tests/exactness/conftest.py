"""Fixtures for tests that draw many samples, or all of them."""

import pytest
import torch
from torch import Tensor

from visual_spec.samplers.core import base
from visual_spec.samplers.raster import drafted


def keys_at_once(generator: torch.Generator, batch_size: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator)


@pytest.fixture
def keys_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """`draw_keys` makes one generator call a sample; here that would be half of the work."""
    monkeypatch.setattr(base, "draw_keys", keys_at_once)


@pytest.fixture(autouse=True)
def all_rows_draft_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches are rows of one batch: that all rows of it have stopped must not end the drafting of later branches."""
    monkeypatch.setattr(drafted, "nobody", lambda going: False)
