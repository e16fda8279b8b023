"""The embedded `shapes_distilled`: it shares parts, and draws what its prompts ask for in one call or two."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.tiny import quiet, seeded
from visual_spec import cli
from visual_spec.data.shapes import held_out_prompts
from visual_spec.data.shapes_parser import score
from visual_spec.pipelines.distilled_image import DistilledTextImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler

NAME, PROMPT = "shapes_distilled", "a large red circle on a plain sky background"


def load(name: str = NAME) -> Any:
    return quiet(load_pipeline(name))


def attributes(prompts: list[str], images: Any) -> float:
    """The share of what prompts ask for that a parser finds in pictures."""
    found = [score(prompt, np.asarray(image)) for prompt, image in zip(prompts, images, strict=True)]
    return float(np.mean([np.mean(list(one.values())) for one in found]))


@pytest.mark.slow
def test_one_call_and_two_show_more_of_their_own_prompts_than_of_others():
    pipe, prompts = load(), held_out_prompts(24, seed=17)
    assert type(pipe) is DistilledTextImagePipeline and pipe.facts.calls == ("distilled",)
    others = prompts[1:] + prompts[:1]
    for steps in (1, 2):
        pipe.sampler = make_sampler("distilled", steps=steps)
        found = pipe(prompts, generator=seeded(*range(24)))
        assert (found.trace.target_calls == steps).all() and found.trace.output_law == "lossy"
        assert attributes(prompts, found.images) > attributes(others, found.images) + 0.15
    alone = pipe(prompts[3], generator=seeded(3))
    assert torch.allclose(alone.tokens[0], found.tokens[3])


def test_the_command_line_draws_with_it_and_with_its_teacher(tmp_path, capsys):
    own = ["generate", PROMPT, "--model", NAME, "--out", str(tmp_path / "own"), "--json"]
    assert cli.main(own) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sampler"]["name"] == "distilled"
    taught = ["--sampler", "distilled:steps=2,teacher_from=120", "--out", str(tmp_path / "taught"), "--json"]
    assert cli.main([*own[:4], *taught]) == 0
    drawn = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert drawn["images"][0]["calls"] > 2
