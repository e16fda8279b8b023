"""Prompts as models take them: one that is too long is cut with a warning."""

from __future__ import annotations

import warnings


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
