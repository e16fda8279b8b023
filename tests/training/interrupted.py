"""A training that is killed between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from visual_spec.training.loop import ResumePoint


class Killed(BaseException):
    pass


@contextmanager
def killed_after(steps: int) -> Iterator[None]:
    """Within, a training ends when it has made so many steps; that it does is checked."""
    after = ResumePoint.after

    def until(checkpoint: ResumePoint, step: int, total: int, loss: Tensor, **more: Any) -> None:
        after(checkpoint, step, total, loss, **more)
        if step + 1 == steps:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumePoint, "after", until)
        with pytest.raises(Killed):
            yield
