"""A fixture for tests that draw many samples."""

import pytest
import torch
from torch import Tensor

from visual_spec.samplers.core import base


def keys_at_once(generator: torch.Generator, batch_size: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator)


@pytest.fixture
def keys_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """`draw_keys` makes one generator call a sample; here that would be half of the work."""
    monkeypatch.setattr(base, "draw_keys", keys_at_once)
