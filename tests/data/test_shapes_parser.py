"""The reader of pictures and captions, against the ground truth, pictures drawn by hand and a flood fill."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from tests.helpers.refusals import refuses
from visual_spec.data import shapes_finder
from visual_spec.data.shapes import (
    BACKGROUND_COLOURS,
    OBJECT_COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    ShapeObject,
    caption,
    render,
    sample_scene,
)
from visual_spec.data.shapes_parser import (
    FoundObject,
    PictureFacts,
    WantedFacts,
    WantedObject,
    all_correct,
    parse_caption,
    parse_picture,
    prompt_accuracy,
    score,
    score_facts,
)


def _scenes(count: int, seed: int) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [sample_scene(rng) for _ in range(count)]


def _disturb(
    picture: np.ndarray, rng: np.random.Generator, *, blur=0.7, noise=6.0, block=3.0, ring=0.0
) -> np.ndarray:
    """What a VQ tokenizer does to a picture: blur, ringing, colour noise and steps of brightness between tokens."""

    def blurred(radius: float) -> np.ndarray:
        return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(radius)), float)

    result = blurred(blur)
    result += ring * (result - blurred(3.0))  # overshoot on both sides of an edge
    result += rng.normal(0, noise, picture.shape)
    result += np.kron(rng.normal(0, block, (16, 16)), np.ones((8, 8)))[..., None]
    return np.clip(np.rint(result), 0, 255).astype(np.uint8)


def _accuracy(scenes: list[Scene], pictures: list[np.ndarray]) -> dict[str, float]:
    right, total = Counter(), Counter()
    for scene, picture in zip(scenes, pictures, strict=True):
        for name, hit in score(caption(scene), picture).items():
            right[name] += hit
            total[name] += 1
    assert set(total) == {"shape", "colour", "size", "count", "relation", "background", "texture"}
    return {name: right[name] / total[name] for name in total}


def _check(count: int, seed: int, floor: float, **disturbance: float) -> None:
    rng, scenes = np.random.default_rng(seed), _scenes(count, seed)
    pictures = [render(scene) for scene in scenes]
    if disturbance:
        pictures = [_disturb(picture, rng, **disturbance) for picture in pictures]
    accuracy = _accuracy(scenes, pictures)
    assert min(accuracy.values()) >= floor, accuracy


USUAL = {"blur": 0.7, "noise": 6.0, "block": 3.0}


def test_accuracy_on_ground_truth() -> None:
    _check(100, 1, 0.99)


def test_accuracy_on_disturbed_pictures() -> None:
    _check(80, 2, 0.97, **USUAL)


@pytest.mark.slow
def test_accuracy_over_a_thousand_scenes() -> None:
    _check(1000, 3, 0.99)
    _check(1000, 4, 0.97, **USUAL)


@pytest.mark.parametrize(
    "disturbance",
    [
        {"blur": 1.0, "noise": 10.0, "block": 5.0},
        {"blur": 1.3, "noise": 4.0, "block": 4.0},
        {**USUAL, "ring": 0.5},
    ],
)
def test_harsher_disturbance_degrades_gently(disturbance: dict[str, float]) -> None:
    _check(40, 5, 0.93, **disturbance)


def test_facts_are_those_of_the_scene() -> None:
    for scene in _scenes(60, 6):
        facts = parse_picture(render(scene))
        assert (facts.background, facts.texture) == (scene.background, scene.texture)
        found = sorted((o.x, o.y, o.shape, o.colour, o.size) for o in facts.objects)
        wanted = sorted((o.x, o.y, o.shape, o.colour, o.size) for o in scene.objects)
        for one, other in zip(found, wanted, strict=True):
            assert one[2:] == other[2:]
            assert max(abs(one[0] - other[0]), abs(one[1] - other[1])) <= 1
        assert all(0.8 < o.fit <= 1 for o in facts.objects)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("colour", OBJECT_COLOURS)
def test_every_colour_on_every_background(colour: str, size: str) -> None:
    for i, background in enumerate(BACKGROUND_COLOURS):
        shape, texture = SHAPES[i], TEXTURES[(i + len(colour)) % len(TEXTURES)]
        scene = Scene((ShapeObject(shape, colour, size, 59, 70),), background, texture)  # off the grid
        facts = parse_picture(render(scene))
        assert [(o.shape, o.colour, o.size, o.x, o.y) for o in facts.objects] == [
            (shape, colour, size, 59, 70)
        ]
        assert (facts.background, facts.texture) == (background, texture)


def test_captions_are_read_back() -> None:
    for scene in _scenes(2000, 7):
        wanted = parse_caption(caption(scene))
        assert [(o.shape, o.colour, o.size) for o in wanted.objects] == [
            (o.shape, o.colour, o.size) for o in scene.objects
        ]
        assert (wanted.background, wanted.texture) == (scene.background, scene.texture)
        assert wanted.relation == scene.relation


def test_captions_written_by_hand() -> None:
    circle, cross = WantedObject("circle", "red", "small"), WantedObject("cross", "black", "large")
    assert parse_caption("  A small red  circle on a plain SKY background ") == WantedFacts(
        (circle,), "sky", "plain"
    )
    assert parse_caption("two large black crosses on a dotted sand background") == WantedFacts(
        (cross, cross), "sand", "dotted"
    )
    for relation in RELATIONS:
        text = f"a small red circle {relation} a large black cross on a checked pink background"
        assert parse_caption(text) == WantedFacts((circle, cross), "pink", "checked", relation)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a dog on a plain sky background",
        "a red circle on a plain sky background",
        "a small red circle",
        "a small red circle on a plain red background",
        "a small red circle near a large blue square on a plain sky background",
        "four small red circles on a plain sky background",
        "two small red circle on a plain sky background",
        "two small red crosss on a plain sky background",
        "two small red circlees on a plain sky background",
        "a small red circles on a plain sky background",
        "a small red circle on a plain sky background, please",
        "two small red circles left of a large blue square on a plain sky background",
    ],
)
def test_unreadable_captions_are_refused(text: str) -> None:
    refuses(ValueError, "(?s)SHAPE.*circle", parse_caption, text)


PAIR = Scene(
    (ShapeObject("star", "yellow", "small", 32, 64), ShapeObject("diamond", "purple", "large", 96, 64)),
    "mint",
    "striped",
    "left of",
)


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("small yellow star", "small yellow cross", {"shape"}),
        ("yellow", "white", {"colour"}),
        ("large", "small", {"size"}),
        ("left of", "above", {"relation"}),
        ("left of", "right of", {"relation"}),
        ("left of", "inside", {"relation"}),
        ("left of", "overlapping", {"relation"}),
        ("mint", "sky", {"background"}),
        ("striped", "checked", {"texture"}),
        ("striped mint", "gradient pink", {"background", "texture"}),
    ],
)
def test_one_wrong_attribute_counts_alone(old: str, new: str, wrong: set[str]) -> None:
    picture, prompt = render(PAIR), caption(PAIR)
    assert all_correct(score(prompt, picture))
    hits = score(prompt.replace(old, new), picture)
    assert {name for name, hit in hits.items() if not hit} == wrong
    assert prompt_accuracy(hits) == pytest.approx(1 - len(wrong) / 7)
    assert not all_correct(hits)


def test_swapped_pair_has_the_wrong_relation() -> None:
    swapped = Scene((PAIR.objects[1], PAIR.objects[0]), PAIR.background, PAIR.texture, "left of")
    hits = score(caption(swapped), render(PAIR))
    assert not hits.pop("relation") and all_correct(hits)


@pytest.mark.parametrize(("have", "want"), [(1, 2), (2, 3), (3, 2), (2, 1)])
def test_wrong_count(have: int, want: int) -> None:
    objects = tuple(ShapeObject("cross", "orange", "small", 32 + 32 * i, 64) for i in range(3))
    picture = render(Scene(objects[:have], "sand", "checked"))
    hits = score(caption(Scene(objects[:want], "sand", "checked")), picture)
    assert not hits["count"] and hits["background"] and hits["texture"]
    # Surplus objects are no harm to the others; missing ones have no shape.
    assert hits["shape"] == hits["colour"] == hits["size"] == (have > want)


def test_front_and_back() -> None:
    front, back = (
        ShapeObject("square", "green", "large", 48, 72),
        ShapeObject("circle", "white", "large", 80, 56),
    )
    scene = Scene((front, back), "lavender", "dotted", "overlapping")
    facts = parse_picture(render(scene))
    order = [o.colour for o in facts.objects]
    green, white = order.index("green"), order.index("white")
    assert facts.relations == {(green, white): "overlapping", (white, green): "under"}
    behind = replace(scene, objects=(back, front))
    assert all_correct(score(caption(behind), render(behind)))
    hits = score(caption(behind), render(scene))
    assert not hits.pop("relation") and all_correct(hits)


def test_inside_and_around() -> None:
    for shape in SHAPES:
        inner, outer = (
            ShapeObject(shape, "black", "small", 64, 56),
            ShapeObject("circle", "red", "large", 64, 56),
        )
        facts = parse_picture(render(Scene((inner, outer), "grey", "plain", "inside")))
        assert [(o.shape, o.colour) for o in facts.objects] == [(shape, "black"), ("circle", "red")]
        assert facts.relations == {(0, 1): "inside", (1, 0): "around"}


def test_flat_shapes_drawn_by_hand() -> None:
    image = Image.new("RGB", (128, 128), (225, 205, 165))  # sand; no outlines and no light
    draw = ImageDraw.Draw(image)
    draw.ellipse((12, 44, 59, 91), fill=(210, 50, 40))
    draw.rectangle((84, 57, 107, 80), fill=(45, 85, 210))
    facts = parse_picture(image)
    assert {(o.shape, o.colour, o.size) for o in facts.objects} == {
        ("circle", "red", "large"),
        ("square", "blue", "small"),
    }
    assert (facts.background, facts.texture) == ("sand", "plain")
    prompt = "a large red circle left of a small blue square on a plain sand background"
    assert all_correct(score(prompt, image))


def test_patch_of_no_known_shape_counts_as_an_object() -> None:
    image = Image.fromarray(render(Scene((ShapeObject("circle", "green", "small", 40, 32),), "sky", "plain")))
    ImageDraw.Draw(image).rectangle((8, 96, 120, 106), fill=(215, 45, 45))
    facts = parse_picture(image)
    assert sorted((o.colour, o.shape or "", o.size or "") for o in facts.objects) == [
        ("green", "circle", "small"),
        ("red", "", ""),
    ]
    hits = score("a small green circle on a plain sky background", image)
    assert {name for name, hit in hits.items() if not hit} == {"count"}


def test_specks_and_thin_bridges_are_no_objects() -> None:
    objects = tuple(ShapeObject("star", "black", "small", 64, 32 + 32 * i) for i in range(3))
    scene = Scene(objects, "pink", "plain")
    picture = render(scene)
    picture[40:60, 64] = OBJECT_COLOURS["black"]  # joins two stars
    picture[10:13, 10:13] = OBJECT_COLOURS["red"]
    picture[:, 120:122] = OBJECT_COLOURS["white"]
    assert all_correct(score(caption(scene), picture))


def _mean_accuracy(prompts: list[str], pictures: list[np.ndarray]) -> float:
    facts = [parse_picture(picture) for picture in pictures]
    return float(
        np.mean(
            [prompt_accuracy(score_facts(parse_caption(p), f)) for p, f in zip(prompts, facts, strict=True)]
        )
    )


def test_garbage_scores_low() -> None:
    rng = np.random.default_rng(8)
    prompts = [caption(scene) for scene in _scenes(20, 8)]
    noise = [rng.integers(0, 256, (128, 128, 3), dtype=np.uint8) for _ in prompts]
    assert _mean_accuracy(prompts, noise) == 0
    palette = np.array([*OBJECT_COLOURS.values(), *BACKGROUND_COLOURS.values()], np.uint8)
    specks = [palette[rng.integers(len(palette), size=(128, 128))] for _ in prompts]
    assert _mean_accuracy(prompts, specks) == 0
    tiles = [
        np.kron(palette[rng.integers(len(palette), size=(16, 16))], np.ones((8, 8, 1), np.uint8))
        for _ in prompts
    ]
    assert _mean_accuracy(prompts, tiles) < 0.25
    for grey in (0, 250):
        assert _mean_accuracy(prompts, [np.full((128, 128, 3), grey, np.uint8)] * len(prompts)) < 0.15


def test_assignment_prefers_the_most_attributes() -> None:
    wanted = parse_caption("a small red circle left of a small blue square on a plain sky background")
    objects = (
        FoundObject("square", "blue", "small", 96, 64, 1.0),
        FoundObject(None, "red", None, 64, 20, 0.4),
        FoundObject("circle", "red", "small", 32, 64, 1.0),
    )
    facts = PictureFacts(objects, "sky", "plain", {(2, 0): "left of", (1, 0): "left of", (0, 2): "right of"})
    hits = score_facts(wanted, facts)
    assert {name for name, hit in hits.items() if not hit} == {"count"}
    # A relation between two things of which one is neither the shape nor the colour asked for is none.
    facts = replace(
        facts, objects=(objects[0], objects[1], replace(objects[2], shape="star", colour="green"))
    )
    facts.relations.pop((1, 0))
    assert not score_facts(wanted, facts)["relation"]


def test_empty_picture_scores_without_objects() -> None:
    wanted = parse_caption("three small red circles on a plain sky background")
    assert not any(score_facts(wanted, PictureFacts((), None, None)).values())


@pytest.mark.parametrize("side", [96, 256, 512])
def test_other_sizes_are_resampled(side: int) -> None:
    rng = np.random.default_rng(10)
    for scene in [sample_scene(rng) for _ in range(8)]:
        assert all_correct(score(caption(scene), render(scene, side)))


def test_pil_images_of_any_mode() -> None:
    image = Image.fromarray(render(PAIR))
    assert parse_picture(image) == parse_picture(image.convert("RGBA")) == parse_picture(render(PAIR))


def test_wrong_images_are_refused() -> None:
    refuses(TypeError, "float64.*uint8", parse_picture, np.zeros((128, 128, 3)))
    refuses(TypeError, "list.*PIL", parse_picture, [1, 2])
    refuses(ValueError, r"\(2, 128, 128, 3\)", parse_picture, np.zeros((2, 128, 128, 3), np.uint8))
    refuses(ValueError, "100 x 128 pixels", parse_picture, np.zeros((100, 128, 3), np.uint8))


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
