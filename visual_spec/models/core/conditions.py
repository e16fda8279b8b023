"""Conditions as models take them: class labels are checked, and a prompt that is too long is cut with a warning."""

from __future__ import annotations

import warnings

from torch import Tensor


def check_labels(condition: object, batch_size: int, classes: int) -> None:
    """Refuse what is no LongTensor [B] of labels below `classes`.

    Raises:
        TypeError: it is something else.
        ValueError: it has another shape, or a label is out of range.
    """
    if not isinstance(condition, Tensor) or condition.is_floating_point() or condition.is_complex():
        raise TypeError(f"{type(condition).__name__} given; this model takes class labels, a LongTensor [B]")
    if condition.shape != (batch_size,) or not ((condition >= 0) & (condition < classes)).all():
        raise ValueError(
            f"labels {condition.tolist()} given; allowed are {batch_size} labels of 0 to {classes - 1}"
        )


def warn_cut(prompt: str, cut: str, limit: int, unit: str) -> None:
    """Warn that the end of a prompt is not read.

    Args:
        prompt: the whole prompt.
        cut: the part that is left out.
        limit: the most that the encoder reads, in `unit`, such as "words".
    """
    begin = prompt if len(prompt) <= 60 else prompt[:57] + "..."
    warnings.warn(
        f"the text encoder reads at most {limit} {unit}; {cut!r} at the end of the prompt {begin!r} is cut off.",
        stacklevel=2,
    )
