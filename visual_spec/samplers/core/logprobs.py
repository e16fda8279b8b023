"""Log-probabilities of drawn tokens, from the logits of the calls that committed them: no call is added.

For those who train on what a model draws: `logprobs` under the law that the tokens were drawn from (guidance,
temperature, top-k and top-p included), `model_logprobs` under the model itself, without any of these. Of columns each
token has its own; tokens that the pattern forces have 0. Nothing waits for the host, so graphs record it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.protocol import wide
from visual_spec.samplers.core.state import Run


def keeping(sampler: Any, run: Run, state: Any) -> Callable[[Run, Any], None]:
    """Return the step of a sampler that also writes the log-probabilities of what it commits."""
    if state.logprobs is None:  # else the method writes them itself
        begin(run, state, sampler.committed(run, state) if sampler.counts_prefill else None)

    def step(run: Run, state: Any) -> None:
        before = sampler.committed(run, state)
        sampler.step(run, state)
        if run.scored is not None:  # else the method has written them
            keep(run, state, sampler.committed(run, state) & ~before)

    return step


def begin(run: Run, state: Any, committed: Tensor | None) -> None:
    """Give a state its log-probabilities, and write those of what the prefill `committed`, bool [B, L], if anything."""
    state.logprobs, state.model_logprobs = (
        torch.full(state.tokens.shape, torch.nan, device=run.device) for _ in range(2)
    )
    if committed is None:
        return
    if run.scored is None:
        first = torch.zeros_like(state.target_calls)[:, None]
        first += 0 if state.known is None else state.known[:, None]
        run.scored = run.view.first(run.cache.logits), first
    keep(run, state, committed)


def keep(run: Run, state: Any, new: Tensor) -> None:
    """Write what the last call committed.

    Args:
        new: bool [B, L], the slots.
    """
    assert run.scored is not None
    logits, slots = run.scored  # [R, N, V], [B, N]
    size = new.shape[1]
    new = F.pad(new & (state.commit_call[:, :size] >= 0), (0, 1)).gather(1, slots.clamp(max=size))
    view, raw = run.view, getattr(state.cache, "raw", None)
    new, tokens = new.repeat_interleave(view.codebooks, 1), view.read(state.tokens, slots)  # [B, N * K]
    # Of the last slots, as `logits`.
    raw = logits if raw is None else raw[:, -logits.shape[1] :]
    for kept, law, given, guided in (
        (state.logprobs, run.law, logits, run.guided),
        (state.model_logprobs, own_law, raw[: len(slots)], False),
    ):
        values = view.laws(law, given, slots, guided).gather(-1, tokens[..., None])[..., 0]
        view.write(kept, slots, torch.where(new, values.to(kept.dtype), view.read(kept, slots)))


def keep_entries(kept: Tensor, laws: Tensor, tokens: Tensor, new: Tensor) -> None:
    """Write those of tokens long [B, N] under laws [B, N, V] into `kept [B, N]`, where bool [B, N] `new` is true."""
    values = laws.gather(-1, tokens.clamp(max=laws.shape[-1] - 1)[..., None])[..., 0]
    kept.copy_(torch.where(new, values.to(kept.dtype), kept))


def own_law(logits: Tensor, slots: Tensor, guided: bool) -> Tensor:
    """The model's own law, log-probabilities [B, N, V], of its logits [B, N, V]."""
    return wide(logits).log_softmax(-1)
