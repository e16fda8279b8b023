"""Plain autoregressive sampling: one target call a token. The reference every other sampler is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState, NextTokenModel
from visual_spec.samplers.core.checks import CheckedLaw, check_request
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.fused import draw_tokens
from visual_spec.samplers.core.graph import AUTO, can_record, check_graph, recorded, wants_graph
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise, draw_keys
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult, Stopwatch

Callback = Callable[[int, Tensor], Any]


@dataclass
class AutoregressiveState:
    """A batch between two calls.

    Attributes:
        cache: the model's own state.
        tokens: long [B, L], by slot.
        slots: long [B, 1], the next one, the same for all samples.
    """

    cache: DecodeState
    tokens: Tensor
    slots: Tensor


def step(
    model: NextTokenModel, state: AutoregressiveState, law: CheckedLaw, noise: CounterNoise, watch: Stopwatch
) -> None:
    """One target call and one token for every sample. Updates `state`; no host synchronisation on CUDA."""
    device, guided = state.tokens.device, state.cache.guided
    before = state.slots - 1
    logits = model(state.cache, state.tokens.gather(1, before), before)  # [R, 1, V]
    watch.lap("model", device)
    state.tokens.scatter_(1, state.slots, draw_tokens(law, noise, logits, state.slots, guided))
    state.slots = state.slots + 1
    watch.lap("verify", device)


class AutoregressiveSampler(SchedulerMixin, ConfigMixin):
    """Draws the token of each slot from the model's law, with the slot's own noise, in raster order.

    Args:
        graph: replay the calls as a CUDA graph, see `visual_spec.samplers.core.graph`; the tokens are the same. "auto"
            does so where it can.

    Raises:
        ValueError: another value.
    """

    config_name = "sampler_config.json"
    lossless = True
    identical = True

    @register_to_config
    def __init__(self, graph: bool | str = AUTO) -> None:
        check_graph(graph)

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
        graph = self.config["graph"]
        recording = wants_graph(graph, model)
        keys = draw_keys(generator, batch_size)
        num_tokens = model.grid.num_tokens
        watch = Stopwatch()
        cache = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=1)
        device = cache.logits.device
        watch.lap("prefill", device)
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, num_tokens, deferred=device.type == "cuda")
        tokens = torch.zeros(batch_size, num_tokens, dtype=torch.long, device=device)
        slots = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        tokens[:, :1] = draw_tokens(checked, noise, cache.logits[:, None], slots, law.guided)
        watch.lap("verify", device)
        state = AutoregressiveState(cache, tokens, slots + 1)

        def call(state: AutoregressiveState, checked: CheckedLaw, noise: CounterNoise) -> None:
            step(model, state, checked, noise, watch)

        parts = state, checked, noise
        advance = partial(call, *parts)
        if recording and (graph is True or can_record(cache)):
            parts, advance = recorded(model, (law, batch_size), call, parts, watch, strict=graph is True)
            state, checked, noise = parts
        lengths = torch.ones(batch_size, dtype=torch.long, device=device)
        for slot in range(num_tokens):
            if slot:
                advance()
            if callback is not None:
                callback(slot, lengths + slot)
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
        return SampleResult(state.tokens.clone(), trace)
