"""Classes of `shapes`: their scenes, and how pictures of them are scored."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scripts.train.classes import class_accuracy, object_slots, sample_one_object_scenes
from visual_spec.data.shapes import SHAPES, Scene, ShapeObject, caption, is_held_out, render
from visual_spec.data.shapes_classes import (
    CLASS_NAMES,
    CLASSES,
    class_of,
    sample_scenes_by_class,
    score_class,
)


def scene_of(colour: str, shape: str, *more: ShapeObject) -> Scene:
    return Scene((ShapeObject(shape, colour, "large", 64, 64), *more), "grey", "plain")


def test_a_class_is_a_colour_and_a_shape():
    assert len(CLASSES) == len(set(CLASSES)) == 48
    for number, (colour, shape) in enumerate(CLASSES):
        assert class_of(scene_of(colour, shape)) == number
        assert CLASS_NAMES[number] == f"{colour} {shape}"
    with pytest.raises(ValueError, match="2 objects"):
        class_of(scene_of("red", "star", ShapeObject("star", "red", "small", 24, 24)))


@pytest.mark.parametrize(("held_out", "count"), [(False, 150), (True, 20)])
def test_scenes_have_one_object_and_respect_the_held_out_tenth(held_out: bool, count: int):
    scenes = sample_one_object_scenes(count, 3, held_out=held_out)
    assert len(scenes) == count and {len(scene.objects) for scene in scenes} == {1}
    assert {is_held_out(caption(scene)) for scene in scenes} == {held_out}
    assert {scene.objects[0].size for scene in scenes} == {"large"}
    assert scenes == sample_one_object_scenes(count, 3, held_out=held_out)
    assert scenes != sample_one_object_scenes(count, 4, held_out=held_out)
    assert len({class_of(scene) for scene in scenes}) > 0.27 * count


def test_slots_of_objects_are_those_whose_pixels_hold_some_of_them():
    """By the pixels: what a scene looks like with its object, and with one of another colour."""
    scenes = sample_one_object_scenes(12, 5)
    found = object_slots(scenes, (1, 2, 8, 16))
    for scene, row in zip(scenes, found, strict=True):
        item = scene.objects[0]
        other = replace(scene, objects=(replace(item, colour="red" if item.colour != "red" else "blue"),))
        painted = (render(scene) != render(other)).any(-1)  # [128, 128]
        for side, slots in zip((1, 2, 8, 16), np.split(row, np.cumsum([1, 4, 64])), strict=True):
            cells = painted.reshape(side, 128 // side, side, -1).any((1, 3))
            slots = slots.reshape(side, side)
            assert slots[cells].all()  # none is missed
            rows, columns = np.nonzero(cells)
            near = np.zeros_like(cells)
            near[max(rows.min() - 1, 0) : rows.max() + 2, max(columns.min() - 1, 0) : columns.max() + 2] = (
                True
            )
            assert not slots[~near].any()  # and none far away is taken


def test_scenes_by_class_follow_the_law_of_scenes_of_one_object():
    scenes = sample_scenes_by_class(960, 5)
    assert [class_of(scene) for scene in scenes] == [index % 48 for index in range(960)]
    assert not any(is_held_out(caption(scene)) for scene in scenes)
    assert sample_scenes_by_class(50, 5) == scenes[:50] != sample_scenes_by_class(50, 6)
    others = sample_one_object_scenes(960, 7)
    for of in (lambda scene: scene.background, lambda scene: scene.texture, lambda scene: scene.objects[0].x):
        here, there = Counter(map(of, scenes)), Counter(map(of, others))
        # Two samples of 960 from one law: six standard deviations of a difference of counts.
        for value in here | there:
            assert abs(here[value] - there[value]) < 6 * (here[value] + there[value]) ** 0.5


def test_class_accuracy_is_what_the_pictures_show():
    drawn = [scene_of("red", shape) for shape in SHAPES]
    drawn.append(scene_of("blue", "circle", ShapeObject("star", "white", "small", 24, 24)))
    pictures = np.stack([render(scene) for scene in drawn])
    wanted = [("red", shape) for shape in SHAPES] + [("blue", "circle")]
    wanted[0] = ("green", SHAPES[0])
    wanted[1] = ("red", SHAPES[2])
    found = class_accuracy(pictures, [CLASSES.index(pair) for pair in wanted])
    expected = {"one_object": 6 / 7, "colour": 5 / 7, "shape": 5 / 7, "class": 4 / 7}
    assert found == {name: pytest.approx(value, abs=1e-4) for name, value in expected.items()}


def test_a_picture_is_scored_by_the_name_of_its_class():
    picture = render(scene_of("red", "circle"))
    assert score_class("red circle", picture) == {"one_object": True, "colour": True, "shape": True}
    assert score_class("red star", picture) == {"one_object": True, "colour": True, "shape": False}
    assert score_class("blue star", picture) == {"one_object": True, "colour": False, "shape": False}
    two = render(scene_of("red", "circle", ShapeObject("star", "white", "small", 24, 24)))
    assert score_class("red circle", two) == {"one_object": False, "colour": False, "shape": False}
    with pytest.raises(ValueError, match="unknown.*'red'"):
        score_class("red", picture)
