"""Decoding methods, by family; `core` holds what several share, `naive` each method as one function."""

from typing import Any


def __getattr__(name: str) -> Any:
    from visual_spec.moved import find  # for names of earlier versions

    return find(__name__, name)
