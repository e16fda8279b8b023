"""Packages that an extra of this library brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, need: str, instead: str = "") -> Iterator[None]:
    """Within, import what an extra brings; an ImportError says who needs it and how it is installed.

    Args:
        name: of the extra.
        need: who needs what, such as "charts need matplotlib".
        instead: what else to do.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{need}: pip install '.[{name}]' in a checkout{instead}") from error
