"""The parser of clips: on true clips, on clips with one attribute wrong, and on clips of the tokenizer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.refusals import refuses
from visual_spec.data.motion import Clip, MovingShape, caption, render, sample_clips
from visual_spec.data.motion_parser import parse_caption, parse_clip, score

MOVER = MovingShape("triangle", "blue", "small", 16, 16, "right", "steadily", "bounces")
OTHER = MovingShape("cross", "yellow", "small", 40, 48)
CLIP = Clip((MOVER, OTHER), "mint", "striped", "pans left")


def with_mover(**changes) -> Clip:
    return replace(CLIP, objects=(replace(MOVER, **changes), OTHER))


def wrong(clip: Clip) -> set[str]:
    """The attributes of the caption of `CLIP` that another clip lacks."""
    return {name for name, right in score(caption(CLIP), render(clip)).items() if not right}


def test_true_clips_are_read_right():
    for clip in sample_clips(24, seed=11):
        facts = parse_clip(render(clip))
        assert all(score(caption(clip), render(clip)).values()), caption(clip)
        paths = {item.colour: item.points for item in facts.objects}
        for item in clip.objects:
            assert np.array_equal(paths[item.colour], item.path())


@pytest.mark.parametrize(
    "clip, attributes",
    [
        (with_mover(shape="square"), {"shape"}),
        (with_mover(colour="purple"), {"colour"}),
        (with_mover(size="large"), {"size"}),
        (with_mover(direction="left", x=48), {"direction"}),
        (with_mover(speed="quickly"), {"speed"}),
        (with_mover(ending="stops"), {"ending"}),
        (with_mover(direction=None, speed=None, ending=None), {"direction", "speed", "ending"}),
        (replace(CLIP, background="pink"), {"background"}),
        (replace(CLIP, texture="plain", camera="still"), {"texture", "camera"}),
        (replace(CLIP, camera="pans right"), {"camera"}),
        (replace(CLIP, camera="still"), {"camera"}),
    ],
)
def test_one_wrong_attribute_is_found(clip, attributes):
    assert wrong(clip) == attributes


def test_a_missing_object_and_one_too_many_are_counted():
    missing = replace(CLIP, objects=(MOVER,))
    assert wrong(missing) == {"count", "shape", "colour", "size", "direction", "consistency"}
    third = MovingShape("circle", "red", "small", 16, 48)
    assert wrong(replace(CLIP, objects=(MOVER, OTHER, third))) == {"count"}


def test_a_shape_that_changes_or_jumps_is_not_consistent():
    frames = render(CLIP)
    changed = frames.copy()
    changed[5:9] = render(with_mover(shape="square"))[5:9]
    hits = score(caption(CLIP), changed)
    assert hits["shape"] and not hits["consistency"]
    jumping = frames.copy()
    jumping[6:10] = render(with_mover(x=32, y=40, direction=None))[6:10]
    assert not score(caption(CLIP), jumping)["consistency"]
    assert min(item.consistency for item in parse_clip(jumping).objects) < 0.8


def test_noise_and_empty_clips_have_no_objects():
    noise = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    assert parse_clip(noise).background is None
    empty = parse_clip(render(Clip((), "sand", "plain")))
    assert empty.objects == () and (empty.background, empty.texture, empty.camera) == (
        "sand",
        "plain",
        "still",
    )


def test_pictures_of_other_sizes_are_read_too():
    large = [Image.fromarray(frame).resize((128, 128), Image.Resampling.LANCZOS) for frame in render(CLIP)]
    assert all(score(caption(CLIP), large).values())


def test_clips_that_are_none_are_refused():
    refuses(TypeError, "float32", parse_clip, np.zeros((4, 64, 64, 3), np.float32))
    refuses(TypeError, "PIL", parse_clip, [np.zeros((64, 64, 3), np.uint8)])
    refuses(ValueError, r"\(1, 64, 64, 3\)", parse_clip, np.zeros((1, 64, 64, 3), np.uint8))
    refuses(ValueError, "square", parse_clip, np.zeros((4, 64, 32, 3), np.uint8))
    refuses(ValueError, "one size", parse_clip, [Image.new("RGB", (64, 64)), Image.new("RGB", (32, 32))])
    refuses(ValueError, "DIRECTION", parse_caption, "a small red circle flies away")


@pytest.mark.slow
def test_clips_of_the_embedded_tokenizer_are_read_right():
    from scripts.train.motion import decode
    from scripts.train.motion_tokens import encode_parts
    from visual_spec.models.next_token.llamagen_vq import VQModel
    from visual_spec.pipelines.embedded import embedded_folder

    vq_model = VQModel.from_pretrained(
        embedded_folder("shapes") / "vq_model", torch_dtype=torch.float32
    ).eval()
    parts = encode_parts(vq_model)
    hits, equal = [], []
    for clip in sample_clips(60, seed=5):
        tokens = torch.from_numpy(parts.encode(clip)).long()
        hits += score(caption(clip), decode(vq_model, tokens)).values()
        if clip.camera == "still":
            equal.append((tokens[1:] == tokens[:-1]).float().mean().item())
    assert np.mean(hits) > 0.97
    assert np.mean(equal) > 0.8  # what stands still keeps its tokens
