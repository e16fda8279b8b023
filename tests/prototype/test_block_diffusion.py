"""The sampler of blocks: the published loop written out, its calls, its ends, and what it refuses."""

from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from torch import Tensor

from tests.models.continuous.tiny import tiny_acdit
from visual_spec.prototype.acdit.sampler import BlockDiffusionSampler
from visual_spec.samplers.core.base import STOP
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHAIN, CounterNoise, draw_keys

LABELS = torch.tensor([1, 4])


def draw(sampler: Any, *, guidance: float = 1.8, **more: Any) -> Any:
    model = more.pop("model", None) or tiny_acdit().double()
    law = TokenLaw(guidance_scale=guidance, temperature=more.pop("temperature", 1.0))
    generator = more.pop("generator", None) or [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    return sampler(model, LABELS, law=law, generator=generator, batch_size=2, **more)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_it_is_the_published_loop(guidance, prediction):
    """diffusers' own scheduler, and the whole training pass in place of the cache."""
    model = tiny_acdit(prediction=prediction).double()
    keys = draw_keys([torch.Generator().manual_seed(seed) for seed in (3, 4)], 2)
    noise = CounterNoise(keys, "cpu").normal(model.places.expand(2, -1), 3, CHAIN, dtype=torch.float64)
    scheduler: Any = DPMSolverMultistepScheduler.from_config(DDIMScheduler(prediction_type=prediction).config)
    tokens = torch.zeros_like(noise)
    for block in range(4):
        slots = slice(4 * block, 4 * block + 4)
        scheduler.set_timesteps(5)
        x = 0.9 * noise[:, slots]
        for time in scheduler.timesteps:
            noisy = tokens.clone()
            noisy[:, slots] = x

            def predicted(labels: Tensor, noisy: Tensor = noisy, time: Tensor = time) -> Tensor:
                return model.predictions(tokens, noisy, time.expand(2, 4), labels)[:, slots].detach()  # noqa: B023

            null = predicted(torch.tensor([5, 5]))
            x = scheduler.step(null + guidance * (predicted(LABELS) - null), time, x).prev_sample
        tokens[:, slots] = x
    wanted = torch.zeros_like(tokens).index_copy_(1, model.places, tokens)
    result = draw(BlockDiffusionSampler(levels=5), guidance=guidance, model=model, temperature=0.9)
    # The scheduler, and the solver after it, keep the sample in float32.
    torch.testing.assert_close(result.tokens, wanted, rtol=1e-5, atol=1e-5)


def test_calls_are_blocks_times_levels():
    for block_size, blocks in ((1, 16), (4, 4), (16, 1)):
        result = draw(BlockDiffusionSampler(levels=3), model=tiny_acdit(block_size=block_size).double())
        assert result.trace.target_calls.tolist() == [3 * blocks] * 2
        assert result.trace.commit_call.flatten().bincount().nonzero()[:, 0].tolist() == [
            *range(2, 3 * blocks, 3)
        ]
    places = tiny_acdit().places
    by_place = draw(BlockDiffusionSampler(levels=3)).trace.commit_call[0]
    assert by_place[places].tolist() == [call for call in (2, 5, 8, 11) for _ in range(4)]


def test_each_block_reads_the_clean_block_before_it_once(monkeypatch):
    model, read = tiny_acdit().double(), []
    forward = type(model).forward

    def watched(
        self: Any, state: Any, noisy: Tensor, time: float, block: int, clean: Tensor | None
    ) -> Tensor:
        read.append((block, clean is not None))
        return forward(self, state, noisy, time, block, clean)

    monkeypatch.setattr(type(model), "forward", watched)
    draw(BlockDiffusionSampler(levels=2), model=model)
    assert read == [
        (0, False),
        (0, False),
        *[(block, first) for block in (1, 2, 3) for first in (True, False)],
    ]


def test_a_callback_sees_every_call_and_ends_the_decode():
    seen = []

    def stop(call: int, lengths: Tensor) -> Any:
        seen.append((call, lengths.tolist()))
        return STOP if call == 7 else None

    whole = draw(BlockDiffusionSampler(levels=3))
    cut = draw(BlockDiffusionSampler(levels=3), callback=stop)
    assert seen == [(call, [4 * ((call + 1) // 3)] * 2) for call in range(8)]
    left = cut.trace.commit_call >= 0
    assert cut.trace.stopped and left.sum(1).tolist() == [8, 8]
    assert torch.equal(cut.tokens[left], whole.tokens[left])


def test_blocks_start_from_the_noise_of_their_places_whatever_the_levels():
    """A token is its own start times a number if the network says nothing."""
    model = tiny_acdit(prediction="v_prediction").double()
    with torch.no_grad():
        for parameter in model.final_layer.linear.parameters():
            parameter.zero_()
    one, two = (draw(BlockDiffusionSampler(levels=levels), model=model).tokens for levels in (2, 3))
    ratio = two / one
    torch.testing.assert_close(ratio, ratio[:1, :1, :1].expand_as(ratio), rtol=1e-5, atol=0)


def test_requests_for_vocabularies_are_refused_before_any_compute(monkeypatch):
    monkeypatch.setattr("visual_spec.prototype.acdit.model.ACDiTTransformer.prefill", None)
    for law in (TokenLaw(top_k=5), TokenLaw(top_p=0.5), TokenLaw(allowed=(0, 2))):
        with pytest.raises(ValueError, match="tokens"):
            BlockDiffusionSampler()(tiny_acdit(), LABELS, law=law, batch_size=2)
