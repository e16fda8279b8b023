"""The data of captioned pictures: `shapes` and `things`."""

import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from visual_spec.data import shapes, things


class CaptionError(ValueError):
    """A text that is no caption of the data."""


PICTURES: dict[str, ModuleType] = {"shapes": shapes, "things": things}


def model_that_knows(prompts: Iterable[str]) -> str:
    """The embedded model of pictures that knows most words of some prompts; "things" where two know as many."""
    words = set(re.findall("[a-z]+", " ".join(prompts).lower()))
    return max(("things", "shapes"), key=lambda name: len(words & set(PICTURES[name].vocabulary())))


def captions_of(pipe: Any) -> ModuleType:
    """The data whose captions a pipeline of pictures knows: the module of `things`, or else of `shapes`."""
    words = getattr(pipe.text_encoder.config, "vocabulary", ())
    return things if set(things.vocabulary()) <= set(words) else shapes
