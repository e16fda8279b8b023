"""Log-probabilities of drawn tokens, from the logits of the calls that committed them: no call is added.

For those who train on what a model draws: `logprobs` under the law that the tokens were drawn from (guidance,
temperature, top-k and top-p included), `model_logprobs` under the model itself, without any of these. Of columns each
token has its own; tokens that the pattern forces have 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import wide
from visual_spec.samplers.core.state import Run, State


def recording(advance: Callable[[], None], run: Run, state: State, *, lossless: bool) -> Callable[[], None]:
    """Return `advance`, one step on `state`, that also keeps the log-probabilities of what it commits.

    Args:
        lossless: else tokens do not follow the law, and `logprobs` stays None.
    """
    run.keeps_scores = True
    nothing = torch.full(state.tokens.shape, torch.nan, device=run.device)
    state.model_logprobs, state.logprobs = nothing, nothing.clone() if lossless else None
    first = state.lengths[:, None] - 1
    _keep(run, state, run.view.first(run.cache.logits), first, first[:, 0])

    def recorded() -> None:
        before = state.lengths.clone()
        advance()
        _keep(run, state, *run.scored, before)

    return recorded


def _keep(run: Run, state: Any, logits: Tensor, slots: Tensor, before: Tensor) -> None:
    """Write what a call committed.

    Args:
        logits: [R, W, V] of the slots long [B, W].
        before: long [B], the committed slots before the call.
    """
    new = (slots >= before[:, None]) & (slots < state.lengths[:, None])
    view, tokens = run.view, run.view.read(state.tokens, slots)  # entries long [B, N * K], K codebooks a slot
    new = new.repeat_interleave(view.codebooks, 1)
    laws = {"logprobs": run.law, "model_logprobs": _unguided}
    for name, law in laws.items():
        if (kept := getattr(state, name)) is not None:
            table = view.laws(law, logits, slots, run.guided)  # [B, N * K, V]
            values = table.gather(-1, tokens[..., None])[..., 0].to(kept.dtype)
            view.write(kept, slots, torch.where(new, values, view.read(kept, slots)))


def _unguided(logits: Tensor, slots: Tensor, guided: bool) -> Tensor:
    """The model's own law, log-probabilities [B, N, V], of logits [R, N, V]."""
    return wide(logits[: len(slots)]).log_softmax(-1)
