"""Scenes of `things`: what captions say is what pictures show, and the parser reads it back."""

import itertools
import re

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tests.helpers.refusals import refuses
from visual_spec.data import things
from visual_spec.data.things import GROUNDS, NOUNS, SPRITE, Thing, ThingsScene, caption, is_held_out
from visual_spec.data.things_parser import WantedThings, parse_caption, parse_picture, score

SCENES, PICTURES = things.sample_dataset(200, 3)


def test_pictures_are_their_drawings_on_their_ground():
    """Against PIL's own pasting of the sheet."""
    with Image.open(things.__file__.replace("things.py", "things.png")) as file:
        sheet = file.convert("RGBA")
    for scene, picture in zip(SCENES[:20], PICTURES, strict=False):
        canvas = Image.new("RGB", (128, 128), GROUNDS[scene.ground])
        for one in scene.objects:
            row, column = divmod(NOUNS.index(one.noun), sheet.width // SPRITE)
            box = column * SPRITE, row * SPRITE, (column + 1) * SPRITE, (row + 1) * SPRITE
            sprite = sheet.crop(box)
            canvas.paste(sprite, (one.x - SPRITE // 2, one.y - SPRITE // 2), sprite)
        assert np.abs(np.asarray(canvas).astype(int) - picture).max() <= 1


def test_captions_say_what_is_there_and_are_read_back():
    assert caption(ThingsScene((Thing("fox", 32, 64), Thing("owl", 96, 64)), "mint", "left of")) == (
        "a fox left of an owl on a mint background"
    )
    for scene in SCENES:
        nouns = tuple(one.noun for one in scene.objects)
        assert parse_caption(caption(scene)) == WantedThings(nouns, scene.ground, scene.relation)
        if scene.relation is not None:
            first, second = scene.objects
            right, down = second.x - first.x, second.y - first.y
            assert (right > 0 == down) if scene.relation == "left of" else (down > 0 == right)
    words = {word for scene in SCENES for word in re.findall(r"\w+", caption(scene))}
    assert words <= set(things.vocabulary()) and len(things.vocabulary()) == len(set(things.vocabulary()))


def test_held_out_pairs_are_never_seen_together():
    seen = {frozenset(one.noun for one in scene.objects) for scene in things.sample_scenes(3000, 0)}
    held = {
        frozenset(one.noun for one in scene.objects) for scene in things.sample_scenes(300, 0, held_out=True)
    }
    assert not {pair for pair in seen if len(pair) == 2} & held
    pairs = [
        is_held_out(ThingsScene((Thing(one, 32, 64), Thing(other, 96, 64)), "sky", "above"))
        for one, other in itertools.combinations(NOUNS, 2)
    ]
    assert 0.08 < np.mean(pairs) < 0.12


def test_the_parser_reads_every_clean_scene():
    for scene, picture in zip(SCENES, PICTURES, strict=True):
        facts = parse_picture(picture)
        assert set(facts.things) == set(scene.objects) and facts.ground == scene.ground and not facts.others
        assert all(score(caption(scene), picture).values())


def test_the_parser_reads_noise_and_a_light_blur():
    rng = np.random.default_rng(0)
    for scene, picture in zip(SCENES[:60], PICTURES, strict=False):
        noisy = (picture + rng.normal(0, 20, picture.shape)).clip(0, 255).astype(np.uint8)
        blurred = Image.fromarray(picture).filter(ImageFilter.GaussianBlur(1))
        assert all(score(caption(scene), noisy).values()) and all(score(caption(scene), blurred).values())


def test_wrong_pictures_are_told():
    pair = next(scene for scene in SCENES if scene.relation == "left of")
    first, second = pair.objects
    picture, prompt = things.render(pair), caption(pair)
    assert score(caption(ThingsScene((second, first), pair.ground, "left of")), picture)["relation"] is False
    assert score(caption(ThingsScene(pair.objects, pair.ground, "above")), picture)["relation"] is False
    alone = score(prompt, things.render(ThingsScene((first,), pair.ground)))
    assert alone == {"thing": False, "count": False, "background": True, "relation": False}
    other = next(ground for ground in GROUNDS if ground != pair.ground)
    assert score(prompt, things.render(ThingsScene(pair.objects, other, "left of"))) == {
        "thing": True, "count": True, "background": False, "relation": True,
    }  # fmt: skip
    spoilt = picture.copy()
    spoilt[8:40, 8:120] = np.random.default_rng(0).integers(0, 255, (32, 112, 3))
    assert not score(prompt, spoilt)["count"]
    cut = picture.copy()  # half of a thing is no thing
    cut[first.y :, first.x - SPRITE // 2 : first.x + SPRITE // 2] = GROUNDS[pair.ground]
    assert not all(score(prompt, cut).values())


@pytest.mark.parametrize(
    "text", ["a fox", "a unicorn on a mint background", "a fox below a pig on a mint background"]
)
def test_captions_of_others_are_refused(text):
    refuses(ValueError, re.escape(repr(text)) + ".*THING: fox, rabbit", parse_caption, text)
    refuses(ValueError, r"\(64, 64, 3\).*128", parse_picture, np.zeros((64, 64, 3), np.uint8))
    refuses(ValueError, "'tartan'.*mint", things.render, ThingsScene((), "tartan"))
