"""Plain autoregressive sampling: one target call a token. The reference every other sampler is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.protocol import NextTokenModel
from visual_spec.samplers.checks import CheckedLaw, check_request
from visual_spec.samplers.configuration import register_to_config
from visual_spec.samplers.fused import draw_tokens
from visual_spec.samplers.law import TokenLaw
from visual_spec.samplers.randomness import CounterNoise, draw_keys
from visual_spec.samplers.trace import DecodeTrace, SampleResult, Stopwatch

Callback = Callable[[int, Tensor], Any]


class AutoregressiveSampler(SchedulerMixin, ConfigMixin):
    """Draws the token of each slot from the model's law, with the slot's own noise, in raster order."""

    config_name = "sampler_config.json"
    lossless = True
    identical = True

    @register_to_config
    def __init__(self) -> None:
        pass

    @torch.no_grad()
    def __call__(
        self,
        model: NextTokenModel,
        condition: Any,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
    ) -> SampleResult:
        """Decode a batch.

        Args:
            model: any `NextTokenModel`.
            condition: what the model's `prefill` takes, `batch_size` rows of it.
            law: how logits become the distribution a token is drawn from.
            generator: one `torch.Generator` for the batch, a list of one a sample, or None (PyTorch's default).
            callback: called after every target call with the call's index (the prefill is 0) and the number of
                committed tokens of each sample, long [B], on the model's device.

        Raises:
            ValueError, TypeError: a request that cannot be served.
            FloatingPointError: logits that define no law.
        """
        check_request(model, law, batch_size)
        keys = draw_keys(generator, batch_size)
        num_tokens = model.grid.num_tokens
        watch = Stopwatch()
        state = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=1)
        device = state.logits.device
        watch.lap("prefill", device)
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, num_tokens, deferred=device.type == "cuda")
        tokens = torch.zeros(batch_size, num_tokens, dtype=torch.long, device=device)
        lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        logits = state.logits[:, None]  # [R, 1, V]
        for slot in range(num_tokens):
            slots = torch.full((batch_size, 1), slot, device=device)
            if slot:
                logits = model(state, tokens[:, slot - 1 : slot], slots - 1)
                watch.lap("model", device)
            tokens[:, slot] = draw_tokens(checked, noise, logits, slots, law.guided)[:, 0]
            watch.lap("verify", device)
            if callback is not None:
                callback(slot, lengths + slot + 1)
        checked.finish()
        seconds, phase_seconds = watch.read()
        trace = DecodeTrace(
            sampler=type(self).__name__,
            lossless=True,
            identical=True,
            target_calls=torch.full((batch_size,), num_tokens),
            commit_call=torch.arange(num_tokens).repeat(batch_size, 1),
            seconds=seconds,
            phase_seconds=phase_seconds,
            peak_memory=watch.peak_memory(device),
        )
        return SampleResult(tokens, trace)
