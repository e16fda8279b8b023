"""Class pictures from continuous tokens: what the sampler draws, decoded; saved and loaded; refused by name."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import visual_spec
from tests.helpers.continuous_image import generators, tiny_model, tiny_vae
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.samplers.core.law import TokenLaw

NAMES = ["red circle", "blue square", "green star"]


def tiny_pipeline(kind="mar", *, drafter=False, sampler="continuous", **settings) -> Any:
    pipe = ContinuousImagePipeline(
        transformer=tiny_model(kind),
        vae=tiny_vae(),
        sampler=make_sampler(sampler, **settings),
        id2label=NAMES,
        default_guidance_scale=2.0,
        drafter=tiny_model(kind, dim=8, seed=1) if drafter else None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("kind", ["mar", "causal"])
def test_pictures_are_the_decoded_tokens_of_the_sampler(kind):
    pipe = tiny_pipeline(kind)
    found = pipe(["blue square", 0], generator=generators(3, 4), output_type="np")
    tokens = pipe.sampler(
        pipe.transformer,
        torch.tensor([1, 0]),
        law=TokenLaw(guidance_scale=2.0),
        generator=generators(3, 4),
        batch_size=2,
    ).tokens
    assert torch.equal(found.tokens, tokens) and tokens.shape == (2, 16, 3)
    latents = tokens.mT.reshape(2, 3, 4, 4) / pipe.vae.config["scaling_factor"]
    with torch.no_grad():
        pixels = (pipe.vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
    assert np.allclose(found.images, pixels.permute(0, 2, 3, 1).numpy(), atol=1e-6)
    assert found.trace.head_calls.tolist() == [16 * 5] * 2
    canvas = pipe(["blue square", 0], generator=generators(3, 4), output_type="latent").images
    assert torch.equal(canvas, tokens.mT.reshape(2, 3, 4, 4))
    assert np.allclose(pipe.decode_canvas(canvas, "np"), found.images)
    assert pipe.facts.stored_as == "canvas" and pipe.image_size == (16, 16)


def test_pictures_are_encoded_as_they_are_decoded():
    pipe = tiny_pipeline()
    pictures = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        expected = pipe.vae.encode(pictures).latent_dist.mean * pipe.vae.config["scaling_factor"]
    assert torch.equal(pipe.encode_canvas(pictures), expected)


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="3 numbers.*2"):
        ContinuousImagePipeline(tiny_model("mar"), tiny_vae(2), make_sampler("continuous"))
    with pytest.raises(ValueError, match="2.*3 classes"):
        ContinuousImagePipeline(tiny_model("mar"), tiny_vae(), make_sampler("continuous"), id2label=NAMES[:2])
    pipe = tiny_pipeline()
    refuses(ValueError, "top_k=5", pipe, "red circle", top_k=5)
    pipe.sampler = make_sampler("speculative-continuous", rule="chain", final_noise=0.1)
    refuses(ValueError, "drafter", pipe, "red circle")


@pytest.mark.parametrize("kind", ["mar", "causal"])
def test_accelerate_neither_slows_nor_changes_pictures(kind):
    """Head speculation took 1.7 to 2.5 times as long, and drew others."""
    pipe = tiny_pipeline(kind)
    before = pipe.sampler
    with pytest.warns(
        UserWarning, match="keeps its ContinuousSampler.*accelerate\\(pipe, 'continuous:head_steps=25'"
    ):
        assert visual_spec.accelerate(pipe) is pipe
    assert pipe.sampler is before and visual_spec.restore(pipe).sampler is before
    assert visual_spec.accelerate(pipe, "continuous:head_steps=3").sampler.config["head_steps"] == 3
    assert visual_spec.restore(pipe).sampler is before
    pipe = tiny_pipeline(kind, sampler="head-speculation", levels=4)  # chosen by the user
    chosen = pipe.sampler
    with pytest.warns(UserWarning, match="keeps its HeadSpeculativeSampler"):
        assert visual_spec.accelerate(pipe).sampler is chosen


def test_levels_of_a_chain_are_scored_side_by_side():
    pipe = tiny_pipeline("causal", sampler="head-speculation", levels=4)
    trace = pipe("red circle", generator=generators(0), output_type="latent").trace
    assert trace.head_calls.item() < 16 * 5 and trace.output_law == "lossless"


@pytest.mark.parametrize("written", ["LatentImagePipeline", ["pipeline", "LatentImagePipeline"]])
def test_folders_and_programs_with_the_former_names_go_on(tmp_path, written):
    pipe = tiny_pipeline("causal")
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index |= {
        "_class_name": written,
        "transformer": ["visual_spec.models.continuous.causal", "CausalLatentTransformer"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    former = visual_spec.LatentImagePipeline
    assert former is ContinuousImagePipeline
    for load in (load_pipeline, former.from_pretrained):
        loaded = quiet(load(tmp_path))
        assert type(loaded) is former and type(loaded.transformer) is type(pipe.transformer)
        weights = loaded.transformer.state_dict()
        assert all(
            torch.equal(weights[name], weight) for name, weight in pipe.transformer.state_dict().items()
        )
