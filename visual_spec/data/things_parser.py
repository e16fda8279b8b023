"""Reads pictures of `things` back, and scores a picture against its prompt.

The drawings are known, so a picture is read by matching: at every place of the grid, each drawing on the picture's
ground is compared with what is there. No network is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from visual_spec.data.captions import CaptionError
from visual_spec.data.shapes import CELL, IMAGE_SIZE
from visual_spec.data.shapes_parser import all_correct, prompt_accuracy
from visual_spec.data.things import GROUNDS, NOUNS, RELATIONS, SPRITE, Thing, ThingsScene, render, sprites

__all__ = [
    "ThingsFacts",
    "WantedThings",
    "all_correct",
    "parse_caption",
    "parse_picture",
    "prompt_accuracy",
    "score",
]

# A drawing is there if what it leaves unexplained is at most this share of what the bare ground leaves.
_MATCH = 0.5
_CELLS = (IMAGE_SIZE - SPRITE) // CELL + 1  # places of a drawing along an axis
_STRANGE = 40.0  # mean difference of a cell, 0 to 255, from which it shows something else than what was read
_BLOB = 5  # so many strange cells count as one more thing


@dataclass(frozen=True)
class WantedThings:
    """Everything in a caption. `relation` binds the first to the second thing."""

    nouns: tuple[str, ...]
    ground: str
    relation: str | None = None


@dataclass(frozen=True)
class ThingsFacts:
    """What a picture shows.

    Attributes:
        things: those that were recognised, the clearest first.
        others: about how many things there are beside them, which no drawing explains.
        ground: the name of the nearest ground.
    """

    things: tuple[Thing, ...]
    others: int
    ground: str


def _matched(text: str) -> re.Match[str] | None:
    nouns, relations, grounds = ("|".join(words) for words in (NOUNS, RELATIONS, GROUNDS))
    pattern = f"an? ({nouns})(?: ({relations}) an? ({nouns}))? on an? ({grounds}) background"
    return re.fullmatch(pattern, " ".join(text.lower().split()))


def is_caption(text: str) -> bool:
    """Whether `parse_caption` reads a text."""
    return _matched(text) is not None


def parse_caption(text: str) -> WantedThings:
    """Parse a caption of `visual_spec.data.things.caption`; upper case and extra white space are accepted.

    Raises:
        ValueError: `caption` cannot have written the text.
    """
    match = _matched(text)
    if match is None:
        raise CaptionError(
            f"cannot read caption {text!r}; allowed: 'a THING on a GROUND background', or 'a THING RELATION a THING on "
            f"a GROUND background'. THING: {', '.join(NOUNS)}. RELATION: {', '.join(RELATIONS)}. GROUND: "
            f"{', '.join(GROUNDS)}. Use these words, in this order."
        )
    first, relation, second, ground = match.groups()
    return WantedThings((first,) if second is None else (first, second), ground, relation)


def parse_picture(image: Image.Image | np.ndarray) -> ThingsFacts:
    """Read a picture.

    Args:
        image: PIL, or uint8 `[128, 128, 3]`.

    Raises:
        ValueError: a picture of another size.
    """
    pixels = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image, np.float32)
    if pixels.shape != (IMAGE_SIZE, IMAGE_SIZE, 3):
        raise ValueError(
            f"a picture of shape {pixels.shape}; pass {IMAGE_SIZE} x {IMAGE_SIZE} pixels in colour."
        )
    rim = np.concatenate(
        [
            pixels[:4].reshape(-1, 3),
            pixels[-4:].reshape(-1, 3),
            pixels[:, :4].reshape(-1, 3),
            pixels[:, -4:].reshape(-1, 3),
        ]
    )
    ground = min(GROUNDS, key=lambda name: float(np.abs(np.median(rim, 0) - GROUNDS[name]).sum()))
    things, taken = [], np.zeros((_CELLS, _CELLS), bool)
    bare, left = _unexplained(pixels, ground)  # [121, 40]
    gain = np.where(left <= _MATCH * bare, bare - left, 0.0).reshape(_CELLS, _CELLS, len(NOUNS))
    while (free := np.where(taken[..., None], 0.0, gain)).max() > 0:
        down, across, number = np.unravel_index(free.argmax(), free.shape)
        things.append(Thing(NOUNS[number], int(across) * CELL + SPRITE // 2, int(down) * CELL + SPRITE // 2))
        reach = SPRITE // CELL - 1  # two drawings may share a cell of their empty borders
        taken[max(0, down - reach + 1) : down + reach, max(0, across - reach + 1) : across + reach] = True
    found = tuple(things)
    apart = np.abs(pixels - render(ThingsScene(found, ground))).mean(-1)
    strange = apart.reshape(IMAGE_SIZE // CELL, CELL, IMAGE_SIZE // CELL, CELL).mean((1, 3)) > _STRANGE
    return ThingsFacts(
        found, round(int(strange.sum()) / (2 * _BLOB)) if strange.sum() >= _BLOB else 0, ground
    )


@cache
def _templates(ground: str) -> tuple[np.ndarray, np.ndarray]:
    """Of all drawings on a ground: weights `[6912, 40]`, how far each pixel is covered; and the colours there, less
    those of the ground."""
    drawn = np.stack([sprites()[noun] for noun in NOUNS])
    cover = np.repeat(drawn[..., 3:] / 255, 3, -1)
    colours = cover * (drawn[..., :3] - np.array(GROUNDS[ground], np.float32))
    return cover.reshape(len(NOUNS), -1).T.copy(), colours.reshape(len(NOUNS), -1).T.copy()


def _unexplained(pixels: np.ndarray, ground: str) -> tuple[np.ndarray, np.ndarray]:
    """Squared differences where each drawing would cover a picture, `[121, 40]`: to the ground, and to the drawing."""
    weights, colours = _templates(ground)
    away = pixels - np.array(GROUNDS[ground], np.float32)
    places = [(down * CELL, across * CELL) for down in range(_CELLS) for across in range(_CELLS)]
    patches = np.stack([away[top : top + SPRITE, left : left + SPRITE].ravel() for top, left in places])
    bare = patches**2 @ weights
    return bare, np.maximum(bare - 2 * patches @ (weights * colours) + (weights * colours**2).sum(0), 0.0)


def score(prompt: str, image: Image.Image | np.ndarray) -> dict[str, bool]:
    """Return which attributes of a prompt a picture has.

    Keys: thing (every wanted thing is there), count (and nothing else), background, and relation if the prompt has one:
    the first thing lies on its side of the second, and is further away along that axis than across it.

    Raises:
        ValueError: as in `parse_caption` and `parse_picture`.
    """
    wanted, facts = parse_caption(prompt), parse_picture(image)
    found = {one.noun: one for one in reversed(facts.things)}
    there = [found.get(noun) for noun in wanted.nouns]
    hits = {
        "thing": None not in there,
        "count": len(facts.things) + facts.others == len(wanted.nouns),
        "background": facts.ground == wanted.ground,
    }
    if wanted.relation is not None:
        first, second = there
        if first is None or second is None:
            return hits | {"relation": False}
        right, down = second.x - first.x, second.y - first.y
        along, across = (right, down) if wanted.relation == "left of" else (down, right)
        hits["relation"] = along > abs(across)
    return hits
