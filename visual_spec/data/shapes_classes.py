"""The classes of `shapes`: pictures of one large object, distinguished by its colour and shape.

A parser reads these attributes most reliably, and there are few enough classes that a small model sees each often. The
place, the background and its texture are free, so every class has variety.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from visual_spec.data.shapes import (
    IMAGE_SIZE,
    OBJECT_COLOURS,
    SHAPES,
    SIZES,
    Scene,
    caption,
    is_held_out,
    sample_scene,
)
from visual_spec.data.shapes_finder import parse_picture

# Class c is the c-th of these pairs.
CLASSES: tuple[tuple[str, str], ...] = tuple((colour, shape) for colour in OBJECT_COLOURS for shape in SHAPES)
CLASS_NAMES: tuple[str, ...] = tuple(f"{colour} {shape}" for colour, shape in CLASSES)


def class_of(scene: Scene) -> int:
    """Return the class of a scene of one object: its index in `CLASSES`.

    Raises:
        ValueError: the scene has several objects.
    """
    if len(scene.objects) != 1:
        raise ValueError(f"a scene of {len(scene.objects)} objects has no class; pass scenes of one object.")
    return CLASSES.index((scene.objects[0].colour, scene.objects[0].shape))


def sample_one_object_scenes(count: int, seed: int, *, held_out: bool = False) -> list[Scene]:
    """Return scenes of one large object; their captions are all inside or all outside the held-out tenth."""
    rng = np.random.default_rng(seed)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = sample_scene(rng)
        if _has_a_class(scene) and is_held_out(caption(scene)) == held_out:
            scenes.append(scene)
    return scenes


def object_slots(scenes: Sequence[Scene], scales: Sequence[int]) -> np.ndarray:
    """Return which slots of token maps with these sides show part of an object, bool `[N, L]`, map after map.

    These are the slots that the square around an object touches.
    """
    places = np.array([[(item.x, item.y) for item in scene.objects] for scene in scenes])  # [N, objects, 2]
    radii = np.array([[SIZES[item.size] for item in scene.objects] for scene in scenes])[..., None]
    maps = []
    for side in scales:
        edges = np.arange(side + 1) * (IMAGE_SIZE / side)
        touched = (edges[1:] > places[..., None] - radii[..., None]) & (
            edges[:-1] < places[..., None] + radii[..., None]
        )
        across, down = touched[:, :, 0], touched[:, :, 1]  # [N, objects, side]
        maps.append((down[..., :, None] & across[..., None, :]).any(1).reshape(len(scenes), -1))
    return np.concatenate(maps, 1)


def _has_a_class(scene: Scene) -> bool:
    return len(scene.objects) == 1 and scene.objects[0].size == "large"


def sample_scenes_by_class(count: int, seed: int) -> list[Scene]:
    """Return scenes of one large object, the i-th of class i modulo the number of classes, none of them held out.

    Within a class they follow the training law of class models, so that sets of their pictures can be compared.
    """
    rng = np.random.default_rng(seed)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = sample_scene(rng)
        if not _has_a_class(scene):
            continue
        # Colour and shape are independent of the rest of a scene of one object, so they may be set afterwards.
        colour, shape = CLASSES[len(scenes) % len(CLASSES)]
        scene = replace(scene, objects=(replace(scene.objects[0], colour=colour, shape=shape),))
        if not is_held_out(caption(scene)):
            scenes.append(scene)
    return scenes


def score_class(name: str, image: Image.Image | np.ndarray) -> dict[str, bool]:
    """Return what a picture shows of its class, as the parser reads it.

    Keys: one_object: exactly one object; colour, shape: also the right colour or shape. All hold for the right class.

    Raises:
        ValueError: the name is not in `CLASS_NAMES`.
        TypeError, ValueError: as in `parse_picture`.
    """
    if name not in CLASS_NAMES:
        raise ValueError(f"unknown class {name!r}; pass a colour and a shape, such as {CLASS_NAMES[0]!r}.")
    colour, shape = CLASSES[CLASS_NAMES.index(name)]
    found = parse_picture(image).objects
    alone = len(found) == 1
    return {
        "one_object": alone,
        "colour": alone and found[0].colour == colour,
        "shape": alone and found[0].shape == shape,
    }


def class_accuracy(pictures: np.ndarray, labels: Sequence[int]) -> dict[str, float]:
    """Return how often pictures, uint8 `[N, H, W, 3]`, show their classes.

    Returns:
        Shares of pictures: one_object, colour and shape, see `score_class`; class: all of them hold.
    """
    hits = [score_class(CLASS_NAMES[label], picture) for picture, label in zip(pictures, labels, strict=True)]
    shares = {name: [found[name] for found in hits] for name in ("one_object", "colour", "shape")}
    shares["class"] = [all(found.values()) for found in hits]
    return {name: round(float(np.mean(values)), 4) for name, values in shares.items()}
