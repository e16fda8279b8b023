"""Pictures of classes of `shapes` to train with: scenes, slots of their objects, and how often they are right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from visual_spec.data.shapes import IMAGE_SIZE, SIZES, Scene, caption, is_held_out, sample_scene
from visual_spec.data.shapes_classes import CLASS_NAMES, has_a_class, score_class


def sample_one_object_scenes(count: int, seed: int, *, held_out: bool = False) -> list[Scene]:
    """Return scenes of one large object; their captions are all inside or all outside the held-out tenth."""
    rng = np.random.default_rng(seed)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = sample_scene(rng)
        if has_a_class(scene) and is_held_out(caption(scene)) == held_out:
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


def class_accuracy(pictures: np.ndarray, labels: Sequence[int]) -> dict[str, float]:
    """Return how often pictures, uint8 `[N, H, W, 3]`, show their classes.

    Returns:
        Shares of pictures: one_object, colour and shape, see `score_class`; class: all of them hold.
    """
    hits = [score_class(CLASS_NAMES[label], picture) for picture, label in zip(pictures, labels, strict=True)]
    shares = {name: [answers[name] for answers in hits] for name in ("one_object", "colour", "shape")}
    shares["class"] = [all(answers.values()) for answers in hits]
    return {name: round(float(np.mean(values)), 4) for name, values in shares.items()}
