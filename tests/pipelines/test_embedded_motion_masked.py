"""The embedded `motion_masked`: loaded by name, small, and what the parser reads in its clips."""

import json
from typing import Any

import pytest

from tests.helpers.tiny import quiet, seeded
from visual_spec import cli
from visual_spec.data.motion import held_out_prompts
from visual_spec.pipelines.embedded import describe, embedded_folder
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.masked.frames import FrameMaskedSampler

NAME = "motion_masked"


@pytest.fixture(scope="module")
def pipe() -> Any:
    return quiet(load_pipeline(NAME))


def test_its_sampler_hides_as_much_as_in_its_training(pipe):
    folder = embedded_folder(NAME)
    assert describe(folder)["image_size"] == 64
    record = json.loads((folder / "transformer" / "training.json").read_text())
    assert pipe.sampler.config.history_hidden == record["settings"]["least_hidden"]


def test_its_first_frames_are_drawn_alone(pipe):
    prompts = held_out_prompts(2, seed=5)
    sampler, pipe.sampler = pipe.sampler, FrameMaskedSampler(2, 0.3)
    found = pipe(prompts, num_frames=3, generator=seeded(0, 1), output_type="latent")
    alone = pipe(prompts[1], num_frames=3, generator=seeded(1), output_type="latent")
    pipe.sampler = sampler
    assert (found.trace.target_calls == 8).all()
    same = (found.tokens[1] == alone.tokens[0]).float().mean()
    assert same > 0.95  # products of other widths round differently, and a near-tie may flip


def test_the_command_line_draws_with_it(tmp_path, capsys):
    prompt = held_out_prompts(1, seed=3)[0]
    arguments = ["generate", prompt, "--model", NAME, "--format", "gif", "--frames", "2", "--device", "cpu"]
    assert cli.main([*arguments, "--out", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["sampler"]["name"] == "frame-masked" and document["videos"][0]["calls"] == 9
