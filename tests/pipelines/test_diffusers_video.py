"""A Wan of diffusers, accelerated: clips of a pipeline, of modular blocks and of a transformer, and the way back."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.wan.modular_blocks_wan import WanBlocks
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from PIL import Image

import visual_spec
from tests.helpers.diffusers_video import SMALL, tiny_pipeline
from tests.helpers.refusals import refuses
from tests.helpers.tiny_wan import prompts, tiny_wan
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import DeepForcing, Full, HeadBudgets, Sliding
from visual_spec.pipelines.modular_video import CausalWanDenoiseStep
from visual_spec.samplers.continuous.chunks import ChunkWiseSampler
from visual_spec.samplers.core.law import TokenLaw


def seeded():
    return torch.Generator().manual_seed(0)


def test_a_pipeline_draws_clips_and_goes_back():
    pipe = tiny_pipeline()
    processors = [block.attn1.processor for block in pipe.transformer.blocks]
    plain = pipe(prompt_embeds=prompts(1).float(), guidance_scale=1.0, num_inference_steps=2, output_type="latent",
                 generator=seeded(), **SMALL).frames  # fmt: skip
    attributes = set(pipe.__dict__), set(pipe.transformer.__dict__)
    assert visual_spec.accelerate(pipe, "sink-window:sink=1,window=6") is pipe
    embeds = prompts(1).float()
    latents = pipe.generate_video(
        prompt_embeds=embeds, generator=seeded(), output_type="latent", **SMALL
    ).frames
    model = CausalWan(tiny_wan().float(), Full())  # 3 latent frames are one chunk, under any policy
    request: dict = dict(law=TokenLaw(), generator=seeded(), batch_size=len(embeds))
    wanted = ChunkWiseSampler()(model, embeds, num_frames=3, height=4, width=4, **request).tokens
    assert torch.equal(latents, wanted)
    assert pipe.transformer.last_trace.target_calls.tolist() == [5]
    assert "1 clips of 1 chunks, 5 calls" in visual_spec.summary(pipe)
    # The pipeline's own call is what it was, and `restore` leaves no trace.
    for _ in range(2):
        again = pipe(prompt_embeds=embeds, guidance_scale=1.0, num_inference_steps=2, output_type="latent",
                     generator=seeded(), **SMALL).frames  # fmt: skip
        assert torch.equal(again, plain)
        assert visual_spec.restore(pipe) is pipe
    assert all(b.attn1.processor is p for b, p in zip(pipe.transformer.blocks, processors, strict=True))
    assert (set(pipe.__dict__), set(pipe.transformer.__dict__)) == attributes
    assert "not accelerated" in visual_spec.summary(pipe.transformer)


def test_pixels_are_those_of_the_pipelines_decoder():
    """The end of the pipeline's own call, from the same latents."""
    pipe = visual_spec.accelerate(tiny_pipeline())
    request = dict(prompt_embeds=prompts(1).float(), **SMALL)
    latents = pipe.generate_video(generator=seeded(), output_type="latent", **request).frames
    several = pipe.generate_video(generator=seeded(), num_videos_per_prompt=2, **request).frames
    assert isinstance(several, np.ndarray) and several.shape == (2, 9, 32, 32, 3)
    assert np.abs(several[0] - several[1]).max() > 1e-3
    frames = pipe.generate_video(generator=seeded(), **request).frames

    class Finished(FlowMatchEulerDiscreteScheduler):
        def step(self, *args, **kwargs):
            return (latents,)

    pipe.scheduler = Finished()
    wanted = pipe(guidance_scale=1.0, num_inference_steps=1, **request).frames
    assert np.abs(frames - wanted).max() < 1e-6


def test_a_transformer_alone_is_accelerated_and_the_policy_swapped():
    model = tiny_wan()
    processors = [block.attn1.processor for block in model.blocks]
    options = dict(num_frames=12, height=4, width=4)
    found = []
    for policy in (
        None,
        "deep-forcing:sink=3,recent=4,budget=8,window=9",
        DeepForcing(3, 4, 8, 9),
        "sliding:window=6",
    ):
        assert visual_spec.accelerate(model, policy) is model
        found.append(model.generate_latents(prompts(1), generator=seeded(), **options))
    full, deep, same, sliding = found
    assert torch.equal(deep, same)
    assert torch.equal(deep[:, :, :9], full[:, :, :9])  # nothing is forgotten before frame 9
    assert not torch.equal(deep[:, :, 9:], full[:, :, 9:])
    assert torch.equal(sliding[:, :, :6], full[:, :, :6]) and not torch.equal(sliding, full)
    heads = visual_spec.accelerate(model, HeadBudgets((Sliding(6), Full())))
    assert heads.generate_latents(prompts(1), **options).isfinite().all()
    visual_spec.restore(model)
    assert all(block.attn1.processor is p for block, p in zip(model.blocks, processors, strict=True))


