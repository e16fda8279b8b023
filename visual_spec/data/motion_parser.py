"""Parses captions of `motion` into facts, and scores a clip against its prompt.

As `visual_spec.data.shapes_parser` does for pictures; `visual_spec.data.motion_finder` finds the objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from visual_spec.data.captions import CaptionError
from visual_spec.data.motion import CAMERAS, DIRECTIONS, ENDINGS, SIZES, SPEEDS, TEXTURES
from visual_spec.data.motion_finder import FoundMotion, MotionFacts, parse_clip
from visual_spec.data.shapes import BACKGROUND_COLOURS, OBJECT_COLOURS, SHAPES
from visual_spec.data.shapes_parser import Answers, best_assignment, compared

__all__ = ["MotionFacts", "FoundMotion", "WantedClip", "WantedMotion", "parse_caption", "parse_clip", "score"]

CONSISTENT = 0.85  # share of the frames in which an object must look and move as in the others


@dataclass(frozen=True)
class WantedMotion:
    """One object in a caption; `direction`, `speed` and `ending` are None if it stays still."""

    shape: str
    colour: str
    size: str
    direction: str | None = None
    speed: str | None = None
    ending: str | None = None


@dataclass(frozen=True)
class WantedClip:
    """Everything in a caption. The first object is the one that may move."""

    objects: tuple[WantedMotion, ...]
    background: str
    texture: str
    camera: str


def parse_caption(text: str) -> WantedClip:
    """Parse a caption of `visual_spec.data.motion.caption`; upper case, commas and extra white space do not matter.

    Raises:
        ValueError: `caption` cannot have written the text.
    """
    match = re.fullmatch(_caption_pattern(), " ".join(text.lower().replace(",", " ").split()))
    if match is None:
        raise CaptionError(
            f"cannot read caption {text!r}; allowed: 'a SIZE COLOUR SHAPE moves DIRECTION SPEED and ENDING' or "
            "'a SIZE COLOUR SHAPE stays still', then perhaps 'past a SIZE COLOUR SHAPE', then "
            "'on a TEXTURE BACKGROUND background, camera CAMERA'. "
            f"SIZE: {', '.join(SIZES)}. COLOUR: {', '.join(OBJECT_COLOURS)}. SHAPE: {', '.join(SHAPES)}. "
            f"DIRECTION: {', '.join(DIRECTIONS)}. SPEED: {', '.join(SPEEDS)}. ENDING: {', '.join(ENDINGS)}. "
            f"TEXTURE: {', '.join(TEXTURES)}. BACKGROUND: {', '.join(BACKGROUND_COLOURS)}. "
            f"CAMERA: {', '.join(CAMERAS)}. Use these words, in this order."
        )
    part = match.groupdict()

    def thing(number: int) -> tuple[str, str, str]:
        return part[f"shape{number}"], part[f"colour{number}"], part[f"size{number}"]

    objects = [WantedMotion(*thing(1), part["direction"], part["speed"], part["ending"])]
    if part["shape2"]:
        objects.append(WantedMotion(*thing(2)))
    return WantedClip(tuple(objects), part["background"], part["texture"], part["camera"])


@cache
def _caption_pattern() -> str:
    def one(name: str, words: Iterable[str]) -> str:
        return f"(?P<{name}>{'|'.join(words)})"

    def thing(number: int) -> str:
        kind = (
            one(f"size{number}", SIZES),
            one(f"colour{number}", OBJECT_COLOURS),
            one(f"shape{number}", SHAPES),
        )
        return "a " + " ".join(kind)

    motion = f"moves {one('direction', DIRECTIONS)} {one('speed', SPEEDS)} and {one('ending', ENDINGS)}"
    ground = f"{one('texture', TEXTURES)} {one('background', BACKGROUND_COLOURS)} background"
    start = f"{thing(1)} (?:{motion}|stays still)(?: past {thing(2)})?"
    return f"{start} on a {ground} camera {one('camera', CAMERAS)}"


def score(prompt: str, frames: np.ndarray | Sequence[Image.Image]) -> dict[str, bool]:
    """Return which attributes of a prompt a clip has.

    Keys: shape, colour, size, direction, speed and ending (the last two only if the prompt says that the object
    moves), count, background, texture, camera and consistency. Found objects are assigned to wanted ones so that as
    many attributes as possible hold. An attribute of objects holds if it does for every wanted one. Consistency holds
    if each wanted object was found and keeps its looks and its path in at least `CONSISTENT` of the frames.

    Raises:
        TypeError, ValueError: as in `parse_caption` and `parse_clip`.
    """
    return score_facts(parse_caption(prompt), parse_clip(frames))


def score_facts(wanted: WantedClip, facts: MotionFacts) -> dict[str, bool]:
    """Score a caption and a clip that are already parsed; see `score`."""
    number = len(wanted.objects)

    def judged(assignment: Sequence[int | None]) -> tuple[Answers, dict[str, bool]]:
        things = [None if i is None else facts.objects[i] for i in assignment]
        each = compared(wanted.objects, things, ("shape", "colour", "size"))
        each["direction"] = [
            _moves_so(want, thing) for want, thing in zip(wanted.objects, things, strict=True)
        ]
        if wanted.objects[0].direction is not None:
            each |= compared(wanted.objects[:1], things[:1], ("speed", "ending"))
        each["consistency"] = [thing is not None and thing.consistency >= CONSISTENT for thing in things]
        return each, {name: all(values) for name, values in each.items()}

    hits = best_assignment(len(facts.objects), number, judged)
    hits["count"] = len(facts.objects) == number
    for name in ("background", "texture", "camera"):
        hits[name] = getattr(facts, name) == getattr(wanted, name)
    return hits


def _moves_so(want: WantedMotion, thing: FoundMotion | None) -> bool:
    if thing is None:
        return False
    return thing.still if want.direction is None else thing.direction == want.direction
