"""The embedded `motion_nar`: whole clips only, and painted drafts that keep the tokens of `motion`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.helpers.tiny import quiet, seeded
from visual_spec import cli
from visual_spec.data.motion import held_out_prompts
from visual_spec.pipelines.loading import load_drafter, load_pipeline
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

NAME = "motion_nar"


@pytest.mark.slow
def test_its_clips_draft_for_motion_which_keeps_its_tokens():
    pipe, prompt = quiet(load_pipeline("motion")), held_out_prompts(1, seed=19)

    def draw(sampler: Any) -> Any:
        pipe.sampler = sampler
        return pipe(prompt, generator=seeded(0), output_type="latent")

    copied = draw(SpeculativeJacobiSampler(128, initial_draft="previous_frame"))
    pipe.drafter = load_drafter(NAME)
    painted = draw(SpeculativeJacobiSampler(256, drafts="pictured"))
    assert torch.equal(painted.tokens, copied.tokens) and int(painted.trace.target_calls[0]) < 256


def test_the_command_line_draws_whole_clips_with_it(tmp_path, capsys):
    prompt = held_out_prompts(1, seed=3)[0]
    own = ["generate", prompt, "--model", NAME, "--format", "gif", "--out", str(tmp_path), "--json"]
    assert cli.main(own) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["sampler"]["name"] == "ordered" and document["videos"][0]["calls"] == 30
    with pytest.raises(ValueError, match="num_frames=4.* 16"):
        quiet(load_pipeline(NAME))(prompt, num_frames=4)
