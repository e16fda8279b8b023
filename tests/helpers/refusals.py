"""What is refused, one line a case."""

from collections.abc import Callable
from typing import Any

import pytest


def refuses(
    error: type[BaseException] | tuple[type[BaseException], ...],
    message: str,
    call: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> None:
    """The call itself raises `error`, with a text in which the pattern `message` is found."""
    with pytest.raises(error, match=message):
        call(*args, **kwargs)
