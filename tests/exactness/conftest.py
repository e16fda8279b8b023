"""A fixture for tests that draw many samples."""

import pytest
import torch
from torch import Tensor

from visual_spec.samplers import autoregressive, columns, columns_drafted, columns_jacobi, jacobi


@pytest.fixture
def keys_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """`draw_keys` makes one generator call a sample; here that would be half of the work."""

    def draw_keys(generator: torch.Generator, batch_size: int) -> Tensor:
        return torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator)

    for module in (autoregressive, jacobi, columns, columns_drafted, columns_jacobi):
        monkeypatch.setattr(module, "draw_keys", draw_keys)
