"""Mistakes that published samplers make, planted around the real step. The exactness tests must catch each.

Each is a drop-in for `jacobi.step`: it runs the real step, then puts the state as the mistaken code would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_spec.models.core.protocol import NextTokenModel
from visual_spec.samplers import jacobi
from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.core.trace import Stopwatch
from visual_spec.samplers.jacobi import JacobiOptions, JacobiState

_real_step = jacobi.step


class _Observed:
    """A real step, and what it drew and scored on the way."""

    def __init__(
        self,
        model: NextTokenModel,
        state: JacobiState,
        law: CheckedLaw,
        noise: CounterNoise,
        options: JacobiOptions,
        watch: Stopwatch,
    ) -> None:
        assert state.draft_law is not None
        self.draft_law, self.lengths = state.draft_law, state.lengths
        seen: list[Tensor] = []
        draw = noise.bernoulli

        def bernoulli(*args, **kwargs) -> Tensor:
            seen.append(draw(*args, **kwargs))
            return seen[-1]

        class Observing(CheckedLaw):
            def __call__(self, logits: Tensor, slots: Tensor, guided: bool) -> Tensor:
                seen.append(law(logits, slots, guided))
                return seen[-1]

        noise.bernoulli = bernoulli
        try:
            _real_step(model, state, Observing(law.law, law.num_tokens), noise, options, watch)
        finally:
            del noise.bernoulli  # uncovers the method
        self.target, self.accept = seen  # [B, W, V], [B, W - 1]


def _rows(values: Tensor, columns: Tensor) -> Tensor:
    columns = columns.clamp(0, values.shape[1] - 1)
    return values[torch.arange(len(values))[:, None], columns]


def old_label_step(model, state, law, noise, options, watch) -> None:
    """Under maximal coupling, a draft that passed its test keeps its old label (the release of SCD for Lumina)."""
    seen = _Observed(model, state, law, noise, options, watch)
    advance = accepted_prefix(seen.accept) + 1
    source = advance[:, None] + torch.arange(options.window - 1)
    passed = (source < options.window - 1) & _rows(seen.accept, source)
    state.draft_law[:, :-1] = torch.where(
        passed[..., None], _rows(seen.draft_law, source), state.draft_law[:, :-1]
    )


def batch_minimum_step(model, state, law, noise, options, watch) -> None:
    """Pairs of rows advance together, and surplus tokens are tested again under their old label (SJD's release)."""
    seen = _Observed(model, state, law, noise, options, watch)
    num_tokens = model.grid.num_tokens
    kept = accepted_prefix(seen.accept)
    advance = (state.lengths - seen.lengths).view(-1, 2)
    live = (seen.lengths < num_tokens).view(-1, 2).all(1, keepdim=True)
    together = torch.where(live, advance.amin(1, keepdim=True), advance).flatten()
    slots = (seen.lengths + together)[:, None] + torch.arange(options.window - 1)
    column = slots - seen.lengths[:, None]
    behind = (
        slots - (seen.lengths + kept + 1)[:, None]
    )  # the place of a slot among the drafts of the real step
    label = torch.where(
        (column < kept[:, None])[..., None], _rows(seen.draft_law, column), _rows(seen.target, column)
    )
    state.draft_law[:, :-1] = torch.where((behind >= 0)[..., None], _rows(state.draft_law, behind), label)
    state.lengths = seen.lengths + together


def target_for_residual(target: Tensor, draft_law: Tensor) -> Tensor:
    """In the place of `acceptance.residual`: a refused draft is replaced from the target (Lumina-mGPT 2.0)."""
    return target
