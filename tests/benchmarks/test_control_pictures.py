"""Edges and outlines of the measure of ControlAR, on pictures whose answer is known."""

import numpy as np

from benchmarks.control_pictures import edges, judged, near, share
from visual_spec.data.shapes import TEXTURES, Scene, ShapeObject, render

SCENE = Scene((ShapeObject("square", "red", "large", 56, 64),), "sky", "striped")


def test_textures_have_no_edges_and_shapes_have():
    for texture in TEXTURES:
        assert not edges(render(Scene((), "grey", texture))).any()
    drawn = edges(render(SCENE))
    assert drawn[64, 32:35].any() and not drawn[64, 40:72].any() and not drawn[:30].any()


def test_a_share_counts_pixels_beside_one():
    one, other = np.zeros((6, 6), bool), np.zeros((6, 6), bool)
    one[2, 1:5], other[3, 0] = True, True
    assert near(other).sum() == 6 and share(one, other) == 0.25 and share(other, one) == 1.0
    assert share(np.zeros((6, 6), bool), one) == 0.0


def test_the_true_picture_meets_its_outline_and_a_moved_one_does_not():
    true = render(SCENE)
    assert set(judged(SCENE, true, true).values()) == {1.0}
    moved = Scene((ShapeObject("square", "red", "large", 64, 72),), "sky", "striped")
    answer = judged(SCENE, true, render(moved))
    assert answer["attributes"] == 1.0 and answer["read_recall"] < 0.1 and answer["precision"] < 0.2
