"""A training that is stopped while it draws the clips of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Stop(Exception):
    pass


@contextmanager
def stopped_at(monkeypatch: pytest.MonkeyPatch, draws: type, last: int) -> Iterator[None]:
    """Within, a training that draws what it learns from by `draws(step)` ends at a step; that it does is checked."""
    original = draws.__call__

    def until(self, step):
        if step >= last:
            raise Stop
        return original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(draws, "__call__", until)
        with pytest.raises(Stop):
            yield
