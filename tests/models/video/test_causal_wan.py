"""Wan made causal from outside, against whole-sequence passes of the untouched model under a mask."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tiny_wan import clips, prompts, tiny_wan
from visual_spec.models.video.causal_wan import CausalWan, Rotary
from visual_spec.models.video.frame_cache import (
    DeepForcing,
    FrameCache,
    Full,
    FutureAnchor,
    HeadBudgets,
    SinkWindow,
    Sliding,
)

CHUNK, TOKENS = 3, 4  # frames of a chunk; tokens of a frame of 4 x 4 latent pixels


def masked_pass(model, latents, timesteps, embeds, seen):
    """The flow of one pass over all frames, the model untouched but for a mask.

    Args:
        timesteps: one a frame. seen: bool [frames, frames], which frame sees which.
    """
    frames = latents.shape[2]
    mask = seen.repeat_interleave(TOKENS, 0).repeat_interleave(TOKENS, 1)
    hooks = [
        block.attn1.register_forward_pre_hook(lambda module, args: (args[0], args[1], mask, args[3]))
        for block in model.blocks
    ]
    each = torch.tensor(timesteps).repeat_interleave(TOKENS).expand(len(latents), -1)
    with torch.no_grad():
        flow = model(latents, each, embeds, return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    assert flow.shape[2] == frames
    return flow


def block_causal(frames, window=None, sink=0):
    """bool [frames, frames]: whole chunks, those before, at most `window` frames and the sink."""
    row, column = torch.arange(frames)[:, None], torch.arange(frames)[None]
    end = (row // CHUNK + 1) * CHUNK
    near = column >= end - (window or frames)
    return (column < end) & (near | (column < sink))


def chunk_by_chunk(causal, latents, timesteps, embeds):
    """The flow of every chunk as a rollout reads it: noisy at its timestep, the clean ones of before in the cache.

    `latents` are the clean frames, and those of the last chunk noisy at its timestep.
    """
    state = causal.begin(embeds, 4, 4, latents.shape[2])
    flows = []
    with torch.no_grad():
        for piece, timestep in zip(latents.split(CHUNK, 2), timesteps[::CHUNK], strict=True):
            # At timestep 0 the call that writes the cache is the call itself.
            flows.append(causal.forward(state, piece, timestep, commit=True))
    return torch.cat(flows, 2)


@pytest.mark.parametrize("policy", [Full(), Sliding(9), SinkWindow(3, 9), SinkWindow(2, 7)])
def test_chunks_equal_one_pass_under_a_mask(policy):
    model, latents, embeds = tiny_wan(), clips(2, 15), prompts(2)
    timesteps = [0.0] * 12 + [625.0] * 3
    sink = getattr(policy, "sink", 0)
    window = None if policy == Full() else policy.window - sink
    plain = masked_pass(model, latents, timesteps, embeds, block_causal(15, window, sink))
    causal = CausalWan(model, policy)
    assert (chunk_by_chunk(causal, latents, timesteps, embeds) - plain).abs().max() < 1e-12
    causal.release()
    everything = masked_pass(model, latents, timesteps, embeds, torch.ones(15, 15, dtype=torch.bool))
    assert (everything - plain).abs().max() > 1e-2  # the mask matters


@pytest.mark.parametrize(
    "policy",
    [Full(dtype="int8"), SinkWindow(2, 7, dtype="int8"), DeepForcing(2, 3, 6, 9, dtype="int8")],
    ids=str,
)
def test_a_cache_of_eight_bits_reads_what_was_rounded_once(policy, monkeypatch):
    """Beside a cache of 16 bits whose frames are rounded by hand before they are written."""
    model, latents, embeds = tiny_wan(), clips(2, 15), prompts(2)
    timesteps = [0.0] * 12 + [625.0] * 3
    found = chunk_by_chunk(CausalWan(model, policy), latents, timesteps, embeds)
    exact = chunk_by_chunk(CausalWan(model, replace(policy, dtype="model")), latents, timesteps, embeds)

    def rounded(states: Tensor) -> Tensor:
        step = states.abs().amax(-1, keepdim=True) / 127
        return (states / step).round() * step

    real = FrameCache.append
    monkeypatch.setattr(
        FrameCache, "append", lambda self, keys, values, at: real(self, rounded(keys), rounded(values), at)
    )
    by_hand = chunk_by_chunk(CausalWan(model, replace(policy, dtype="model")), latents, timesteps, embeds)
    assert (found - by_hand).abs().max() < 1e-12
    assert 0 < (found - exact).abs().max() < 0.05 * exact.abs().max()


def test_two_chunks_equal_a_block_causal_pass_and_later_steps_read_the_same():
    """The noisy chunk is read four times before it is written, and none of that leaves a trace."""
    model, latents, embeds = tiny_wan(), clips(1, 6), prompts(1)
    causal = CausalWan(model, Full())
    with torch.no_grad():
        state = causal.begin(embeds, 4, 4, 6)
        causal.commit(state, latents[:, :, :3])
        for timestep in (1000.0, 937.5, 625.0):
            flow = causal.forward(state, latents[:, :, 3:], timestep)
            plain = masked_pass_of(model, causal, latents, [0.0] * 3 + [timestep] * 3, embeds)
            assert (flow - plain[:, :, 3:]).abs().max() < 1e-12
    assert state.layers[0][0].cache.frames == 3


def masked_pass_of(model, causal, latents, timesteps, embeds):
    """As `masked_pass`, of a model whose processors are replaced: outside of calls they are the plain ones."""
    assert all(processor.call is None for processor in causal.processors)
    return masked_pass(model, latents, timesteps, embeds, block_causal(6))


def test_the_rotary_table_is_that_of_the_model():
    model = tiny_wan()
    cos, sin = model.rope(torch.zeros(1, 4, 5, 4, 6))  # frames 0 to 4, 2 x 3 tokens
    places = torch.cartesian_prod(torch.arange(5), torch.arange(2), torch.arange(3))[None]
    states = torch.randn(1, 30, 2, 12, dtype=torch.float64)
    pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.complex(cos[..., 0::2], sin[..., 0::2])
    found = Rotary(12, 5, torch.device("cpu"))(states, places)
    assert (found - torch.view_as_real(turned).flatten(-2)).abs().max() < 1e-15


def test_a_moved_sink_reads_as_if_its_rotated_keys_were_turned():
    model, latents, embeds = tiny_wan(), clips(1, 9), prompts(1)
    causal = CausalWan(model, SinkWindow(2, 6, sink_gap=0))
    state = causal.begin(embeds, 4, 4, 9)
    with torch.no_grad():
        causal.commit(state, latents[:, :, :3])
        causal.commit(state, latents[:, :, 3:6])
        cache = state.layers[0][0].cache
        before = state.rotary(cache.keys, cache.places)[:, : 2 * TOKENS]
        causal.forward(state, latents[:, :, 6:], 1000.0)
    assert cache.places[0, ::TOKENS, 0].tolist() == [3, 4, 5]  # frames 0 and 1 moved by 3, to end at frame 5
    after = state.rotary(cache.keys, cache.places)[:, : 2 * TOKENS]
    # A head of 12: frames turn channels 0 to 3, by frequencies 1 and 1 / 100.
    turn = torch.polar(torch.ones(2, dtype=torch.float64), 3 * torch.tensor([1.0, 0.01], dtype=torch.float64))
    in_time = torch.view_as_complex(before[..., :4].unflatten(-1, (-1, 2)).contiguous()) * turn
    assert (after[..., :4] - torch.view_as_real(in_time).flatten(-2)).abs().max() < 1e-6  # float32 tables
    assert torch.equal(after[..., 4:], before[..., 4:])


def test_heads_have_budgets_of_their_own():
    """Zeroing the output of the other head leaves the law of one head alone."""
    latents, embeds = clips(1, 12), prompts(1)
    for head, policy in enumerate((Sliding(6), Full())):
        flows = []
        for policies in (HeadBudgets((Sliding(6), Full())), policy):
            model = tiny_wan()
            with torch.no_grad():
                for block in model.blocks:
                    block.attn1.to_out[0].weight[:, 12 * (1 - head) : 12 * (2 - head)] = 0
            causal = CausalWan(model, policies)
            flows.append(chunk_by_chunk(causal, latents, [0.0] * 12, embeds))
        assert (flows[0] - flows[1]).abs().max() < 1e-12


def test_equal_budgets_share_a_cache():
    def groups(*policies):
        state = CausalWan(tiny_wan(), HeadBudgets(policies)).begin(prompts(1), 4, 4, 12)
        return [[group.heads.tolist() for group in layer] for layer in state.layers]

    assert groups(Sliding(6), Full()) == [[[0], [1]]] * 2
    assert groups(Sliding(6), Sliding(6)) == [[[0, 1]]] * 2


@pytest.mark.parametrize(
    "policy", [Full(), Sliding(9), DeepForcing(3, 4, 8, 9), FutureAnchor(window=9), SinkWindow(1, 7, 2)]
)
def test_released_processors_are_the_very_objects(policy):
    model = tiny_wan()
    before = [block.attn1.processor for block in model.blocks]
    plain = model(clips(1, 3), torch.tensor([500.0]), prompts(1), return_dict=False)[0]
    causal = CausalWan(model, policy)
    inside = model(clips(1, 3), torch.tensor([500.0]), prompts(1), return_dict=False)[0]
    assert torch.equal(inside, plain)  # outside of a rollout the model is what it was
    causal.release()
    assert all(block.attn1.processor is old for block, old in zip(model.blocks, before, strict=True))


def test_fused_projections_give_the_same():
    model, latents, embeds = tiny_wan(), clips(1, 6), prompts(1)
    causal = CausalWan(model, Full())
    plain = chunk_by_chunk(causal, latents, [0.0] * 6, embeds)
    for block in model.blocks:
        block.attn1.fuse_projections()
    assert (chunk_by_chunk(causal, latents, [0.0] * 6, embeds) - plain).abs().max() < 1e-12


def test_models_that_do_not_fit_are_refused():
    refuses(ValueError, r"pictures.*Wan 2\.1", CausalWan, tiny_wan(in_channels=8), Full())
    refuses(ValueError, "1 policies.*2", CausalWan, tiny_wan(), HeadBudgets((Full(),)))
    causal = CausalWan(tiny_wan(), Full())
    with pytest.raises(ValueError, match=r"prompt_embeds.*\[1, 3, 7\].*\[B, T, 8\]"):
        causal.check(prompts(1)[..., :7], 4, 4, 3)
    refuses(ValueError, "width=5.*2", causal.check, prompts(1), 4, 5, 3)
