"""The heads of transformers' speech models, split in two, against the heads in one."""

import pytest
import torch

from tests.helpers.tiny_speech import LATENT, tiny_pocket, tiny_vibevoice
from visual_spec.models.continuous.speech_heads import PocketTTSHead, VibeVoiceHead, guided

TIMES = (999.0, 700.0, 333.0, 1.0)


def points(rows: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    latents, conditions = (torch.randn(rows, size, generator=generator) for size in (LATENT, 32))
    return latents.to(dtype), conditions.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_vibevoice(dtype):
    head = tiny_vibevoice(dtype).model.diffusion_head
    latents, conditions = points(6, dtype)
    split = VibeVoiceHead(head)
    modulations = split.modulations(conditions, split.embed(torch.tensor(TIMES, dtype=dtype)))
    for step, time in enumerate(TIMES):
        want = head(latents, torch.full((6,), time, dtype=dtype), condition=conditions)
        found = split.output(latents, modulations, step)
        tolerance = 1e-12 if dtype == torch.float64 else 0.05
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
    # Two groups of rows from the same latents, as with guidance.
    twice = torch.cat([latents[:3], latents[:3]])
    want = split.output(twice, modulations, 2)
    torch.testing.assert_close(split.output(latents[:3], modulations, 2), want)


@pytest.mark.parametrize("flow", ["lsd", "drifting"])
@torch.no_grad()
def test_pocket(flow):
    head = tiny_pocket(flow).flow_head
    latents, conditions = points(3)
    split = PocketTTSHead(head)
    spans = torch.tensor([(0.0, 0.25), (0.25, 0.5), (0.5, 1.0)] if flow == "lsd" else [()]).double()
    modulations = split.modulations(conditions, split.embed(spans))
    for step, span in enumerate(spans):
        times = [time.expand(3, 1) for time in span]
        want = head(latents, conditions, times=times)
        torch.testing.assert_close(split.output(latents, modulations, step), want, rtol=1e-12, atol=1e-12)


def test_guidance():
    rows = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert guided(rows, 1.5).equal(torch.tensor([[0.0, 0.5]]))
    assert guided(rows, 1).equal(rows)
