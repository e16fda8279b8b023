"""Jacobi decoding of several codebooks: a window of drafted columns is scored in one call, the kept ones committed.

The logits behind a column are those of the model only if all K drafts of this column stand, so what is kept or refused
is a whole column. The loop, the couplings and the proofs are those of one codebook (`jacobi`); what is new is the test
of a column, in two exact forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import ColumnModel, DecodeState
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.columns import Entries, check_column_request
from visual_spec.samplers.core.acceptance import (
    EXACT,
    AcceptanceRule,
    accepted_prefix,
    exact_acceptance,
    residual,
)
from visual_spec.samplers.core.base import columns_of, decode
from visual_spec.samplers.core.checks import CheckedLaw, check_count, check_coupled
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.drafts import LAST_LAW, LEFT, UNIFORM, uniform_draft
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.product_residual import draw_product_residual, product_acceptance
from visual_spec.samplers.core.relaxed import RELAXED, Relaxable
from visual_spec.samplers.core.relaxed_columns import check_codebooks, rule_by_codebook
from visual_spec.samplers.core.trace import DivergenceMeter, SampleResult, Stopwatch

COLUMN = "column"
CODEBOOK = "codebook"
UNITS = (COLUMN, CODEBOOK)
COLUMN_DRAFTS = (UNIFORM, LEFT, LAST_LAW)


@dataclass(frozen=True)
class ColumnOptions:
    """The configuration of `ColumnJacobiSampler`, checked.

    `tries` at the residual of a column are made in one call (`product_residual`). Acceptance is "identical" or "exact";
    the latter, by the codebook, tests by `rule`, which relaxed acceptances replace.
    """

    window: int
    coupling: str
    acceptance: str
    unit: str
    initial_draft: str
    rule: AcceptanceRule = EXACT
    tries: int = 8

    def __post_init__(self) -> None:
        check_count("window", self.window, " (1 is one column a call)")
        if self.unit not in UNITS:
            raise ValueError(f"unit={self.unit!r}; pass one of {', '.join(UNITS)}.")
        check_coupled(self, COLUMN_DRAFTS)

    @property
    def redraws(self) -> bool:
        """Whether drafts are drawn anew after every call, rather than carried over from verification."""
        return self.acceptance == "exact" and self.coupling != "maximal"


@dataclass
class ColumnState:
    """A batch between two calls. Row b has committed `lengths[b]` columns, and holds drafts for the next W - 1 steps.

    Attributes:
        cache: the model's own state.
        tokens: long [B, S + W, K], by step: committed columns, then drafts, then scratch; 0 at forced entries.
        lengths: long [B], between 1 and S.
        draft_law: [B, W, K, V] log-probabilities, the law each draft was drawn from; the last column belongs to the
            step behind the drafts and is -inf, the law of no draft. None under identical acceptance.
        pending: bool [B], the first draft was refused already, and is to be replaced: its residual was not found.
        round: index of the last call (the prefill is 0).
        target_calls: long [B].
        commit_call: long [B, S + W], by step: the last call that had the step in its window, which for a committed
            step is the call that committed it.
        meter: what the rule does to the law; None for a lossless one.
    """

    cache: DecodeState
    tokens: Tensor
    lengths: Tensor
    draft_law: Tensor | None
    pending: Tensor
    round: int
    target_calls: Tensor
    commit_call: Tensor
    meter: DivergenceMeter | None = None

    def write(self, steps: Tensor, tokens: Tensor) -> None:
        """Put tokens [B, N, K] at steps [B, N]."""
        self.tokens.scatter_(1, steps[..., None].expand_as(tokens), tokens)


def prepare(
    entries: Entries, cache: DecodeState, law: CheckedLaw, noise: CounterNoise, options: ColumnOptions
) -> ColumnState:
    """The state after the prefill: step 0 is committed, and the first drafts are made."""
    rows, device = cache.logits.shape[0], cache.logits.device
    batch_size = rows // 2 if cache.guided else rows
    steps = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    target = entries.laws(law, cache.logits[:, None], steps, cache.guided)  # [B, 1, K, V]
    length = entries.num_steps + options.window
    state = ColumnState(
        cache=cache,
        tokens=steps.new_zeros(batch_size, length, entries.codebooks),
        lengths=steps.new_ones(batch_size),
        draft_law=None,
        pending=torch.zeros(batch_size, dtype=torch.bool, device=device),
        round=0,
        target_calls=steps.new_ones(batch_size),
        commit_call=steps.new_zeros(batch_size, length),
        meter=None if options.rule.lossless else DivergenceMeter(batch_size, device),
    )
    state.write(steps, entries.draw(noise, target, steps, TOKEN))
    redraft(entries, state, target, steps.new_ones(batch_size), law, noise, options)
    return state


def step(
    model: ColumnModel,
    entries: Entries,
    state: ColumnState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ColumnOptions,
    watch: Stopwatch,
) -> None:
    """One target call: score the window, keep the columns before the first refusal, replace that one, draft again.

    Updates `state`. Commits 0 to W columns a row, 0 only where the replacement is pending; a finished row stays as it
    is. No host synchronisation on CUDA.
    """
    device = state.tokens.device
    columns = torch.arange(options.window, device=device)
    steps = state.lengths[:, None] + columns  # [B, W], the steps this call scores
    inputs = columns_of(state.tokens, steps - 1)  # [B, W, K], the newest committed column, then the drafts
    logits = model(state.cache, entries.with_special(inputs, steps - 1), steps - 1)  # [R, W, K, V]
    watch.lap("model", device)
    target = entries.laws(law, logits, steps, state.cache.guided)  # [B, W, K, V]
    advance, refused_law = verify(entries, state, target, inputs[:, 1:], steps, noise, options)
    redraft(entries, state, target, advance, law, noise, options, refused_law)
    watch.lap("verify", device)


def verify(
    entries: Entries,
    state: ColumnState,
    target: Tensor,
    drafts: Tensor,
    steps: Tensor,
    noise: CounterNoise,
    options: ColumnOptions,
) -> tuple[Tensor, Tensor | None]:
    """Keep the drafted columns before the first refusal, replace that one, and commit them: all but the new drafts.

    Args:
        target: [B, W, K, V], the laws of the columns at `steps`.
        drafts: long [B, W - 1, K], of all but the last of these steps, drawn from `state.draft_law`.
        steps: long [B, W], from the first that is not committed.

    Returns:
        advance: long [B], how many columns are committed.
        refused_law: [B, K, V], what the refused draft was drawn from; None where tokens are tested one by one.
    """
    state.round += 1
    refused_law = None
    found = torch.ones_like(state.pending)
    if state.draft_law is None:
        candidates = entries.draw(noise, target, steps, TOKEN)  # [B, W, K]
        kept = accepted_prefix((candidates[:, :-1] == drafts).all(-1))
        state.write(steps, candidates)
    elif options.unit == CODEBOOK:
        kept = _verify_codebooks(entries, state, target, drafts, steps, noise, options)
    else:
        kept, found, refused_law = _verify_columns(entries, state, target, drafts, steps, noise, options)

    state.commit_call.scatter_(1, steps, torch.full_like(steps, state.round))
    state.target_calls += state.lengths < entries.num_steps
    state.pending = ~found
    advance = kept + found
    state.lengths = (state.lengths + advance).clamp_(max=entries.num_steps)
    return advance, refused_law


def _verify_codebooks(
    entries: Entries,
    state: ColumnState,
    target: Tensor,
    drafts: Tensor,
    steps: Tensor,
    noise: CounterNoise,
    options: ColumnOptions,
) -> Tensor:
    """Test every token by itself. Returns how many columns are kept whole, long [B]; the one behind them is final too.

    Args:
        target: [B, W, K, V].
        drafts: long [B, W - 1, K].
        steps: long [B, W].
    """
    assert state.draft_law is not None
    columns = torch.arange(steps.shape[1], device=steps.device)
    tested = steps[:, :-1]
    laws = target[:, :-1].flatten(1, 2), state.draft_law[:, :-1].flatten(1, 2)  # [B, (W - 1) * K, V]
    probability = options.rule.probability(*laws, drafts.flatten(1)).view(drafts.shape)
    accept = keep = entries.bernoulli(noise, probability, tested, ACCEPT, state.round)  # [B, W - 1, K]
    kept = accepted_prefix(accept.all(-1))
    refused = kept[:, None]  # [B, 1], the column after the kept ones
    if state.meter is not None:
        exact = exact_acceptance(*laws, drafts.flatten(1)).view(drafts.shape)
        counted = (columns[:-1] <= refused)[..., None]
        state.meter.add(
            probability.flatten(1), exact.flatten(1), (counted & entries.valid[tested]).flatten(1)
        )
        if options.coupling == "maximal":
            # A redraft must follow the target law, its label: behind the refusal the exact rule decides.
            keep = torch.where(
                counted, accept, entries.bernoulli(noise, exact, tested, RESIDUAL, state.round)
            )
    drafted = F.pad(drafts, (0, 0, 0, 1), value=-1)  # [B, W, K], the last column has no draft
    stays = F.pad(keep, (0, 0, 0, 1))
    if options.coupling == "maximal":
        # Keep-or-replace is itself a draw from the target law, as close to the draft as can be: behind the refusal
        # it makes the next draft (SCD / MC-SJD).
        refused_drafts = drafted.masked_fill((columns != refused)[..., None], -1)
        law_there = options.rule.refused_target(target.flatten(1, 2), refused_drafts.flatten(1))
        law_there = residual(law_there, state.draft_law.flatten(1, 2)).view(target.shape)
        replacement = entries.draw(noise, law_there, steps, RESIDUAL, state.round)
        state.write(steps, torch.where(stays, drafted, replacement))
    else:
        draft = columns_of(drafted, refused)  # [B, 1, K]
        law_there = options.rule.refused_target(_pick(target, refused)[:, 0], draft[:, 0])
        law_there = residual(law_there, _pick(state.draft_law, refused)[:, 0])[:, None]  # [B, 1, K, V]
        there = steps.gather(1, refused)
        replacement = entries.draw(noise, law_there, there, RESIDUAL, state.round)
        state.write(there, torch.where(columns_of(stays, refused), draft, replacement))
    return kept


def _verify_columns(
    entries: Entries,
    state: ColumnState,
    target: Tensor,
    drafts: Tensor,
    steps: Tensor,
    noise: CounterNoise,
    options: ColumnOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Test every column as one token. Arguments as of `_verify_codebooks`.

    Returns:
        kept: long [B], columns before the first refusal.
        found: bool [B], whether the refused one is replaced.
        refused_law: [B, K, V], what its draft was drawn from.
    """
    assert state.draft_law is not None
    columns = torch.arange(steps.shape[1], device=steps.device)
    tested = steps[:, :-1]
    label = state.draft_law[:, :-1]
    probability = product_acceptance(target[:, :-1], label, drafts)  # [B, W - 1]
    accept = noise.bernoulli(probability, tested * entries.codebooks, ACCEPT, state.round)
    accept[:, :1] &= ~state.pending[:, None]
    kept = accepted_prefix(accept)
    refused = kept[:, None]
    refused_law = _pick(state.draft_law, refused)[:, 0]
    if options.coupling == "maximal":
        # The next drafts are kept or replaced token by token, a draw from the target law that changes few of them.
        exact = exact_acceptance(target[:, :-1].flatten(1, 2), label.flatten(1, 2), drafts.flatten(1))
        exact = exact.view(drafts.shape)
        keep = entries.bernoulli(noise, exact, tested, RESIDUAL, state.round)  # [B, W - 1, K]
        stays = F.pad(keep | (columns[:-1] < refused)[..., None], (0, 0, 0, 1))
        replacement = entries.draw(noise, residual(target, state.draft_law), steps, RESIDUAL, state.round)
        state.write(steps, torch.where(stays, F.pad(drafts, (0, 0, 0, 1)), replacement))
    there = steps.gather(1, refused)
    column, found = draw_product_residual(
        _pick(target, refused)[:, 0],
        refused_law,
        noise,
        entries.slots(there),
        state.round,
        tries=options.tries,
    )
    state.write(there, column[:, None])
    return kept, found, refused_law


