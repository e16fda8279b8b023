"""`things`: captioned scenes of real drawings, 128 x 128 pixels, with exact ground truth.

A scene is one thing, or two with a relation, on a plain ground. The drawings are Noto emoji (Google, Apache-2.0; see
`things.txt`), 48 pixels wide, on a grid of 8 pixels, one token of the embedded tokenizer. Generated pictures are read
back by `visual_spec.data.things_parser`, which knows every drawing.

Pairs of things are held out, not captions: a tenth of all pairs is seen together in no picture of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from visual_spec.data import splits
from visual_spec.data.shapes import BACKGROUND_COLOURS, CELL, IMAGE_SIZE

SPRITE = 48  # pixels of a side
NOUNS = (
    "fox", "rabbit", "cow", "pig", "frog", "penguin", "owl", "turtle", "octopus", "butterfly",
    "snail", "cat", "dog", "panda", "elephant", "fish", "cactus", "mushroom", "tulip", "sunflower",
    "rose", "tree", "banana", "pineapple", "strawberry", "watermelon", "lemon", "apple", "hamburger", "pizza",
    "doughnut", "cupcake", "rocket", "sailboat", "car", "castle", "house", "umbrella", "balloon", "robot",
)  # fmt: skip
RELATIONS = ("left of", "above")
GROUNDS = BACKGROUND_COLOURS
_NEAR, _MIDDLE, _FAR = (0, 1, 2), (4, 5, 6), (8, 9, 10)  # places along an axis, in cells


@dataclass(frozen=True)
class Thing:
    """One thing. `x`, `y`: centre in pixels (right, down)."""

    noun: str
    x: int
    y: int


@dataclass(frozen=True)
class ThingsScene:
    """A picture's ground truth. `relation` binds the first to the second thing."""

    objects: tuple[Thing, ...]
    ground: str
    relation: str | None = None


def _phrase(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def caption(scene: ThingsScene) -> str:
    """Return the English caption of a scene, the only form on which the embedded text encoder is trained."""
    things = f" {scene.relation} ".join(_phrase(one.noun) for one in scene.objects)
    return f"{things} on a {scene.ground} background"


def vocabulary() -> list[str]:
    """Return every word that a caption can hold."""
    relations = [word for relation in RELATIONS for word in relation.split()]
    return ["a", "an", "on", "background", *GROUNDS, *relations, *NOUNS]


def is_held_out(scene: ThingsScene) -> bool:
    """Return whether no trainer uses a scene: its pair of things, or its thing on its ground, is of the held-out tenth.

    The order of a pair does not matter, nor do places.
    """
    names = sorted(one.noun for one in scene.objects)
    return splits.is_held_out(" ".join(names if len(names) > 1 else [*names, scene.ground]))


def sample_scene(rng: np.random.Generator) -> ThingsScene:
    """Draw a scene: 3 in 10 show one thing, the others a pair, in either relation."""
    ground, kind = str(rng.choice(list(GROUNDS))), rng.random()
    names = [str(noun) for noun in rng.choice(NOUNS, 2, replace=False)]

    def thing(noun: str, down: int, across: int) -> Thing:
        return Thing(noun, across * CELL + SPRITE // 2, down * CELL + SPRITE // 2)

    near, middle, far = (int(rng.choice(places)) for places in (_NEAR, _MIDDLE, _FAR))
    if kind < 0.3:
        return ThingsScene((thing(names[0], middle, int(rng.choice(_MIDDLE))),), ground)
    if kind < 0.65:
        return ThingsScene((thing(names[0], middle, near), thing(names[1], middle, far)), ground, "left of")
    return ThingsScene((thing(names[0], near, middle), thing(names[1], far, middle)), ground, "above")


def sample_scenes(count: int, seed: int | tuple[int, int], *, held_out: bool = False) -> list[ThingsScene]:
    """Draw scenes of `sample_scene` that are all inside or all outside the held-out tenth."""
    return splits.sample_part(sample_scene, is_held_out, count, seed, held_out)


def sample_dataset(
    count: int, seed: int | tuple[int, int], *, held_out: bool = False
) -> tuple[list[ThingsScene], np.ndarray]:
    """Scenes of `sample_scenes`, and their pictures uint8 `[count, 128, 128, 3]`."""
    scenes = sample_scenes(count, seed, held_out=held_out)
    return scenes, np.array([render(scene) for scene in scenes], np.uint8).reshape(
        -1, IMAGE_SIZE, IMAGE_SIZE, 3
    )


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Return captions of held-out scenes."""
    return [caption(scene) for scene in sample_scenes(count, seed, held_out=True)]


def training_prompts(count: int, seed: int | tuple[int, int]) -> list[str]:
    """Return captions of scenes outside the held-out tenth."""
    return [caption(scene) for scene in sample_scenes(count, seed)]


@cache
def sprites() -> dict[str, np.ndarray]:
    """The drawings: float32 `[48, 48, 4]`, colours and opacity, 0 to 255; by name. They may not be changed."""
    with Image.open(Path(__file__).with_name("things.png")) as file:
        sheet = np.asarray(file.convert("RGBA"), np.float32)
    across = sheet.shape[1] // SPRITE
    return {
        noun: sheet[number // across * SPRITE :, number % across * SPRITE :][:SPRITE, :SPRITE]
        for number, noun in enumerate(NOUNS)
    }


def render(scene: ThingsScene) -> np.ndarray:
    """Paint a scene: uint8 `[128, 128, 3]`.

    Raises:
        ValueError: a ground or a thing that there is not, or one that does not lie within the picture.
    """
    if scene.ground not in GROUNDS:
        raise ValueError(f"ground {scene.ground!r}; pass one of {', '.join(GROUNDS)}.")
    picture = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), GROUNDS[scene.ground], np.float32)
    for one in scene.objects:
        top, left = one.y - SPRITE // 2, one.x - SPRITE // 2
        if one.noun not in NOUNS or not 0 <= min(top, left) <= max(top, left) <= IMAGE_SIZE - SPRITE:
            raise ValueError(
                f"{one}; pass one of {', '.join(NOUNS)}, with a centre of {SPRITE // 2} to "
                f"{IMAGE_SIZE - SPRITE // 2} pixels."
            )
        sprite, patch = sprites()[one.noun], picture[top : top + SPRITE, left : left + SPRITE]
        cover = sprite[..., 3:] / 255
        patch[:] = patch * (1 - cover) + sprite[..., :3] * cover
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)
