"""The embedded `shapes_nar`: it shares parts, draws its prompts in 31 calls, and drafts whole pictures for `shapes`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.helpers.tiny import quiet, seeded
from visual_spec import cli
from visual_spec.data.shapes import held_out_prompts
from visual_spec.pipelines.loading import load_drafter, load_pipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

NAME, PROMPT = "shapes_nar", "a large red circle on a plain sky background"


def load(name: str = NAME) -> Any:
    return quiet(load_pipeline(name))


@pytest.mark.slow
def test_its_pictures_draft_for_shapes_which_keeps_its_tokens():
    pipe, prompts = load("shapes"), held_out_prompts(1, seed=19)

    def draw(sampler: Any) -> Any:
        pipe.sampler = sampler
        return pipe(prompts, generator=seeded(0), output_type="latent")

    plain, repaired = draw(AutoregressiveSampler()), draw(SpeculativeJacobiSampler(64))
    pipe.drafter = load_drafter(NAME)
    fast = draw(SpeculativeJacobiSampler(64, drafts="pictured"))
    assert torch.equal(fast.tokens, plain.tokens)
    assert fast.trace.target_calls.sum() < repaired.trace.target_calls.sum()


@pytest.mark.slow
def test_the_command_line_draws_with_it_and_drafts_with_it(tmp_path, capsys):
    own = ["generate", PROMPT, "--model", NAME, "--out", str(tmp_path / "own"), "--json"]
    assert cli.main(own) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sampler"]["name"] == "ordered"
    drafted = ["generate", PROMPT, "--sampler", "speculative-jacobi:drafts=pictured", "--drafter", NAME]
    assert cli.main([*drafted, "--compare", "--out", str(tmp_path / "both"), "--seed", "3"]) == 0


def test_raster_samplers_refuse_it():
    pipe = load()
    pipe.sampler = SpeculativeJacobiSampler(8)
    with pytest.raises(ValueError, match="trained for order 'flashar', .* Use OrderedSampler"):
        pipe(PROMPT)
