"""The scene generator: determinism, captions, the held-out split, and geometry against polygons written by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scripts.train.classes import class_accuracy, object_slots, sample_one_object_scenes
from tests.helpers.refusals import refuses
from visual_spec.data.shapes import (
    BACKGROUND_COLOURS,
    CELL,
    IMAGE_SIZE,
    OBJECT_COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    TOUCHING,
    Scene,
    ShapeObject,
    caption,
    held_out_prompts,
    is_held_out,
    outline,
    render,
    sample_dataset,
    sample_scene,
    signed_distance,
)
from visual_spec.data.shapes_classes import (
    CLASS_NAMES,
    CLASSES,
    class_of,
    sample_scenes_by_class,
    score_class,
)


def _scenes(count: int, seed: int = 0, touching: float = TOUCHING) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [sample_scene(rng, touching) for _ in range(count)]


def _corners(shape: str, radius: float) -> np.ndarray:
    """Corners of a shape of a given radius, from its description and not from its distance function."""
    if shape == "square":
        corners = [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)]
    elif shape == "diamond":
        corners = [(0, -1.1), (0.88, 0), (0, 1.1), (-0.88, 0)]
    elif shape == "triangle":
        corners = [(0, -1.0), (1.0, 0.8), (-1.0, 0.8)]
    elif shape == "cross":
        a, r = 0.34, 0.95
        corners = [
            (a, -r),
            (a, -a),
            (r, -a),
            (r, a),
            (a, a),
            (a, r),
            (-a, r),
            (-a, a),
            (-r, a),
            (-r, -a),
            (-a, -a),
        ]
        corners.append((-a, -r))
    elif shape == "star":
        turns = np.arange(10) * np.pi / 5
        lengths = np.where(np.arange(10) % 2 == 0, 1.08, 0.48)
        return radius * np.stack([lengths * np.sin(turns), -lengths * np.cos(turns)], 1)
    else:  # a circle, by many corners
        turns = np.arange(720) * np.pi / 360
        return radius * np.stack([np.sin(turns), np.cos(turns)], 1)
    return radius * np.array(corners, float)


def _brute_force(corners: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Signed distance to a polygon, point by segment, and whether the nearest point is well within an edge."""
    best = np.full(x.shape, np.inf)
    on_edge = np.zeros(x.shape, bool)
    inside = np.zeros(x.shape, bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, 0), strict=True):
        length = np.hypot(bx - ax, by - ay)
        along = ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length
        t = np.clip(along, 0, length)
        gap = np.hypot(x - ax - t * (bx - ax) / length, y - ay - t * (by - ay) / length)
        margin = min(2.0, length / 4)
        on_edge = np.where(gap < best, (along > margin) & (along < length - margin), on_edge)
        best = np.minimum(best, gap)
        crosses = (ay > y) != (by > y)
        inside ^= crosses & (x < ax + (y - ay) * (bx - ax) / np.where(by == ay, 1.0, by - ay))
    return np.where(inside, -best, best), on_edge


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_signed_distance_agrees_with_polygon(shape: str, size: str) -> None:
    y, x = np.mgrid[-34:34:0.5, -34:34:0.5] + 0.21
    exact, on_edge = _brute_force(_corners(shape, SIZES[size]), x, y)
    found = signed_distance(shape, x, y, SIZES[size])
    clear = np.abs(exact) > 0.02
    assert np.array_equal((found < 0)[clear], (exact < 0)[clear])
    near = (np.abs(exact) < 1.5) & (on_edge | (shape == "circle"))
    assert near.sum() > 100
    np.testing.assert_allclose(found[near], exact[near], atol=0.02)