def redraft(
    entries: Entries,
    state: ColumnState,
    target: Tensor,
    advance: Tensor,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ColumnOptions,
    refused_law: Tensor | None = None,
) -> None:
    """Draft the W - 1 steps behind the committed ones, and label each draft with the law it is drawn from.

    Args:
        target: [B, C, K, V], the laws of the last call.
        advance: long [B], its columns that were committed. The columns behind them are drafted from their own laws,
            and steps that the call did not reach get an initial draft.
        refused_law: [B, K, V], the label of the first draft where that is pending. The draft itself is refused, and
            any will do.
    """
    exact = options.acceptance == "exact"
    last_law = options.initial_draft == LAST_LAW
    count = target.shape[1]
    offsets = torch.arange(options.window - 1, device=target.device)
    steps = state.lengths[:, None] + offsets  # [B, W - 1]
    source = advance[:, None] + offsets  # the column of `target` that is about the step
    reached = source < count
    drafts = columns_of(state.tokens, steps)  # [B, W - 1, K]
    # Behind the last column its laws stand in, which is the last-law initial draft already. Where the last column is
    # forced and its successor is not, that is token 0 for certain: a poor draft, rightly labelled.
    label = _pick(target, source.clamp(max=count - 1)) if exact or last_law else None  # [B, W - 1, K, V]

    if label is not None and (options.redraws or last_law):
        # Under Gumbel coupling an entry is always drawn with its own noise, so that laws that differ little give
        # the same token; else the noise is fresh in every round.
        stream, round = (TOKEN, 0) if options.coupling == "gumbel" else (DRAFT, state.round)
        drawn = entries.draw(noise, label, steps, stream, round)
        drafts = drawn if options.redraws else torch.where(reached[..., None], drafts, drawn)
    if not last_law:
        if options.initial_draft == UNIFORM:
            allowed = law.law.allowed or (0, target.shape[-1])
            flat = None if label is None else label.flatten(1, 2)
            initial = uniform_draft(noise, entries.slots(steps), state.round, allowed=allowed, law_like=flat)
            tokens, copied = initial.tokens.view(drafts.shape), initial.law
        else:
            # The last column the call reached: committed, or a draft that was drawn just now.
            newest = (state.lengths - advance + count - 1)[:, None]  # [B, 1]
            state.write(steps, drafts)
            tokens = columns_of(state.tokens, newest).expand_as(drafts)
            copied = (
                None
                if label is None
                else torch.full_like(label, -torch.inf).scatter_(-1, tokens[..., None], 0)
            )
        drafts = torch.where(reached[..., None], drafts, tokens)
        if label is not None and copied is not None:
            label = torch.where(reached[..., None, None], label, copied)
    # An initial draft knows nothing of the pattern.
    valid = entries.valid[steps]
    drafts = drafts.masked_fill(~valid, 0)
    state.write(steps, drafts)
    if exact and label is not None:
        label = entries.forced(label, valid)
        if refused_law is not None:
            again = F.pad(state.pending[:, None], (0, label.shape[1] - 1))[
                ..., None, None
            ]  # [B, W - 1, 1, 1]
            label = torch.where(again, refused_law[:, None], label)
        none = torch.full_like(target[:, :1], -torch.inf)
        state.draft_law = torch.cat([label, none], 1)  # [B, W, K, V]


