"""Log-probabilities of drawn tokens, from the logits of the calls that committed them: no call is added.

For those who train on what a model draws: `logprobs` under the law that the tokens were drawn from (guidance,
temperature, top-k and top-p included), `model_logprobs` under the model itself, without any of these.
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
    tokens = state.tokens.gather(1, slots)
    tables = {"model_logprobs": wide(logits[: len(tokens)]).log_softmax(-1)}
    if state.logprobs is not None:
        tables["logprobs"] = run.law_given(logits, run.guided, slots)
    for name, table in tables.items():
        kept = getattr(state, name)
        values = table.gather(-1, tokens[..., None])[..., 0].to(kept.dtype)
        setattr(state, name, kept.scatter(1, slots, torch.where(new, values, kept.gather(1, slots))))
