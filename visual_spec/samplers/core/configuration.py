"""Moved; see `visual_spec.moved`."""

from typing import Any


def __getattr__(name: str) -> Any:
    from visual_spec.moved import find  # for names of earlier versions

    return find(__name__, name)