def _pick(laws: Tensor, columns: Tensor) -> Tensor:
    """laws [B, C, K, V] at columns [B, N]: [B, N, K, V]."""
    return columns_of(laws.flatten(2), columns).view(*columns.shape, *laws.shape[2:])


class ColumnJacobiSampler(Relaxable, SchedulerMixin, ConfigMixin):
    """Jacobi decoding of several codebooks: several columns a call, from the autoregressive law or near it.

    As `SpeculativeJacobiSampler`, with the column as the unit: SJD (Teng et al., ICLR 2025) and its couplings (SCD /
    MC-SJD, So et al., ICML 2026) for models that predict K codebooks at once. Acceptance "identical" returns the tokens
    of `ColumnAutoregressiveSampler` for the same generator. "exact" tests a column with one coin, unit "column", or
    each token with a coin of its own, unit "codebook"; the former never keeps a column less often. All are lossless.

    The relaxed acceptances are not. They test each token beside those of similar sound (`columns_relaxed`), so they
    need unit "codebook", and the trace measures their cost, per token.

    Args:
        window: steps scored by one call, at least 1.
        coupling: how the drafts of an entry in successive rounds depend on each other: "gumbel", "independent" or
            "maximal".
        acceptance: "identical" (needs coupling "gumbel"), "exact", "grouped", "clustered" or "lantern".
        unit: "column" or "codebook". Under "identical" it makes no difference.
        initial_draft: the draft of a step that enters the window: "uniform" over the allowed ids, a copy of the column
            to the "left", or a draw from the laws of the last column scored, "last_law".
        group_size, probability_gap, code_distance, delta, factor, neighbours, bounded: of the relaxed acceptances; see
            `Relaxation`.

    Raises:
        ValueError: a value that is not one of these.
    """

    config_name = "sampler_config.json"

    @register_to_config
    def __init__(
        self,
        window: int = 16,
        coupling: str = "gumbel",
        acceptance: str = "identical",
        unit: str = "column",
        initial_draft: str = "left",
        group_size: int = 14,
        probability_gap: float = 0.15,
        code_distance: float | None = 0.5,
        delta: float = 0.1,
        factor: float | None = None,
        neighbours: int = 64,
        bounded: bool = False,
    ) -> None:
        _ = self.relaxation, self.options  # which refuse what is not allowed

    @property
    def options(self) -> ColumnOptions:
        """The configuration as a checked record. A relaxed acceptance puts its rule in when the tables are made."""
        names = ("window", "coupling", "acceptance", "unit", "initial_draft")
        settings = {name: self.config[name] for name in names}
        if settings["acceptance"] in RELAXED:
            if settings["unit"] != CODEBOOK:
                raise ValueError(
                    f"acceptance={settings['acceptance']!r} tests each token, got unit={settings['unit']!r}; "
                    "pass unit='codebook'."
                )
            settings["acceptance"] = "exact"
        return ColumnOptions(**settings)

    @property
    def identical(self) -> bool:
        """Whether the tokens are those of `ColumnAutoregressiveSampler` for the same generator."""
        return self.options.acceptance == "identical"

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
        codebook: Tensor | None = None,
    ) -> SampleResult:
        """Decode a batch. Arguments, result and errors are those of `ColumnAutoregressiveSampler.__call__`.

        `codebook`, [K, V, D], is needed where `needs_codebook` says so: the codes of each codebook as they are decoded.
        The trace's `tokens_per_call` are columns per call. On CUDA the end is noticed one call late, so `callback` may
        be called once more after the last commit.
        """
        check_column_request(model, law, batch_size)
        relaxation = self.relaxation
        check_codebooks(relaxation, codebook, model.grid.codebooks, model.vocab_size)
        keys = draw_keys(generator, batch_size)
        window, num_steps = self.config["window"], model.grid.num_tokens
        watch = Stopwatch()
        cache = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=window)
        device = cache.logits.device
        watch.lap("prefill", device)
        rule = rule_by_codebook(relaxation, codebook, model.grid.codebooks, device)
        options = replace(self.options, rule=rule)
        noise, entries = CounterNoise(keys, device), Entries(model, window, device)
        checked = CheckedLaw(law, num_steps, deferred=device.type == "cuda")
        state = prepare(entries, cache, checked, noise, options)

        def advance() -> None:
            step(model, entries, state, checked, noise, options, watch)

        result = decode(self, state, checked, noise, advance, watch, callback)
        every = torch.arange(num_steps, device=device)
        return SampleResult(entries.with_special(result.tokens, every), result.trace)
