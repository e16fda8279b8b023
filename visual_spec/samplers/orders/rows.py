"""Row-parallel decoding of raster models: the part that ZipAR and parallel Jacobi decoding share.

Several rows advance in one call, so a token is drawn before all tokens of the rows above are known. It follows the
model's law given what its position saw, not the raster law. No bound on the difference is known in advance, and the
calls of the decode cannot estimate it; the setting `measure` measures it on the finished tokens.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import NextTokenModel, OrderModel, TokenGrid
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import CheckedLaw, check_guided
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import LOSSY, MEASURE
from visual_spec.samplers.orders.row_order import RowOrder, RowPlan


@dataclass
class UsedLaws:
    """Laws [B, L + N, V], by slot: the law at the call that committed the slot. Keeps all samples to the end."""

    laws: Tensor


@dataclass
class RowState(State):
    """A batch between two calls. `lengths` is long [B, rows], the tokens of each row.

    Attributes:
        row: long [B, A], the row of each window; a window past the last row is idle.
        used: the laws that tokens were drawn from; None unless they are to be measured.
    """

    row: Tensor
    used: UsedLaws | None

    def advance(self, order: RowOrder, plan: RowPlan, target: Tensor, count: Tensor) -> None:
        """Commit the first `count` [B, A] predictions of each window. Their tokens are already written.

        `target`: [B, N, V], the laws of the predictions.
        """
        offset = torch.arange(order.drafts + 1, device=count.device)
        chosen = (offset < count[..., None]).flatten(1)  # [B, N]
        at = plan.predicted.where(chosen, plan.scratch)
        self.commit_call.scatter_(1, at, torch.zeros_like(at) + self.round)
        if self.used is not None:
            self.used.laws.scatter_(1, at[..., None].expand_as(target), target)
        self.target_calls += ~order.done(self.lengths)
        self.lengths, self.row = order.advance(self.lengths, self.row, plan, count)


class RowSampler(Sampler[OrderModel, RowState]):
    """A sampler that decodes rows side by side. A method defines the order and the step.

    With the setting `measure`, the trace's `moved_mass` is `raster_divergence`, and its `divergence` is the mean over
    samples and slots. `target_calls` does not count the extra pass; its time is phase `MEASURE`.
    """

    keeps = LOSSY
    gives_logprobs = True

    def order(self, grid: TokenGrid) -> RowOrder:
        """Return the decoding order for this grid."""
        raise NotImplementedError

    def check(self, model: OrderModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        check_order_model(model, type(self).__name__)

    def plan(self, run: Run) -> None:
        run.window = self.order(run.model.grid).columns

    def begin_rows(self, run: Run, kind: type[RowState], **more: Any) -> Any:
        """Return the state after the prefill, of class `kind`: slot 0 is committed."""
        order = self.order(run.model.grid)
        slots = torch.zeros(run.batch_size, 1, dtype=torch.long, device=run.device)
        target = run.law(run.cache.logits[:, None], slots, run.guided)  # [B, 1, V]
        tokens = slots.new_zeros(run.batch_size, run.num_tokens + order.columns)
        tokens[:, :1] = run.noise.categorical(target, slots, TOKEN)
        lengths, row = order.start(run.batch_size, run.device)
        used = None
        if self.config.measure:
            used = UsedLaws(target.new_zeros(*tokens.shape, target.shape[-1]))
            used.laws[:, :1] = target
        calls = torch.ones_like(slots[:, 0])
        return kind.blank(run, tokens, lengths=lengths, target_calls=calls, row=row, used=used, **more)

    def score(self, run: Run, state: RowState) -> tuple[RowPlan, Tensor]:
        """Feed the tokens of the order's next call. Returns its plan, and the laws of its predictions, [B, N, V]."""
        plan = self.order(run.model.grid).plan(state.lengths, state.row)
        fed = state.tokens.gather(1, plan.sources)
        logits = run.model(state.cache, fed, plan.slots, seen=plan.seen, predicted=plan.predicted)
        run.lap("model")
        state.round += 1
        run.scored = logits, plan.predicted
        return plan, run.law(logits, plan.predicted, run.guided)

    def progress(self, run: Run, state: RowState) -> Tensor:
        return state.lengths.sum(1)

    def committed(self, run: Run, state: RowState) -> Tensor:
        width = run.model.grid.width
        columns = torch.arange(run.num_tokens, device=run.device) % width
        return columns < state.lengths.repeat_interleave(width, 1)

    def measure(self, run: Run, state: RowState, tokens: Tensor) -> tuple[float | None, Tensor | None]:
        if state.used is None:
            return None, None
        laws = state.used.laws[:, : run.num_tokens]
        moved = raster_divergence(run.model, run.condition, tokens, laws, run.law, guided=run.guided).cpu()
        run.lap(MEASURE)
        return float(moved.mean()) / run.num_tokens, moved


def raster_divergence(
    model: OrderModel, condition: object, tokens: Tensor, used_law: Tensor, law: CheckedLaw, *, guided: bool
) -> Tensor:
    """Return the total variation between the used laws and the raster laws, summed over slots: [B].

    At a slot this is half the sum over ids of |used law - raster law|, 0 to 1. The raster law is the model's law given
    all tokens before the slot; it is found by feeding the finished tokens again, row by row. The expectation of the sum
    is at least the total variation between the law of whole samples and the law of autoregressive sampling. (This does
    not hold with adaptive starts: there the last law that a row's first token was tested against stands for the law of
    that token.)

    Args:
        condition: as given to the decode.
        tokens: long [B, L].
        used_law: [B, L, V] log-probabilities.
    """
    batch_size, num_tokens = tokens.shape
    width = model.grid.width
    state = model.prefill(condition, batch_size=batch_size, guided=guided, window=width)
    check_guided(state, guided)
    slots = torch.arange(num_tokens + 1, device=tokens.device).repeat(batch_size, 1)
    total = torch.zeros(batch_size, dtype=torch.float64, device=tokens.device)
    logits, first = state.logits[:, None], 0  # they predict slot `first` and later ones
    while True:
        following = first + logits.shape[1]
        raster = law(logits, slots[:, first:following], guided)
        used = used_law[:, first:following]
        total += (used.exp() - raster[:, : used.shape[1]].exp()).abs().sum((1, 2), dtype=torch.float64) / 2
        if following >= num_tokens:
            return total
        fed = slice(following - 1, following - 1 + width)
        logits, first = model(state, tokens[:, fed], slots[:, fed]), following


def check_order_model(model: NextTokenModel, sampler: str) -> None:
    """Refuse a model that feeds tokens in raster order only."""
    parameters = inspect.signature(getattr(model, "forward", model.__call__)).parameters.values()
    if not any(p.name == "seen" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise TypeError(
            f"{type(model).__name__} feeds tokens in raster order only, and {sampler} needs an OrderModel, whose calls "
            "take `seen`. Use AutoregressiveSampler or SpeculativeJacobiSampler with this model."
        )
