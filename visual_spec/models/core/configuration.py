"""`register_to_config` of diffusers, for settings that are given by position, and that are declared with limits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from diffusers.configuration_utils import register_to_config as by_keyword

from visual_spec.models.core.settings import settings_of


def register_to_config(init: Callable[..., None]) -> Callable[..., None]:
    """Keep the arguments of an `__init__` in `self.config`, whether given by name or by position.

    diffusers treats settings given by position as defaults, and `from_config` then forgets them:
    `DDIMScheduler.from_config(DDIMScheduler(500).config)` has 1000 steps.

    Raises of the constructor:
        ValueError: a value that its declaration does not allow (`visual_spec.models.core.settings`).
    """
    registered = by_keyword(init)
    signature = inspect.signature(init)

    @functools.wraps(init)
    def bound(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        declared = settings_of(init)
        registered(**{key: declared[key].read(one) if key in declared else one for key, one in given.items()})

    return bound
