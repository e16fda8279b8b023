"""The command line with clips, run on a tiny real model."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.command import generate, last_line, pixels
from tests.helpers.tiny import tiny_video_pipeline
from visual_spec import ChunkVideoPipeline, cli
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

PROMPT = "a red circle"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_video_pipeline(SpeculativeJacobiSampler(8, initial_draft="panned_frame")).save_pretrained(folder)
    return str(folder)


def test_clips_are_written_frame_by_frame(model, tmp_path, capsys):
    status = generate(model, tmp_path, PROMPT, "--video", "--format", "png", "--frames", "2", "--json")
    document = last_line(capsys)
    assert status == 0 and document["frame_rate"] == 8.0 and document["num_frames"] == 2
    (clip,) = document["videos"]
    sheet = pixels(clip["file"])
    assert sheet.shape == (4, 10, 3) and clip["tokens_per_call"] == pytest.approx(8 / clip["calls"])
    assert document["sampler"]["initial_draft"] == "panned_frame"


def test_a_comparison_shows_both_clips_and_what_each_frame_cost(model, tmp_path, capsys):
    assert generate(model, tmp_path, PROMPT, "--compare", "--format", "gif", "--window", "6") == 0
    assert "Every clip is the same, pixel for pixel in all frames." in capsys.readouterr().out
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000-a-red-circle-seed0.gif", "comparison.html", "comparison.json"]
    document = json.loads((tmp_path / "comparison.json").read_text())
    # The option changes one setting; the others are the model's own.
    assert {"window": 6, "initial_draft": "panned_frame"}.items() <= document["sampler"].items()
    (row,) = document["comparison"]
    assert row["identical"] and row["plain_calls"] == 12 > row["calls"]
    page = (tmp_path / "comparison.html").read_text()
    assert page.count("<svg") == 1 and "http" not in page.replace("http://www.w3.org", "")
    assert page.count("data:video/mp4") + page.count("data:image/gif") == 2
    paid = [int(n) for n in page.split("paid by frame: ")[1].split("<")[0].split('"')[0].split()]
    assert len(paid) == 3 and sum(paid) == row["calls"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--video", "--model", "shapes"], "shapes makes pictures; leave --video out"),
        (["--video", "--music"], "motion makes clips; leave --music out"),
        (["--frames", "4", "--model", "shapes"], "--frames is of clips"),
        (["--format", "gif", "--model", "shapes"], "--format gif is of music and clips"),
        (["--format", "gif", "--model", "tunes"], "--format gif given; music is written as wav, flac, ogg"),
    ],
)
def test_options_of_other_media_are_refused(arguments, message, tmp_path, capsys):
    assert cli.main(["generate", PROMPT, "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_model_of_chunks_draws_the_clip_that_python_draws(tmp_path, capsys):
    policy = "sliding:window=4"
    options = ("--frames", "6", "--policy", policy, "--sampler", ":steps=2", "--format", "png", "--json")
    assert generate("motion_causal", tmp_path, PROMPT, *options) == 0
    document = last_line(capsys)
    assert document["policy"] == policy and document["sampler"]["steps"] == 2
    (clip,) = document["videos"]
    # 3 chunks of 2 steps, the first one of 16, and 1 clean pass
    assert clip["calls"] == 23 and clip["frames_per_call"] == pytest.approx(6 / 23)
    pipe = ChunkVideoPipeline.from_pretrained("motion_causal")
    seed = torch.Generator().manual_seed(0)
    drawn = pipe(PROMPT, num_frames=6, policy=policy, steps=2, generator=seed)
    assert drawn.save(tmp_path / "drawn.png").read_bytes() == Path(clip["file"]).read_bytes()


@pytest.mark.parametrize(
    "model, arguments, message",
    [
        ("motion_causal", ["--guidance-scale", "3"], "motion_causal takes no --guidance-scale"),
        ("motion_causal", ["--policy", "slide"], "unknown cache policy 'slide'; pass one of full"),
        ("motion_causal", ["--policy", "slidin:window=3"], "rolling. Did you mean sliding?"),
        ("motion_causal", ["--compare"], "there is no plain decoding to compare it with"),
        ("motion", ["--policy", "full"], "motion takes no --policy; leave it out"),
    ],
)
def test_what_a_model_of_clips_has_no_use_of_is_refused(model, arguments, message, tmp_path, capsys):
    assert generate(model, tmp_path, PROMPT, "--format", "gif", *arguments) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_more_frames_than_the_grid_has_are_refused(model, tmp_path, capsys):
    assert generate(model, tmp_path, PROMPT, "--frames", "4", "--format", "gif") == 2
    assert "num_frames=4; pass an integer from 1 to 3" in capsys.readouterr().err
    assert generate(model, tmp_path, PROMPT, "--format", "ogg") == 2
    assert "cannot write 'ogg'; pass one of mp4, gif, png" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
