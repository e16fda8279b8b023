"""PocketTTS of transformers with a split head and a recorded loop; see `speech` for the whole."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.continuous.speech_heads import PocketTTSHead, SpeechHead
from visual_spec.models.core.offload import at_hand
from visual_spec.pipelines.accelerate.speech_model import FORWARD, GENERATE, SpeechModel, SpeechRun

_FLOW = "sample_latent"


class PocketTTS(SpeechModel):
    replaces = (GENERATE, FORWARD, _FLOW)

    def begin(self) -> None:
        self.embedded: dict[Any, Tensor] = {}

    def count_latents(self, run: SpeechRun, result: Any) -> Tensor:
        mask = getattr(result, "audio_latents_mask", None)
        return torch.tensor([len(one) for one in result]) if mask is None else mask.sum(-1).cpu()

    def sample_latent(self, condition: Tensor, noise: Tensor, num_flow_steps: int) -> Tensor:
        if self.run is None:
            return self.plain[_FLOW](condition, noise, num_flow_steps)
        self.run.watch.lap("rest", condition.device)
        module, device = self.model.flow_head, noise.device
        steps = (
            num_flow_steps if len(module.timestep_embeddings) else 0
        )  # without times, noise becomes a latent at once
        with at_hand(module, leaves=False):
            there = next(module.parameters()).device
            head, condition, noise = PocketTTSHead(module), condition.to(there), noise.to(there)
            key = (steps, noise.dtype, there)
            if key not in self.embedded:
                times = [(step / steps, (step + 1) / steps) for step in range(steps)] or [()]
                self.embedded[key] = head.embed(torch.tensor(times, dtype=noise.dtype, device=there))
            latents = self.solve(
                module, steps, functools.partial(_flow, head, steps), noise, condition, self.embedded[key]
            )
        self.run.watch.lap("head", there)
        self.run.head_calls += max(1, steps)
        return latents.to(device)


def _flow(head: SpeechHead, steps: int, noise: Tensor, condition: Tensor, embedded: Tensor) -> Tensor:
    """Latents [N, D] by Euler steps; by one call where there are none."""
    modulations = head.modulations(condition, embedded)
    if not steps:
        return head.output(noise, modulations, 0)
    for step in range(steps):
        noise = noise + head.output(noise, modulations, step) / steps
    return noise
