"""Row-parallel decoding of raster models: ZipAR, and the loop that it shares with `parallel_jacobi`.

Several rows advance in one call, so a token is drawn before all tokens of the rows above are known: it follows the
model's law given what its column saw, not the raster law. Nothing bounds that difference in advance, and it cannot
be estimated from the calls of the decode; the setting `measure` measures it on the finished tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState, OrderModel, TokenGrid
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core.acceptance import exact_acceptance, residual
from visual_spec.samplers.core.base import HostCopy
from visual_spec.samplers.core.checks import CheckedLaw, check_count, check_flag, check_request
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.row_order import RowOrder, RowPlan
from visual_spec.samplers.core.trace import MEASURE, DecodeTrace, SampleResult, Stopwatch


@dataclass
class RowState:
    """A batch between two calls.

    Attributes:
        cache: the model's own state.
        tokens: long [B, L + N], by slot: committed tokens and drafts, then scratch.
        lengths: long [B, rows], tokens that each row holds.
        row: long [B, A], the row that each window is at; past the last row it is idle.
        held: bool [B, A], the window's row is about to start, and the token at its first slot awaits confirmation
            (adaptive ZipAR).
        draft_law: [B, N, V] log-probabilities, the law that the draft at the slot which a window's column would
            predict was drawn from; None where there are no drafts, or only tokens are compared.
        round: index of the last call (the prefill is 0).
        target_calls: long [B].
        commit_call: long [B, L + N], by slot, the call that committed it.
        used_law: [B, L + N, V], by slot, the law at the call that committed it; None unless it is to be measured.
    """

    cache: DecodeState
    tokens: Tensor
    lengths: Tensor
    row: Tensor
    held: Tensor
    draft_law: Tensor | None
    round: int
    target_calls: Tensor
    commit_call: Tensor
    used_law: Tensor | None


def prepare(
    order: RowOrder, cache: DecodeState, law: CheckedLaw, noise: CounterNoise, *, measured: bool = False
) -> tuple[RowState, Tensor]:
    """The state after the prefill, with slot 0 committed, and the law of slot 0, [B, 1, V]."""
    rows, device = cache.logits.shape[0], cache.logits.device
    batch_size = rows // 2 if cache.guided else rows
    slots = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    target = law(cache.logits[:, None], slots, cache.guided)
    tokens = slots.new_zeros(batch_size, order.rows * order.width + order.columns)
    tokens[:, :1] = noise.categorical(target, slots, TOKEN)
    lengths, row = order.start(batch_size, device)
    used_law = None
    if measured:
        used_law = target.new_zeros(*tokens.shape, target.shape[-1])
        used_law[:, :1] = target
    state = RowState(
        cache=cache,
        tokens=tokens,
        lengths=lengths,
        row=row,
        held=torch.zeros_like(row, dtype=torch.bool),
        draft_law=None,
        round=0,
        target_calls=torch.ones_like(slots[:, 0]),
        commit_call=torch.zeros_like(tokens),
        used_law=used_law,
    )
    return state, target


def score(
    model: OrderModel, order: RowOrder, state: RowState, law: CheckedLaw, watch: Stopwatch
) -> tuple[RowPlan, Tensor]:
    """Feed what the order asks for: the plan of the call, and the laws of what it predicts, [B, N, V]."""
    plan = order.plan(state.lengths, state.row)
    logits = model(state.cache, state.tokens.gather(1, plan.sources), plan.slots, seen=plan.seen)
    watch.lap("model", state.tokens.device)
    state.round += 1
    return plan, law(logits, plan.predicted, state.cache.guided)


def commit(order: RowOrder, state: RowState, plan: RowPlan, target: Tensor, count: Tensor) -> None:
    """Commit the first `count` [B, A] predictions of each window; their tokens have been written."""
    offset = torch.arange(order.drafts + 1, device=count.device)
    chosen = (offset < count[..., None]).flatten(1)  # [B, N]
    at = plan.predicted.where(chosen, plan.scratch)
    state.commit_call.scatter_(1, at, torch.full_like(at, state.round))
    if state.used_law is not None:
        state.used_law.scatter_(1, at[..., None].expand_as(target), target)
    state.target_calls += ~order.done(state.lengths)
    state.lengths, state.row = order.advance(state.lengths, state.row, plan, count)


# -- ZipAR ---------------------------------------------------------------------------------------------------------


def zipar_step(
    model: OrderModel,
    order: RowOrder,
    state: RowState,
    law: CheckedLaw,
    noise: CounterNoise,
    adaptive: bool,
    watch: Stopwatch,
) -> None:
    """One target call: every open row gets its next token. Updates `state`; no host synchronisation on CUDA.

    Adaptive: a row starts when its first token has been confirmed; see `ZipARSampler`.
    """
    plan, target = score(model, order, state, law, watch)  # one column a window: N = A
    drawn = noise.categorical(target, plan.predicted, TOKEN)
    settled = plan.scored > 0
    if adaptive:
        # A token that is drawn only now counts as a draft from its own law: kept with probability 1.
        held = state.held
        drafts = state.tokens.gather(1, plan.predicted).where(held, drawn)
        label = target if state.draft_law is None else state.draft_law.where(held[..., None], target)
        probability = exact_acceptance(target, label, drafts)
        accept = noise.bernoulli(probability, plan.predicted, ACCEPT, state.round)
        replacement = noise.categorical(residual(target, label), plan.predicted, RESIDUAL, state.round)
        drawn = drafts.where(accept, replacement)
        starting = settled & (plan.length == 0)
        # With the row above complete there is nothing more to wait for: the replacement is final.
        settled = settled & (~starting | (held & accept) | (plan.above == order.width))
        state.held = starting & ~settled
        state.draft_law = target
    state.tokens.scatter_(1, plan.predicted, drawn)
    commit(order, state, plan, target, settled.long())
    watch.lap("verify", state.tokens.device)


# -- the samplers --------------------------------------------------------------------------------------------------


def raster_divergence(
    model: OrderModel, condition: Any, tokens: Tensor, used_law: Tensor, law: CheckedLaw, *, guided: bool
) -> Tensor:
    """How far the laws that tokens were drawn from are from the raster laws: total variation, summed over slots, [B].

    At a slot it is half the sum over ids of |used law - raster law|, 0 to 1. The raster law is the model's given all
    tokens before the slot, found by feeding the finished tokens once more, row by row. The expectation of the sum is at
    least the total variation between the law of whole samples and that of autoregressive sampling. (Not so with
    adaptive starts: there the last law that a row's first token was tested against stands for the law of that token.)

    Args:
        condition: as the decode was given.
        tokens: long [B, L].
        used_law: [B, L, V] log-probabilities.
    """
    batch_size, num_tokens = tokens.shape
    width = model.grid.width
    state = model.prefill(condition, batch_size=batch_size, guided=guided, window=width)
    slots = torch.arange(num_tokens + 1, device=tokens.device).repeat(batch_size, 1)
    total = torch.zeros(batch_size, dtype=torch.float64, device=tokens.device)
    logits, first = state.logits[:, None], 0  # they predict slot `first` and those behind it
    while True:
        following = first + logits.shape[1]
        raster = law(logits, slots[:, first:following], guided)
        used = used_law[:, first:following]
        total += (used.exp() - raster[:, : used.shape[1]].exp()).abs().sum((1, 2), dtype=torch.float64) / 2
        if following >= num_tokens:
            return total
        fed = slice(following - 1, following - 1 + width)
        logits, first = model(state, tokens[:, fed], slots[:, fed]), following


def _check_model(model: OrderModel, sampler: str) -> None:
    parameters = inspect.signature(getattr(model, "forward", model.__call__)).parameters.values()
    if not any(p.name == "seen" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise TypeError(
            f"{type(model).__name__} feeds tokens in raster order only, and {sampler} needs an OrderModel, whose calls "
            "take `seen`. Use AutoregressiveSampler or SpeculativeJacobiSampler with this model."
        )


class RowSampler(SchedulerMixin, ConfigMixin):
    """The loop that both samplers share. A subclass says which order, and what one call does."""

    config_name = "sampler_config.json"
    lossless = False
    identical = False

    def order(self, grid: TokenGrid) -> RowOrder:
        """Which slots are decoded when, on this grid."""
        raise NotImplementedError

    def _start(self, order: RowOrder, cache: DecodeState, law: CheckedLaw, noise: CounterNoise) -> RowState:
        raise NotImplementedError

    def _step(
        self,
        model: OrderModel,
        order: RowOrder,
        state: RowState,
        law: CheckedLaw,
        noise: CounterNoise,
        watch: Stopwatch,
    ) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def __call__(
        self,
        model: OrderModel,
        condition: Any,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
    ) -> SampleResult:
        """Decode a batch. Arguments and errors are those of `AutoregressiveSampler.__call__`, and:

        Args:
            model: an `OrderModel`.

        Raises:
            TypeError: a model that feeds tokens in raster order only.

        A sampler that measures reports `raster_divergence` in the trace, as `moved_mass`, and its mean over samples
        and slots as `divergence`. The extra pass is not counted in `target_calls`; its time is phase `MEASURE`.

        On CUDA the end is noticed one call late, so `callback` may be called once more after the last commit.
        """
        check_request(model, law, batch_size)
        _check_model(model, type(self).__name__)
        keys = draw_keys(generator, batch_size)
        order = self.order(model.grid)
        num_tokens = model.grid.num_tokens
        watch = Stopwatch()
        cache = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=order.columns)
        device = cache.logits.device
        watch.lap("prefill", device)
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, num_tokens, deferred=device.type == "cuda")
        state = self._start(order, cache, checked, noise)
        if callback is not None:
            callback(0, state.lengths.sum(1))
        all_done = HostCopy()
        while not all_done(order.done(state.lengths).all()):
            self._step(model, order, state, checked, noise, watch)
            if callback is not None:
                callback(state.round, state.lengths.sum(1))
        tokens = state.tokens[:, :num_tokens].clone()
        moved_mass = None
        if state.used_law is not None:
            used = state.used_law[:, :num_tokens]
            moved_mass = raster_divergence(model, condition, tokens, used, checked, guided=law.guided).cpu()
            watch.lap(MEASURE, device)
        checked.finish()
        seconds, phase_seconds = watch.read()
        trace = DecodeTrace(
            sampler=type(self).__name__,
            lossless=False,
            identical=False,
            target_calls=state.target_calls.cpu(),
            commit_call=state.commit_call[:, :num_tokens].cpu(),
            seconds=seconds,
            phase_seconds=phase_seconds,
            peak_memory=watch.peak_memory(device),
            divergence=None if moved_mass is None else float(moved_mass.mean()) / num_tokens,
            moved_mass=moved_mass,
        )
        return SampleResult(tokens, trace)


class ZipARSampler(RowSampler):
    """ZipAR: a row starts once the row above holds `window` tokens, and all open rows advance one token a call.

    He et al., "ZipAR: parallel auto-regressive image generation through spatial locality", ICML 2025; the name window
    is the paper's. `width + (rows - 1) * window` target calls, prefill included, for rows of `width` tokens. Window 1
    runs over anti-diagonals, which is Diagonal Decoding (Ye et al. 2025) inside a frame; a window of at least the
    width is `AutoregressiveSampler`, token for token.

    A column sees the condition and committed tokens only, never a slot that is still empty. A row that starts before
    the row above is complete starts from a stand-in, see `RowOrder`.

    With `adaptive` (version 3 of the paper, adaptive window assignment) `window` is the smallest one. Once the row
    above holds `window` tokens, the row's first token is drawn, from law p_s with s = window, but held. In every
    following call the row above has one token more, and the held token x is tested: it is kept with probability
    min(1, p_j(x) / p_(j-1)(x)), and the row starts; or it is replaced by a draw from (p_j - p_(j-1))+ normalised, which
    is held in turn. When the row above is complete the outcome is final.

    What that guarantees: the held token follows p_j after every test, if one also goes on testing after the first
    success; p_width, with the whole row above, would be reached exactly. Starting the row at the first success
    changes the law of its first token by no more than the probability that a later test would have refused it. About
    the rest of the row nothing is said.

    Args:
        window: tokens that the row above holds when a row starts, at least 1.
        adaptive: start each row when its first token is confirmed, at least one call later than with a fixed window.
        measure: report how far the laws that were drawn from are from the raster laws. Keeps the law of every token,
            [B, L, V], and feeds the finished tokens once more.

    Raises:
        ValueError: a window that is not an integer of at least 1.
    """

    @register_to_config
    def __init__(self, window: int = 4, adaptive: bool = False, measure: bool = False) -> None:
        check_count("window", window)
        check_flag("adaptive", adaptive)
        check_flag("measure", measure)

    def order(self, grid: TokenGrid) -> RowOrder:
        """Rows `window` tokens apart, as many as may be open."""
        return RowOrder.over(grid, self.config["window"])

    def _start(self, order: RowOrder, cache: DecodeState, law: CheckedLaw, noise: CounterNoise) -> RowState:
        return prepare(order, cache, law, noise, measured=self.config["measure"])[0]

    def _step(
        self,
        model: OrderModel,
        order: RowOrder,
        state: RowState,
        law: CheckedLaw,
        noise: CounterNoise,
        watch: Stopwatch,
    ) -> None:
        zipar_step(model, order, state, law, noise, self.config["adaptive"], watch)
