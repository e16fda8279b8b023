"""The embedded model `shapes`: it loads offline, reconstructs, draws what is asked, and decodes exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tiny import quiet, seeded
from visual_spec.data.shapes import held_out_prompts, sample_dataset
from visual_spec.data.shapes_parser import prompt_accuracy, score
from visual_spec.pipelines.embedded import embedded_folder, embedded_models
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pipe() -> ImagePipeline:
    return quiet(ImagePipeline.from_pretrained("shapes"))


def test_embedded_model_computes_in_float32_and_fits_the_package(pipe):
    assert "shapes" in embedded_models()
    assert pipe.dtype == torch.float32  # stored in half precision
    files = embedded_folder("shapes").rglob("*.safetensors")
    assert sum(path.stat().st_size for path in files) < 40 * 2**20


def test_tokenizer_reconstructs_held_out_pictures_as_recorded(pipe):
    scenes, pictures = sample_dataset(24, 4321, held_out=True)
    signed = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        output = pipe.vq_model(signed)
    psnr = (10 * torch.log10(4 / (output - signed).square().mean((1, 2, 3)))).mean()
    record = json.loads((embedded_folder("shapes") / "vq_model" / "training.json").read_text())
    assert abs(psnr - record["psnr_db"]) < 1.5  # 24 pictures against the record's 200


def test_identical_mode_draws_the_autoregressive_pictures_of_the_trained_model(pipe):
    prompts = held_out_prompts(2, seed=11)
    # No near-ties to make allowances for.
    double = quiet(ImagePipeline.from_pretrained("shapes").to(torch.float64))
    double.sampler = AutoregressiveSampler()
    plain = double(prompts, generator=seeded(1, 2), output_type="pt")
    double.sampler = SpeculativeJacobiSampler(window=32)
    fast = double(prompts, generator=seeded(1, 2), output_type="pt")
    assert torch.equal(plain.tokens, fast.tokens) and torch.equal(plain.images, fast.images)
    assert (fast.trace.target_calls < 256 / 2).all()


def test_tokens_per_call_without_guidance_reach_what_the_readme_promises(pipe):
    prompts = held_out_prompts(8, seed=12)
    for window, least in ((32, 2.5), (64, 3.0)):
        pipe.sampler = SpeculativeJacobiSampler(window=window)
        out = pipe(prompts, guidance_scale=1.0, generator=seeded(*range(8)), output_type="latent")
        assert 8 * 256 / out.trace.target_calls.sum() >= least


def test_pictures_show_their_own_prompt_rather_than_another(pipe):
    prompts = held_out_prompts(16, seed=13)
    pipe.sampler = SpeculativeJacobiSampler(window=16)
    images = pipe(prompts, generator=seeded(*range(16))).images
    own = [prompt_accuracy(score(p, image)) for p, image in zip(prompts, images, strict=True)]
    other = [
        prompt_accuracy(score(p, image)) for p, image in zip(prompts, images[1:] + images[:1], strict=True)
    ]
    assert np.mean(own) > np.mean(other) + 0.1


@pytest.mark.slow
def test_prompt_accuracy_over_200_held_out_prompts_is_the_recorded_one(pipe):
    """The first 200 of the 2,000 prompts of `shapes-law.json`, with the same seeds."""
    record = json.loads((ROOT / "benchmarks" / "results" / "shapes-law.json").read_text())
    first, own = record["first prompt"], record["rows"][0]["mean_attribute"]["value"]
    prompts = held_out_prompts(first + 200)[first:]
    pipe.sampler = AutoregressiveSampler()
    accuracies = []
    for start in range(0, len(prompts), 25):
        part = prompts[start : start + 25]
        images = pipe(part, generator=seeded(*range(first + start, first + start + 25))).images
        accuracies += [prompt_accuracy(score(p, image)) for p, image in zip(part, images, strict=True)]
    assert abs(np.mean(accuracies) - own) < 0.03
