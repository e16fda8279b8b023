"""Class labels as a condition."""

from __future__ import annotations

from torch import Tensor


def check_labels(condition: object, batch_size: int, classes: int) -> None:
    """Refuse what is no LongTensor [B] of labels below `classes`.

    Raises:
        TypeError: it is something else.
        ValueError: it has another shape, or a label is out of range.
    """
    if not isinstance(condition, Tensor) or condition.is_floating_point():
        raise TypeError(f"{type(condition).__name__} given; this model takes class labels, a LongTensor [B]")
    if condition.shape != (batch_size,) or not ((condition >= 0) & (condition < classes)).all():
        raise ValueError(
            f"labels {condition.tolist()} given; allowed are {batch_size} labels of 0 to {classes - 1}"
        )
