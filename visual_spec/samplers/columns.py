"""Decoding of several codebooks: a column, the K tokens of one step of a codebook pattern, takes the place of a token.

Given the columns before it, the tokens of a column are independent. Here is plain sampling, one target call a column,
and what it shares with `columns_jacobi`. Slots are steps. The noise of codebook k at step s has the counter slot
s * K + k, its entry: one codebook is decoded with the noise of the plain samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import ColumnModel
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core.checks import CheckedLaw, check_allowed, check_batch_size
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult, Stopwatch


class Entries:
    """What the steps of a model's pattern hold. Forced entries are token 0 to the sampler, special to all others.

    Args:
        window: most columns of a call; that many steps behind the last one are forced as well.
    """

    def __init__(self, model: ColumnModel, window: int, device: torch.device) -> None:
        self.codebooks = model.grid.codebooks
        self.num_steps = model.grid.num_tokens
        self.special_id = model.special_id
        self.valid = F.pad(model.valid.to(device), (0, 0, 0, window))  # [S + W, K]

    def slots(self, steps: Tensor) -> Tensor:
        """Counter slots of all entries of steps [B, N]: long [B, N * K]."""
        return (
            steps[..., None] * self.codebooks + torch.arange(self.codebooks, device=steps.device)
        ).flatten(1)

    def with_special(self, tokens: Tensor, steps: Tensor) -> Tensor:
        """Tokens [B, N, K] at steps [B, N] or [N] as the model knows them."""
        return torch.where(self.valid[steps], tokens, self.special_id)

    def laws(
        self, law: Callable[[Tensor, Tensor, bool], Tensor], logits: Tensor, steps: Tensor, guided: bool
    ) -> Tensor:
        """The laws [B, N, K, V] from logits [R, N, K, V] that predict steps [B, N]; forced entries are token 0."""
        valid = self.valid[steps]  # [B, N, K]
        # What a forced entry's logits are is no one's concern: they count as past the grid.
        at = torch.where(valid, steps[..., None], self.num_steps).flatten(1)
        laws = law(logits.flatten(1, 2), at, guided).view(*valid.shape, -1)
        return self.forced(laws, valid)

    def forced(self, laws: Tensor, valid: Tensor) -> Tensor:
        """Laws [B, N, K, V] with those of forced entries, not `valid` [B, N, K], put on token 0."""
        certain = laws.new_full(laws.shape[-1:], -torch.inf)
        certain[:1].fill_(0)
        return torch.where(valid[..., None], laws, certain)

    def draw(self, noise: CounterNoise, laws: Tensor, steps: Tensor, stream: int, round: int = 0) -> Tensor:
        """Tokens [B, N, K] from laws [B, N, K, V]."""
        return noise.categorical(laws.flatten(1, 2), self.slots(steps), stream, round).view(laws.shape[:-1])

    def bernoulli(
        self, noise: CounterNoise, probability: Tensor, steps: Tensor, stream: int, round: int
    ) -> Tensor:
        """True with probability [B, N, K]."""
        return noise.bernoulli(probability.flatten(1), self.slots(steps), stream, round).view(
            probability.shape
        )


class ColumnAutoregressiveSampler(SchedulerMixin, ConfigMixin):
    """Draws the tokens of each column from the model's laws, with the noise of their own entries, step by step."""

    config_name = "sampler_config.json"
    lossless = True
    identical = True

    @register_to_config
    def __init__(self) -> None:
        pass

    @torch.no_grad()
    def __call__(
        self,
        model: ColumnModel,
        condition: Any,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
    ) -> SampleResult:
        """Decode a batch.

        Args:
            model: any `ColumnModel`.
            condition, law, generator, callback: as of `AutoregressiveSampler.__call__`, a slot being a step; the law
                is that of each codebook.

        Returns:
            tokens long [B, S, K], special where the pattern has no token. The trace counts columns where that of other
            samplers counts tokens: `commit_call` is [B, S], and `tokens_per_call` the columns per call, here 1.

        Raises:
            ValueError, TypeError: a request that cannot be served.
            FloatingPointError: logits that define no law.
        """
        check_column_request(model, law, batch_size)
        keys = draw_keys(generator, batch_size)
        num_steps = model.grid.num_tokens
        watch = Stopwatch()
        state = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=1)
        device = state.logits.device
        watch.lap("prefill", device)
        noise, entries = CounterNoise(keys, device), Entries(model, 1, device)
        checked = CheckedLaw(law, num_steps, deferred=device.type == "cuda")
        tokens = torch.zeros(batch_size, num_steps, model.grid.codebooks, dtype=torch.long, device=device)
        lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        logits = state.logits[:, None]  # [R, 1, K, V]
        for step in range(num_steps):
            steps = torch.full((batch_size, 1), step, device=device)
            if step:
                logits = model(state, tokens[:, step - 1 : step], steps - 1)
                watch.lap("model", device)
            target = entries.laws(checked, logits, steps, law.guided)  # [B, 1, K, V]
            tokens[:, step : step + 1] = entries.with_special(
                entries.draw(noise, target, steps, TOKEN), steps
            )
            watch.lap("verify", device)
            if callback is not None:
                callback(step, lengths + step + 1)
        checked.finish()
        seconds, phase_seconds = watch.read()
        trace = DecodeTrace(
            sampler=type(self).__name__,
            lossless=True,
            identical=True,
            target_calls=torch.full((batch_size,), num_steps),
            commit_call=torch.arange(num_steps).repeat(batch_size, 1),
            seconds=seconds,
            phase_seconds=phase_seconds,
            peak_memory=watch.peak_memory(device),
        )
        return SampleResult(tokens, trace)


def check_column_request(model: ColumnModel, law: TokenLaw, batch_size: int) -> None:
    """Refuse, before any compute, what a column sampler cannot decode.

    Raises:
        ValueError: batch size below 1, a model without a pattern, allowed ids beyond the vocabulary.
    """
    check_batch_size(batch_size)
    valid, size = getattr(model, "valid", None), (model.grid.num_tokens, model.grid.codebooks)
    if valid is None:
        raise ValueError(
            f"{type(model).__name__} has no codebook pattern; this sampler decodes columns of several codebooks. "
            "Use AutoregressiveSampler or SpeculativeJacobiSampler."
        )
    if tuple(valid.shape) != size or valid.dtype != torch.bool:
        raise ValueError(
            f"the model's pattern is {valid.dtype} of shape {tuple(valid.shape)}; its grid asks for bool {size}, "
            "[steps, codebooks]."
        )
    check_allowed(law, model.vocab_size)
