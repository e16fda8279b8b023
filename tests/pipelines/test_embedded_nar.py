"""The embedded `shapes_nar`: it shares parts, draws its prompts in 31 calls, and drafts whole pictures for `shapes`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import seeded
from visual_spec import cli
from visual_spec.data.shapes import held_out_prompts
from visual_spec.data.shapes_parser import score
from visual_spec.models.core.calls import OWN_ORDER, RASTER_TREE_ORDER
from visual_spec.pipelines.embedded import describe, embedded_folder, shared_parts
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.loading import load_drafter, load_pipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

NAME, PROMPT = "shapes_nar", "a large red circle on a plain sky background"


def load(name: str = NAME) -> Any:
    pipe = load_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_it_draws_its_prompts_in_31_calls():
    pipe, prompts = load(), held_out_prompts(8, seed=17)
    assert isinstance(pipe, ImagePipeline) and pipe.facts.calls == ("own order",)
    found = pipe(prompts, generator=seeded(*range(8)))
    assert (found.trace.target_calls == 31).all() and found.trace.lossless
    hits = [score(prompt, np.asarray(image)) for prompt, image in zip(prompts, found.images, strict=True)]
    assert float(np.mean([np.mean(list(hit.values())) for hit in hits])) > 0.6
    alone = pipe(prompts[3], generator=seeded(3))
    assert torch.equal(alone.tokens[0], found.tokens[3])


def test_its_pictures_draft_for_shapes_which_keeps_its_tokens():
    pipe, prompts = load("shapes"), held_out_prompts(2, seed=19)

    def draw(sampler: Any) -> Any:
        pipe.sampler = sampler
        return pipe(prompts, generator=seeded(0, 1), output_type="latent")

    plain, repaired = draw(AutoregressiveSampler()), draw(SpeculativeJacobiSampler(64))
    pipe.drafter = load_drafter(NAME)
    fast = draw(SpeculativeJacobiSampler(64, drafts="pictured"))
    assert torch.equal(fast.tokens, plain.tokens)
    assert fast.trace.target_calls.sum() < repaired.trace.target_calls.sum()


def test_it_shares_parts_and_is_small():
    assert shared_parts(embedded_folder(NAME)) == {"vq_model": "shapes", "text_encoder": "shapes"}
    pipe, other = load(), load("shapes")
    for part in ("vq_model", "text_encoder"):
        one, two = (getattr(each, part).state_dict() for each in (pipe, other))
        assert all(torch.equal(one[key], two[key]) for key in one | two)
    weights = embedded_folder(NAME) / "transformer" / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_size < 4e6
    assert describe(embedded_folder(NAME))["calls"] == (OWN_ORDER,)
    assert describe(embedded_folder("shapes"))["calls"] == RASTER_TREE_ORDER


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
