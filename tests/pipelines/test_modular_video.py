"""The block of a causal Wan in diffusers' modular pipeline: clips of an accelerated `WanPipeline`."""

from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.wan.modular_blocks_wan import WanBlocks

import visual_spec
from tests.helpers.diffusers_video import SMALL, tiny_pipeline
from tests.helpers.tiny_wan import prompts
from visual_spec.pipelines.modular_video import CausalWanDenoiseStep


def modular(pipe: Any) -> Any:
    """Wan's own blocks without the text encoder, ours in place of the one that denoises, and the parts of `pipe`."""
    blocks = WanBlocks()
    blocks.sub_blocks.pop("text_encoder")
    blocks.sub_blocks["denoise"] = CausalWanDenoiseStep()
    built = blocks.init_pipeline()
    built.update_components(transformer=pipe.transformer, vae=pipe.vae)
    return built


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(chunk=1, steps=(1000, 500), first_steps=(1000, 750, 500, 250)),
        dict(shift=3.0, context=torch.randn(1, 4, 3, 4, 4, generator=torch.Generator().manual_seed(2))),
    ],
    ids=["usual", "one frame a chunk", "goes on"],
)
@pytest.mark.parametrize("cache", ["full", "sink-window:sink=1,window=6"])
def test_clips_are_those_of_an_accelerated_pipeline(cache, options):
    pipe, size = tiny_pipeline(), SMALL | dict(num_frames=33)
    request: dict[str, Any] = dict(
        prompt_embeds=prompts(1).float(), num_videos_per_prompt=2, **size, **options
    )
    visual_spec.accelerate(pipe, cache)
    latents = pipe.generate_video(generator=seeded(), output_type="latent", **request).frames
    pixels = pipe.generate_video(generator=seeded(), output_type="pt", **request).frames
    calls = pipe.transformer.last_trace.target_calls.tolist()
    visual_spec.restore(pipe)
    processors = [block.attn1.processor for block in pipe.transformer.blocks]
    state = modular(pipe)(generator=seeded(), cache=cache, output_type="pt", **request)
    assert torch.equal(state.get("latents"), latents) and torch.equal(state.get("videos"), pixels)
    assert state.get("causal_trace").target_calls.tolist() == calls
    assert all(b.attn1.processor is p for b, p in zip(pipe.transformer.blocks, processors, strict=True))


@pytest.mark.parametrize(
    ("asked", "error", "named"),
    [
        (dict(cache="endless"), ValueError, "'endless'"),
        (dict(cache=3), TypeError, "int"),
        (dict(num_frames=12), ValueError, "num_frames=12"),
        (dict(height=30), ValueError, "height=30"),
        (dict(first_steps=(100, 900)), ValueError, r"first_steps=\(100, 900\)"),
        (dict(context=torch.zeros(1, 4, 3, 2, 2)), ValueError, r"context is \[1, 4, 3, 2, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_transformer_as_it_was(asked, error, named):
    pipe = tiny_pipeline()
    processors = [block.attn1.processor for block in pipe.transformer.blocks]
    with pytest.raises(error, match=named):
        modular(pipe)(**dict(prompt_embeds=prompts(1).float(), **SMALL) | asked)
    assert all(b.attn1.processor is p for b, p in zip(pipe.transformer.blocks, processors, strict=True))
