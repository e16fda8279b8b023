"""The classes of `shapes`: pictures of one large object, distinguished by its colour and shape.

A parser reads these attributes most reliably, and there are few enough classes that a small model sees each often. The
place, the background and its texture are free, so every class has variety.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from visual_spec.data.shapes import OBJECT_COLOURS, SHAPES, Scene, caption, is_held_out, sample_scene
from visual_spec.data.shapes_finder import parse_picture

# Class c is the c-th of these pairs.
CLASSES: tuple[tuple[str, str], ...] = tuple((colour, shape) for colour in OBJECT_COLOURS for shape in SHAPES)
CLASS_NAMES: tuple[str, ...] = tuple(f"{colour} {shape}" for colour, shape in CLASSES)


def class_of(scene: Scene) -> int:
    """Return the class of a scene of one object, its index in `CLASSES`; ValueError for several objects."""
    if len(scene.objects) != 1:
        raise ValueError(f"a scene of {len(scene.objects)} objects has no class; pass scenes of one object.")
    return CLASSES.index((scene.objects[0].colour, scene.objects[0].shape))


def has_a_class(scene: Scene) -> bool:
    """Return whether a scene shows one large object, as all pictures of classes do."""
    return len(scene.objects) == 1 and scene.objects[0].size == "large"


def sample_scenes_by_class(count: int, seed: int) -> list[Scene]:
    """Return scenes of one large object, the i-th of class i modulo the number of classes, none of them held out.

    Within a class they follow the training law of class models, so that sets of their pictures can be compared.
    """
    rng = np.random.default_rng(seed)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = sample_scene(rng)
        if not has_a_class(scene):
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
    objects = parse_picture(image).objects
    alone = len(objects) == 1
    return {
        "one_object": alone,
        "colour": alone and objects[0].colour == colour,
        "shape": alone and objects[0].shape == shape,
    }