def test_unknown_names_are_refused_with_the_allowed_ones() -> None:
    refuses(ValueError, "'hexagon'", signed_distance, "hexagon", np.zeros(1), np.zeros(1), 10)
    refuses(ValueError, "'wavy'", render, Scene((), "sky", "wavy"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_painted_pixels_are_those_of_the_polygon(shape: str, size: str) -> None:
    item = ShapeObject(shape, "black", size, 56, 72)
    picture = render(Scene((item,), "sand", "plain"))
    y, x = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE] + 0.5
    exact, _ = _brute_force(_corners(shape, SIZES[size]), x - 56, y - 72)
    dark = picture.sum(-1) < 150
    assert dark[exact < -0.8].all()
    assert (picture[exact > 0.8] == BACKGROUND_COLOURS["sand"]).all()


@pytest.mark.parametrize("colour", OBJECT_COLOURS)
def test_fill_and_outline(colour: str) -> None:
    picture = render(Scene((ShapeObject("square", colour, "large", 64, 64),), "grey", "plain")).astype(float)
    np.testing.assert_allclose(picture[63:65, 63:65].mean((0, 1)), OBJECT_COLOURS[colour], atol=1.5)
    reach = 0.88 * SIZES["large"]  # 22.88: the outline covers 20.88 to 22.88 pixels left of the centre
    outline = picture[64, int(64 - reach) + 1]
    np.testing.assert_allclose(outline, 0.55 * np.array(OBJECT_COLOURS[colour]), atol=0.501)  # rounded
    if colour not in ("white", "black"):  # white is clipped, black has nothing to lighten
        assert picture[50, 50].sum() > picture[64, 64].sum() > picture[78, 78].sum()


def test_first_object_lies_in_front() -> None:
    front = ShapeObject("square", "red", "large", 56, 64)
    back = ShapeObject("square", "blue", "large", 72, 64)
    red_front = render(Scene((front, back), "mint", "plain", "overlapping"))
    blue_front = render(Scene((back, front), "mint", "plain", "overlapping"))
    assert red_front[64, 64, 0] > 150 > red_front[64, 64, 2]
    assert blue_front[64, 64, 2] > 150 > blue_front[64, 64, 0]


@pytest.mark.parametrize("texture", TEXTURES)
@pytest.mark.parametrize("background", BACKGROUND_COLOURS)
def test_textures_are_shades_of_the_background(background: str, texture: str) -> None:
    colour = np.array(BACKGROUND_COLOURS[background], float)
    shade = (render(Scene((), background, texture)) / colour).mean(-1)
    if texture == "plain":
        assert np.ptp(shade) < 0.01
    elif texture == "gradient":
        assert (np.diff(shade.mean(1)) <= 0).all() and shade[0].mean() > 1 > shade[-1].mean()
    elif texture == "striped":  # constant along the diagonals, period 16
        np.testing.assert_allclose(shade[1:, :-1], shade[:-1, 1:])
        assert shade.min() < 0.9 < shade.max()
    elif texture == "dotted":
        assert 0.1 < (shade < 0.9).mean() < 0.2 and shade[8, 8] < 0.85 and shade[0, 0] > 0.99
    else:
        assert shade[0, 0] < 0.9 < shade[0, 16] and shade[16, 16] < 0.9 < shade[16, 0]
        assert abs((shade < 0.94).mean() - 0.5) < 1e-9


def test_other_sizes_show_the_same_scene() -> None:
    for scene in _scenes(10):
        large = render(scene, 2 * IMAGE_SIZE).astype(float)
        pooled = large.reshape(IMAGE_SIZE, 2, IMAGE_SIZE, 2, 3).mean((1, 3))
        assert np.abs(pooled - render(scene)).mean() < 3


def test_the_outline_is_where_another_object_begins() -> None:
    """Against polygons: which object each pixel shows, and then pixel by pixel its right and lower neighbours."""
    y, x = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE] + 0.5
    for scene in _scenes(12):
        shown = np.zeros((IMAGE_SIZE, IMAGE_SIZE), int)
        for number in range(len(scene.objects), 0, -1):
            item = scene.objects[number - 1]
            distance, _ = _brute_force(_corners(item.shape, SIZES[item.size]), x - item.x, y - item.y)
            shown[distance < 0] = number
        want = np.zeros(shown.shape, bool)
        for row in range(IMAGE_SIZE - 1):
            for column in range(IMAGE_SIZE - 1):
                own = shown[row, column]
                want[row, column] = own != shown[row, column + 1] or own != shown[row + 1, column]
        lines = outline(scene)
        # Pixels exactly on an edge.
        assert lines.dtype == bool and want.sum() > 60 and (lines != want).sum() <= 8


