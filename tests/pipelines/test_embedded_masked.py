"""The embedded `shapes_masked`, where its weights are in the package: it shares parts, and draws its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.tiny import quiet, seeded
from visual_spec.data.shapes import held_out_prompts
from visual_spec.data.shapes_parser import score
from visual_spec.pipelines.embedded import embedded_folder
from visual_spec.pipelines.masked_image import MaskedImagePipeline
from visual_spec.samplers.masked.masked import MaskedSampler

NAME = "shapes_masked"


def load() -> Any:
    return quiet(MaskedImagePipeline.from_pretrained(NAME))


def weights_of(part: str) -> Path:
    return embedded_folder(NAME) / part / "diffusion_pytorch_model.safetensors"


def right(prompts: list[str], images: Any) -> float:
    hits = [score(prompt, np.asarray(image)) for prompt, image in zip(prompts, images, strict=True)]
    return float(np.mean([np.mean(list(hit.values())) for hit in hits]))


def test_it_draws_into_a_picture():
    pipe, prompts = load(), held_out_prompts(2, seed=17)
    found = pipe(prompts[0], generator=seeded(0))
    mask = np.zeros((128, 128), dtype=bool)
    mask[:, 64:] = True
    painted = pipe(prompts[1], image=found.images[0], mask=mask, generator=seeded(5))
    pixels = torch.from_numpy(np.array(found.images[0])).permute(2, 0, 1)[None] / 127.5 - 1
    known = pipe.vq_model.encode_tokens(pixels)[0].view(16, 16)
    assert torch.equal(painted.tokens[0].view(16, 16)[:, :8], known[:, :8])


@pytest.mark.slow
def test_reuse_stays_near_the_model():
    pipe, prompts = load(), held_out_prompts(2, seed=18)
    settings = dict(pipe.sampler.config, steps=16, measure=True)
    moved = []
    for reuse in (0, 1):
        pipe.sampler = MaskedSampler.from_config(settings, reuse=reuse)
        trace = pipe(prompts, generator=seeded(0, 1), output_type="latent").trace
        moved.append(trace.divergence)
        assert trace.whole_calls < 16 or not reuse
    assert moved[0] > 0 and moved[1] < 3 * moved[0]


@pytest.mark.slow
def test_the_shortcut_stands_in_for_the_model_on_some_calls():
    pipe, prompts = load(), held_out_prompts(2, seed=18)
    settings: Any = dict(steps=12, schedule="arccos", clock="halton", score="halton", reuse_by="shortcut")
    moved = []
    for reuse in (0, 1):
        pipe.sampler = MaskedSampler(**settings, reuse=reuse, measure=True)
        found = pipe(prompts, generator=seeded(0, 1))
        moved.append(found.trace.divergence)
        assert found.trace.whole_calls == 12 - 3 * reuse
        assert right(prompts, found.images) > 0.6
    assert moved[0] > 0 and moved[1] < 3 * moved[0]
    assert weights_of("shortcut").stat().st_size < 0.6e6
