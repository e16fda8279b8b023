"""What the finder of objects takes for a picture, and its connected components against a flood fill."""

import numpy as np
import pytest
from PIL import Image

from visual_spec.data import shapes_finder
from visual_spec.data.shapes import Scene, ShapeObject, caption, render, sample_scene
from visual_spec.data.shapes_finder import parse_picture
from visual_spec.data.shapes_parser import all_correct, score

PAIR = Scene(
    (ShapeObject("star", "yellow", "small", 32, 64), ShapeObject("diamond", "purple", "large", 96, 64)),
    "mint",
    "striped",
    "left of",
)


@pytest.mark.parametrize("side", [96, 256, 512])
def test_other_sizes_are_resampled(side: int) -> None:
    rng = np.random.default_rng(10)
    for scene in [sample_scene(rng) for _ in range(8)]:
        assert all_correct(score(caption(scene), render(scene, side)))


def test_pil_images_of_any_mode() -> None:
    image = Image.fromarray(render(PAIR))
    assert parse_picture(image) == parse_picture(image.convert("RGBA")) == parse_picture(render(PAIR))


def test_wrong_images_are_refused() -> None:
    with pytest.raises(TypeError, match="float64.*uint8"):
        parse_picture(np.zeros((128, 128, 3)))
    with pytest.raises(TypeError, match="list.*PIL"):
        parse_picture([1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"\(2, 128, 128, 3\)"):
        parse_picture(np.zeros((2, 128, 128, 3), np.uint8))
    with pytest.raises(ValueError, match="100 x 128 pixels"):
        parse_picture(np.zeros((100, 128, 3), np.uint8))


def test_the_picture_is_left_alone() -> None:
    picture = render(PAIR)
    before = picture.copy()
    parse_picture(picture)
    assert np.array_equal(picture, before)


@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_components_agree_with_flood_fill(kinds: int) -> None:
    rng = np.random.default_rng(kinds)
    for _ in range(5):
        labels = rng.integers(-1, kinds, (23, 31))
        found = shapes_finder._components(labels)
        expected = np.full(labels.shape, -1)
        for start in zip(*np.nonzero(labels >= 0), strict=True):
            if expected[start] >= 0:
                continue
            stack = [start]
            while stack:
                y, x = stack.pop()
                expected[y, x] = start[0] * labels.shape[1] + start[1]
                for ny, nx in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                    if (
                        0 <= ny < 23
                        and 0 <= nx < 31
                        and labels[ny, nx] == labels[y, x]
                        and expected[ny, nx] < 0
                    ):
                        stack.append((ny, nx))
        pairs = set(zip(found.ravel().tolist(), expected.ravel().tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
        assert np.array_equal(found < 0, labels < 0)
