"""Parses captions of `shapes` into facts, and scores a picture against its prompt.

Generated pictures are scored as in GenEval (Ghosh et al. 2023, section 3): find the objects, then check each attribute
in the prompt. `visual_spec.data.shapes_finder` finds the objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from PIL import Image

from visual_spec.data.captions import CaptionError
from visual_spec.data.shapes import (
    BACKGROUND_COLOURS,
    COUNTS,
    OBJECT_COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
)
from visual_spec.data.shapes_finder import FoundObject, PictureFacts, parse_picture

__all__ = [
    "FoundObject",
    "PictureFacts",
    "WantedFacts",
    "WantedObject",
    "all_correct",
    "parse_caption",
    "parse_picture",
    "prompt_accuracy",
    "score",
    "score_facts",
]


@dataclass(frozen=True)
class WantedObject:
    """One object in a caption."""

    shape: str
    colour: str
    size: str


@dataclass(frozen=True)
class WantedFacts:
    """Everything in a caption. `relation` binds the first to the second object; copies of a group are listed singly."""

    objects: tuple[WantedObject, ...]
    background: str
    texture: str
    relation: str | None = None


def parse_caption(text: str) -> WantedFacts:
    """Parse a caption of `visual_spec.data.shapes.caption`; upper case and extra white space are accepted.

    Raises:
        ValueError: `caption` cannot have written the text.
    """
    match = re.fullmatch(_caption_pattern(), " ".join(text.lower().split()))
    if match is None:
        raise CaptionError(
            f"cannot read caption {text!r}; allowed: 'a SIZE COLOUR SHAPE', 'a SIZE COLOUR SHAPE RELATION a SIZE "
            f"COLOUR SHAPE' or '{'|'.join(COUNTS)} SIZE COLOUR SHAPEs', then 'on a TEXTURE BACKGROUND background'. "
            f"SIZE: {', '.join(SIZES)}. COLOUR: {', '.join(OBJECT_COLOURS)}. SHAPE: {', '.join(SHAPES)}. "
            f"RELATION: {', '.join(RELATIONS)}. TEXTURE: {', '.join(TEXTURES)}. "
            f"BACKGROUND: {', '.join(BACKGROUND_COLOURS)}. Use these words, in this order."
        )
    part = match.groupdict()

    def thing(number: int) -> WantedObject:
        return WantedObject(part[f"shape{number}"], part[f"colour{number}"], part[f"size{number}"])

    if part["count"]:
        objects = (thing(0),) * COUNTS[part["count"]]
    elif part["relation"]:
        objects = (thing(1), thing(2))
    else:
        objects = (thing(1),)
    return WantedFacts(objects, part["background"], part["texture"], part["relation"])


@cache
def _caption_pattern() -> str:
    def one(name: str, words: Iterable[str]) -> str:
        return f"(?P<{name}>{'|'.join(words)})"

    def thing(number: int) -> str:
        return f"{one(f'size{number}', SIZES)} {one(f'colour{number}', OBJECT_COLOURS)} {one(f'shape{number}', SHAPES)}"

    group = f"{one('count', COUNTS)} {thing(0)}(?:(?<=cross)es|(?<!cross)s)"
    pair = f"a {thing(1)}(?: {one('relation', RELATIONS)} a {thing(2)})?"
    ground = f"{one('texture', TEXTURES)} {one('background', BACKGROUND_COLOURS)} background"
    return f"(?:{group}|{pair}) on a {ground}"


def score(prompt: str, image: Image.Image | np.ndarray) -> dict[str, bool]:
    """Return which attributes of a prompt a picture has.

    Keys: shape, colour, size, count, background, texture, and relation if the prompt has one. Found objects are
    assigned to wanted ones so that as many attributes as possible hold. Shape, colour and size hold if they do for
    every wanted object. Count holds if exactly as many objects are found as wanted. Relation holds if the two objects
    are so related and each has at least the wanted shape or the wanted colour; otherwise any two patches would do.

    Raises:
        TypeError, ValueError: as in `parse_caption` and `parse_picture`.
    """
    return score_facts(parse_caption(prompt), parse_picture(image))


def score_facts(wanted: WantedFacts, facts: PictureFacts) -> dict[str, bool]:
    """Score a caption and a picture that are already parsed; see `score`."""
    number = len(wanted.objects)

    def judged(assignment: Sequence[int | None]) -> tuple[Answers, dict[str, bool]]:
        things = [None if i is None else facts.objects[i] for i in assignment]
        each = compared(wanted.objects, things, ("shape", "colour", "size"))
        hits = {name: all(values) for name, values in each.items()}
        hits["count"] = len(facts.objects) == number
        if wanted.relation is not None:
            first, second = assignment
            known = all(shape or colour for shape, colour in zip(each["shape"], each["colour"], strict=True))
            hits["relation"] = (
                first is not None
                and second is not None
                and known
                and facts.relations.get((first, second)) == wanted.relation
            )
        return each, hits

    hits = best_assignment(len(facts.objects), number, judged)
    hits["background"] = facts.background == wanted.background
    hits["texture"] = facts.texture == wanted.texture
    return hits


Answers = dict[str, list[bool]]


def compared(wanted: Sequence[object], things: Sequence[object], names: Iterable[str]) -> Answers:
    """By attribute: whether each wanted object's is the one of the thing that it is assigned; None has none."""
    pairs = list(zip(wanted, things, strict=True))
    return {
        name: [getattr(thing, name, None) == getattr(want, name) for want, thing in pairs] for name in names
    }


def best_assignment(
    count: int, number: int, judged: Callable[[Sequence[int | None]], tuple[Answers, dict[str, bool]]]
) -> dict[str, bool]:
    """The hits of assigning `count` objects of a sample to `number` wanted ones so that most hold, then most answers.

    Args:
        judged: (the found object of each wanted one; None: not found) -> answers by object, and hits.
    """
    candidates: list[int | None] = [*range(count), *[None] * number]
    answers = map(judged, dict.fromkeys(permutations(candidates, number)))
    return max(answers, key=lambda one: (sum(one[1].values()), sum(map(sum, one[0].values()))))[1]


def prompt_accuracy(hits: dict[str, bool]) -> float:
    """Return the mean of the attributes from `score`, 0 to 1."""
    return sum(hits.values()) / len(hits)


def all_correct(hits: dict[str, bool]) -> bool:
    """Return whether every attribute from `score` holds."""
    return all(hits.values())
