"""Mistakes that published samplers make, planted around the real step. The exactness tests must catch each.

Each is a drop-in for `SpeculativeJacobiSampler.step`: it runs the real step, then puts the state as the mistaken code
would.
"""

from dataclasses import replace

import torch
from torch import Tensor

from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.drafts import Label, rows_of
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.raster.jacobi import JacobiState, SpeculativeJacobiSampler

_real_step = SpeculativeJacobiSampler.step


def observing(law: CheckedLaw, seen: list[Tensor]) -> CheckedLaw:
    """The same law, which notes what it gives."""

    class Observing(CheckedLaw):
        def __call__(self, logits: Tensor, slots: Tensor, guided: bool) -> Tensor:
            seen.append(law(logits, slots, guided))
            return seen[-1]

    return Observing(law.law, law.num_tokens)


def labels(state: JacobiState) -> Tensor:
    """The law of each draft of the window, [B, W - 1, V]."""
    assert state.label is not None
    return state.label.dense(state.tokens.gather(1, state.next_slots(state.label.rows.shape[1])))


def relabel(state: JacobiState, laws: Tensor) -> None:
    """Give the drafts of the window these laws, [B, W - 1, V]."""
    rows = torch.arange(laws.shape[1]).expand(laws.shape[:2])
    state.label = Label(laws, rows, (0, laws.shape[-1]))


class _Observed:
    """A real step, and what it drew and scored on the way."""

    def __init__(self, sampler: SpeculativeJacobiSampler, run: Run, state: JacobiState) -> None:
        self.labels, self.lengths = labels(state), state.lengths
        seen: list[Tensor] = []
        draw = run.noise.bernoulli

        def bernoulli(*args, **kwargs) -> Tensor:
            seen.append(draw(*args, **kwargs))
            return seen[-1]

        run.noise.bernoulli = bernoulli
        try:
            _real_step(sampler, replace(run, law=observing(run.law, seen)), state)
        finally:
            del run.noise.bernoulli  # uncovers the method
        self.target, accept = seen  # [B, W, V], [B, W]
        self.accept = accept[:, :-1]


def _rows(values: Tensor, columns: Tensor) -> Tensor:
    columns = columns.clamp(0, values.shape[1] - 1)
    return rows_of(values, columns) if values.dim() == 3 else values.gather(1, columns)


def old_label_step(self: SpeculativeJacobiSampler, run: Run, state: JacobiState) -> None:
    """Under maximal coupling, a draft that passed its test keeps its old label (the release of SCD for Lumina)."""
    seen = _Observed(self, run, state)
    advance = accepted_prefix(seen.accept) + 1
    source = advance[:, None] + torch.arange(self.window - 1)
    passed = (source < self.window - 1) & _rows(seen.accept, source)
    relabel(state, torch.where(passed[..., None], _rows(seen.labels, source), labels(state)))


def batch_minimum_step(self: SpeculativeJacobiSampler, run: Run, state: JacobiState) -> None:
    """Pairs of rows advance together, and surplus tokens are tested again under their old label (SJD's release)."""
    seen = _Observed(self, run, state)
    kept, after = accepted_prefix(seen.accept), labels(state)
    advance = (state.lengths - seen.lengths).view(-1, 2)
    live = (seen.lengths < run.num_tokens).view(-1, 2).all(1, keepdim=True)
    together = torch.where(live, advance.amin(1, keepdim=True), advance).flatten()
    slots = (seen.lengths + together)[:, None] + torch.arange(self.window - 1)
    column = slots - seen.lengths[:, None]
    # The place of a slot among the drafts of the real step.
    later = slots - (seen.lengths + kept + 1)[:, None]
    label = torch.where(
        (column < kept[:, None])[..., None], _rows(seen.labels, column), _rows(seen.target, column)
    )
    relabel(state, torch.where((later >= 0)[..., None], _rows(after, later), label))
    state.lengths = seen.lengths + together


def target_for_residual(target: Tensor, draft_law: Tensor) -> Tensor:
    """In the place of `verification.residual`: a refused draft is replaced from the target (Lumina-mGPT 2.0)."""
    return target