def test_sampling_is_deterministic() -> None:
    assert _scenes(50) == _scenes(50)
    assert _scenes(50) != _scenes(50, seed=1)
    first, second = sample_dataset(5, 3), sample_dataset(5, 3)
    assert first[0] == second[0] and np.array_equal(first[1], second[1])
    assert first[1].shape == (5, IMAGE_SIZE, IMAGE_SIZE, 3) and first[1].dtype == np.uint8
    assert not np.array_equal(first[1], sample_dataset(5, 4)[1])
    assert sample_dataset(2, 0, size=64)[1].shape == (2, 64, 64, 3)
    assert sample_dataset(0, 0)[1].shape == (0, IMAGE_SIZE, IMAGE_SIZE, 3)
    assert held_out_prompts(20, 5) == held_out_prompts(20, 5) != held_out_prompts(20, 6)


def test_held_out_split_is_disjoint() -> None:
    seen = {caption(scene) for scene in sample_dataset(300, 0, size=8)[0]}
    unseen = {caption(scene) for scene in sample_dataset(300, 0, held_out=True, size=8)[0]}
    assert not seen & unseen
    assert not any(map(is_held_out, seen))
    assert all(map(is_held_out, unseen))
    assert all(map(is_held_out, held_out_prompts(50)))
    share = np.mean([is_held_out(caption(scene)) for scene in _scenes(4000)])
    assert 0.08 < share < 0.125  # 26 of 256 hashes


def test_captions() -> None:
    red = ShapeObject("circle", "red", "small", 32, 64)
    blue = ShapeObject("cross", "blue", "large", 96, 64)
    assert caption(Scene((red,), "sky", "plain")) == "a small red circle on a plain sky background"
    assert (
        caption(Scene((red, blue), "sand", "dotted", "left of"))
        == "a small red circle left of a large blue cross on a dotted sand background"
    )
    cross = ShapeObject("cross", "black", "small", 32, 64)
    assert (
        caption(Scene((cross,) * 2, "mint", "checked"))
        == "two small black crosses on a checked mint background"
    )
    assert (
        caption(Scene((red,) * 3, "mint", "striped"))
        == "three small red circles on a striped mint background"
    )


@pytest.mark.parametrize("touching", [TOUCHING, 0.5])
def test_scenes_are_what_their_captions_say(touching: float) -> None:
    scenes = _scenes(3000, touching=touching)
    apart = 1 - touching
    kinds = {"single": 0, "group": 0, **dict.fromkeys(RELATIONS, 0)}
    for scene in scenes:
        for item in scene.objects:
            assert item.x % CELL == item.y % CELL == 0
            reach = 1.1 * SIZES[item.size]  # the longest, a diamond
            assert reach <= min(item.x, item.y) and max(item.x, item.y) <= IMAGE_SIZE - reach
        if scene.relation is None:
            kinds["group" if scene.is_group else "single"] += 1
            assert len({(o.shape, o.colour, o.size) for o in scene.objects}) == 1
            continue
        kinds[scene.relation] += 1
        first, second = scene.objects
        assert first.colour != second.colour
        dx, dy = first.x - second.x, first.y - second.y
        expected = {
            "left of": dx < 0 == dy,
            "right of": dx > 0 == dy,
            "above": dy < 0 == dx,
            "below": dy > 0 == dx,
            "inside": dx == dy == 0 and (first.size, second.size) == ("small", "large"),
            "overlapping": dx != 0 != dy and np.hypot(dx, dy) < SIZES[first.size] + SIZES[second.size],
        }
        assert expected[scene.relation], scene
    shares = {
        "single": apart * 7 / 17,
        "group": apart * 3 / 17,
        "inside": touching / 2,
        "overlapping": touching / 2,
    }
    for kind, share in shares.items():
        assert abs(kinds[kind] / len(scenes) - share) < 0.03
    assert all(abs(kinds[name] / len(scenes) - apart * 7 / 68) < 0.025 for name in RELATIONS[:4])
    assert {scene.background for scene in scenes} == set(BACKGROUND_COLOURS)
    assert {scene.texture for scene in scenes} == set(TEXTURES)


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
    refuses(ValueError, "unknown.*'red'", score_class, "red", picture)