def test_a_drafter_is_an_accelerated_wan():
    model, small = visual_spec.accelerate(tiny_wan()), tiny_wan(1, num_layers=1)
    options = dict(num_frames=6, height=4, width=4, drafter=small, reward=lambda chunk, index: 1.0)
    refuses(TypeError, "WanTransformer3DModel.*Wan", model.generate_latents, prompts(1), **options)
    visual_spec.accelerate(small, "sliding:window=6")
    model.generate_latents(prompts(1), generator=seeded(), **options)
    assert model.last_trace.kept.tolist() == [[False, True]]
    assert "1 of 2 chunks drafted" in visual_spec.summary(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_frames=13), "num_frames=13.*3.*9, 21, 33.*12"),
        (dict(num_frames=10), "num_frames=10"),
        (dict(height=36), "height=36.*8"),
        (dict(height=40), "height=5.*2"),
        (dict(prompt="a cat"), "prompt.*prompt_embeds"),
        (dict(prompt_embeds=None), "Provide either"),
    ],
)
def test_clips_that_cannot_be_drawn_are_refused_before_any_call(changes, message, monkeypatch):
    pipe = visual_spec.accelerate(tiny_pipeline())
    monkeypatch.setattr(CausalWan, "forward", lambda *args, **kwargs: pytest.fail("the model was called"))
    request = {"prompt_embeds": prompts(1).float(), **SMALL, **changes}
    refuses(ValueError, message, pipe.generate_video, **request)


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("deepest", ValueError, "unknown.*'deepest'"),
        ("sliding:sink=3", ValueError, "sliding.*setting sink"),
        ("full:window=3", ValueError, "full.*setting window"),
        (visual_spec.AutoregressiveSampler(), TypeError, "AutoregressiveSampler"),
        (HeadBudgets((Full(),)), ValueError, "1 policies.*2"),
    ],
)
def test_policies_that_are_none_are_refused_and_change_nothing(policy, error, message):
    model = tiny_wan()
    before = [block.attn1.processor for block in model.blocks], set(model.__dict__)
    refuses(error, message, visual_spec.accelerate, model, policy)
    assert ([block.attn1.processor for block in model.blocks], set(model.__dict__)) == before


def test_pipelines_of_two_transformers_are_refused():
    with pytest.raises(ValueError, match="two transformers"):
        visual_spec.accelerate(tiny_pipeline(transformer_2=tiny_wan().float(), boundary_ratio=0.9))


def modular(pipe: Any) -> Any:
    """Wan's own blocks without the text encoder, ours in place of the one that denoises, and the parts of `pipe`."""
    blocks = WanBlocks()
    blocks.sub_blocks.pop("text_encoder")
    blocks.sub_blocks["denoise"] = CausalWanDenoiseStep()
    built = blocks.init_pipeline()
    built.update_components(transformer=pipe.transformer, vae=pipe.vae)
    return built


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(chunk=1, steps=(1000, 500), first_steps=(1000, 750, 500, 250)),
        dict(shift=3.0, context=torch.randn(1, 4, 3, 4, 4, generator=torch.Generator().manual_seed(2))),
    ],
    ids=["usual", "one frame a chunk", "goes on"],
)
@pytest.mark.parametrize("cache", ["full", "sink-window:sink=1,window=6", "sliding:window=9,dtype=int8"])
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
    refuses(error, named, modular(pipe), **dict(prompt_embeds=prompts(1).float(), **SMALL) | asked)
    assert all(b.attn1.processor is p for b, p in zip(pipe.transformer.blocks, processors, strict=True))


def test_a_first_picture_and_shots_are_what_the_parts_make_of_them(monkeypatch):
    """The picture by the pipeline's own encoder, prompts by its own method: the latents of the sampler from both."""
    pipe = visual_spec.accelerate(tiny_pipeline(), "sink-window:sink=3,window=12,cut_gap=2")
    monkeypatch.setattr(
        pipe, "_get_t5_prompt_embeds", lambda prompt, num_videos_per_prompt=1, **more: torch.cat(
            [prompts(1, seed=len(text)).float() for text in prompt for _ in range(num_videos_per_prompt)]
        ),
    )  # fmt: skip
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    size = dict(num_frames=21, height=32, width=32)
    found = pipe.generate_video(
        "a", image=picture, cuts={1: "bcd"}, num_videos_per_prompt=2, generator=[seeded(), seeded()],
        output_type="latent", **size,
    ).frames  # fmt: skip
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    config, first = pipe.vae.config, pipe.vae.encode(pixels).latent_dist.mean.detach()
    mean, std = (
        torch.tensor(list(values)).view(1, -1, 1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    wanted = pipe.transformer.generate_latents(
        prompts(1, seed=1).float(), num_frames=6, height=4, width=4, generator=seeded(),
        start=(first - mean) / std, cuts={1: prompts(1, seed=3).float()},
    )  # fmt: skip
    assert found.shape == (2, 4, 6, 4, 4) and (found[:1] - wanted).abs().max() < 1e-5
    assert (found[0] - found[1]).abs().max() < 1e-5
