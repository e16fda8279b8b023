"""Training of `motion_causal`: its frames, the weights of places, the loss against whole passes, resuming, 8 bits."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from scripts.train import causal_video
from scripts.train.causal_video import (
    CausalVideoTraining,
    chunk_losses,
    draw_clips,
    place_weights,
    small_frames,
)
from tests.helpers.training import check_training
from visual_spec.data.motion import Clip, MovingShape, caption, render
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import Full

STAR = Clip((MovingShape("star", "red", "small", 16, 16, "right", "quickly", "bounces"),), "sky", "plain")
SMALL = CausalVideoTraining(batch_size=2, chunk=2, chunks=3, cut_share=0.5)


def tiny() -> tuple[Any, CaptionEncoder]:
    torch.manual_seed(3)
    model, encoder = causal_video.new_model(24, 2, 2)
    with torch.no_grad():  # what starts at zero says something, too
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return model, encoder


def test_small_frames_are_means_of_the_painted_ones_from_any_frame_on():
    painted = torch.from_numpy(render(STAR, 9)[5:]).double().movedim(-1, 0) / 127.5 - 1  # [3, 4, 64, 64]
    means = painted.unflatten(2, (16, 4)).unflatten(4, (16, 4)).mean((3, 5))
    assert (small_frames(STAR, 5, 4).double() - means).abs().max() < 1e-6


def test_weights_look_only_at_what_the_model_has_seen():
    clip = small_frames(STAR, 0, 3)[None]  # the star's centre is at 16, 24, 32 pixels, 4 of them a place
    weights = place_weights(clip, 5.0)[0]
    assert (weights[0] == 5).all()
    seen = (clip[0, :, 0] - clip[0, :, 0, 15:, 15:]).abs().amax(0) > 0.1
    for y, x in torch.cartesian_prod(torch.arange(16), torch.arange(16)).tolist():
        near = seen[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3].any()  # a step is two places
        assert weights[1, y, x] == (5 if near else 1)
    changed = clip.clone()
    changed[:, :, 1, 4:12, 4:12] = 0.9
    assert torch.equal(place_weights(changed, 5.0)[0, 1], weights[1])


def test_clips_have_one_shape_on_a_plain_ground_and_come_again():
    settings = CausalVideoTraining(batch_size=40)
    prompts, latents, cut = draw_clips(7, settings)
    assert latents.shape == (40, 3, 8, 16, 16) and 5 < cut.sum() < 28
    assert all("plain" in text and "past" not in text for text in prompts)
    again = draw_clips(7, settings)
    assert again[0] == prompts and torch.equal(again[1], latents)
    assert draw_clips(8, settings)[0] != prompts
    assert causal_video.new_model(24, 1, 2)[1].unknown_words(prompts) == []


def test_the_loss_is_that_of_whole_passes_under_a_mask():
    """Chunk after chunk through the cache, against the untouched model that sees clean frames and the noisy chunk."""
    model, encoder = tiny()
    model, embeds = model.double(), encoder.double()([caption(STAR)] * 2).features.detach()
    prompts, latents, _ = draw_clips(0, SMALL)
    latents = latents.double()
    cut = torch.tensor([True, False])
    causal = CausalWan(model, Full())
    with torch.no_grad():
        losses = chunk_losses(causal, embeds, latents, cut, SMALL, torch.Generator().manual_seed(4))
    causal.release()

    generator = torch.Generator().manual_seed(4)
    weights, history = place_weights(latents, SMALL.near_weight), []
    for index in range(3):
        clean, weight = latents[:, :, 2 * index : 2 * index + 2], weights[:, 2 * index : 2 * index + 2]
        share = torch.rand(2, 1, 1, 1, 1, generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        level = 3 * share / (1 + 2 * share)
        given = torch.cat([*history, (1 - level) * clean + level * noise], 2)
        times = torch.zeros(2, 2 * index + 2)
        times[:, -2:] = 1000 * level.flatten()[:, None]
        flow = block_causal_pass(model, given, times, embeds)[:, :, -2:]
        squares = (flow - (noise - clean)).square().mean(1)
        each = [float((squares[row] * weight[row]).sum() / weight[row].sum()) for row in (0, 1)]
        # The first chunk of a cut is not learned.
        wanted = each[1] if index == 0 else sum(each) / 2
        assert losses[index].item() == pytest.approx(wanted, rel=1e-9)
        if index < 2:
            amount = torch.rand(2, 1, 1, 1, 1, generator=generator)
            history.append(
                clean + SMALL.history_noise * amount * torch.randn(clean.shape, generator=generator)
            )


def block_causal_pass(model, latents, timesteps, embeds):
    """One pass over all frames [B, 3, T, 16, 16], timesteps [B, T]; frames see their chunk of two and those before."""
    frames = torch.arange(latents.shape[2])
    mask = (frames[None] // 2 <= frames[:, None] // 2).repeat_interleave(16, 0).repeat_interleave(16, 1)
    hooks = [
        block.attn1.register_forward_pre_hook(lambda module, args: (args[0], args[1], mask, args[3]))
        for block in model.blocks
    ]
    with torch.no_grad():
        flow = model(latents, timesteps.repeat_interleave(16, 1), embeds, return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    return flow


def test_training_resumes_with_the_same_weights_and_stores_eight_bits(tmp_path):
    settings = CausalVideoTraining(steps=4, batch_size=2, chunk=2, chunks=2)

    def train(out, every):
        model, encoder = tiny()
        before = model.blocks[0].attn1.processor
        record = causal_video.train_causal_video(model, encoder, settings, out, every=every)
        assert model.blocks[0].attn1.processor is before
        return record, model, encoder

    saved = {"transformer": WanTransformer3DModel, "text_encoder": CaptionEncoder}
    record = check_training(tmp_path, train, 2, every=2, saved=saved)
    assert len(record["held_out_loss_by_chunk"]) == 2
    model: Any = WanTransformer3DModel.from_pretrained(tmp_path / "whole" / "transformer")
    for value in model.state_dict().values():
        assert value.ndim != 2 or torch.equal(value.float(), value.to(torch.float8_e4m3fn).float())
