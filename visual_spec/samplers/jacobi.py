"""Speculative Jacobi decoding: a window of drafts is scored in one call, and the kept ones are committed at once.

The loop is `prepare`, then `step` until every sample is complete. Both are plain functions of a state, so that the
exactness tests drive the very code that decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.kernels.verify import NO_DRAFT, POINT_LAW, UNIFORM_LAW
from visual_spec.models.core.protocol import DecodeState, NextTokenModel
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core import fused
from visual_spec.samplers.core.acceptance import (
    EXACT,
    AcceptanceRule,
    accepted_prefix,
    exact_acceptance,
    identical_acceptance,
    residual,
)
from visual_spec.samplers.core.base import columns_of, decode
from visual_spec.samplers.core.checks import CheckedLaw, check_count, check_coupled, check_request
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.drafts import INITIAL_DRAFTS, LAST_LAW, UNIFORM, copied_draft, uniform_draft
from visual_spec.samplers.core.graph import AUTO as AUTO_GRAPH
from visual_spec.samplers.core.graph import can_record, check_graph, recorded, wants_graph
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.relaxed import RELAXED, Relaxable
from visual_spec.samplers.core.trace import DivergenceMeter, SampleResult, Stopwatch
from visual_spec.samplers.core.window import AUTO, WIDTHS, WindowPolicy, adaptive


@dataclass(frozen=True)
class JacobiOptions:
    """The configuration of the sampler, checked. See `SpeculativeJacobiSampler`.

    Acceptance is "identical" or "exact"; the latter tests by `rule`, which relaxed acceptances replace.
    """

    window: int
    coupling: str
    acceptance: str
    initial_draft: str
    rule: AcceptanceRule = EXACT

    def __post_init__(self) -> None:
        check_count("window", self.window, " (1 is one token a call)")
        check_coupled(self, INITIAL_DRAFTS)

    @property
    def redraws(self) -> bool:
        """Whether drafts are drawn anew after every call, rather than carried over from verification."""
        return self.acceptance == "exact" and self.coupling != "maximal"

    @property
    def fusible(self) -> bool:
        """Whether one kernel can do what follows the model: other rules, and drafts past the window, need the laws."""
        return self.rule is EXACT and self.initial_draft != LAST_LAW


@dataclass
class JacobiState:
    """A batch between two calls. Row b has committed `lengths[b]` tokens, and holds drafts for the next W - 1 slots.

    Attributes:
        cache: the model's own state.
        tokens: long [B, L + W], by slot: committed tokens, then drafts, then scratch.
        lengths: long [B], between 1 and L.
        draft_law: [B, W, V] log-probabilities, the law each draft was drawn from; the last column belongs to the
            slot behind the drafts and is -inf, the law of no draft. None under identical acceptance.
        draft_columns: long [B, W], where `draft_law` is that of the last call, unmoved: which column of it each draft
            was drawn from, or a constant of `kernels.verify`. None: its own.
        round: index of the last call (the prefill is 0); a long tensor [] where calls are recorded as graphs.
        target_calls: long [B].
        commit_call: long [B, L + W], by slot: the last call that had the slot in its window, which for a committed
            slot is the call that committed it.
        meter: what the rule does to the law; None for a lossless one.
        width: slots that the next call scores, at most the window; None: all of it.
    """

    cache: DecodeState
    tokens: Tensor
    lengths: Tensor
    draft_law: Tensor | None
    round: int | Tensor
    target_calls: Tensor
    commit_call: Tensor
    meter: DivergenceMeter | None = None
    draft_columns: Tensor | None = None
    width: int | None = None


def prepare(
    model: NextTokenModel, cache: DecodeState, law: CheckedLaw, noise: CounterNoise, options: JacobiOptions
) -> JacobiState:
    """The state after the prefill: slot 0 is committed, and the first drafts are made."""
    rows, device = cache.logits.shape[0], cache.logits.device
    batch_size = rows // 2 if cache.guided else rows
    slots = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    target = law(cache.logits[:, None], slots, cache.guided)  # [B, 1, V]
    tokens = slots.new_zeros(batch_size, model.grid.num_tokens + options.window)
    if fused.fits(cache.logits):  # drawn as every sampler on this device draws it
        tokens[:, :1] = fused.draw_tokens(law, noise, cache.logits[:, None], slots, cache.guided)
    else:
        tokens[:, :1] = noise.categorical(target, slots, TOKEN)
    state = JacobiState(
        cache=cache,
        tokens=tokens,
        lengths=slots.new_ones(batch_size),
        draft_law=None,
        round=0,
        target_calls=slots.new_ones(batch_size),
        commit_call=torch.zeros_like(tokens),
        meter=None if options.rule.lossless else DivergenceMeter(batch_size, device),
    )
    redraft(model, state, target, slots.new_ones(batch_size), law, noise, options)
    if state.draft_law is not None and options.fusible and fused.fits(cache.logits):
        # Each draft from the law in its own column, said as kernels say it.
        columns = torch.arange(options.window - 1, device=device).expand(batch_size, -1)
        state.draft_columns = F.pad(columns, (0, 1), value=NO_DRAFT)
    return state


def step(
    model: NextTokenModel,
    state: JacobiState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: JacobiOptions,
    watch: Stopwatch,
) -> None:
    """One target call: score the window, keep the drafts before the first refusal, replace that one, draft again.

    Updates `state`. Commits 1 to W tokens a row; a finished row stays as it is. No host synchronisation on CUDA.
    """
    device = state.tokens.device
    columns = torch.arange(options.window if state.width is None else state.width, device=device)
    slots = state.lengths[:, None] + columns  # [B, W], the slots this call scores
    inputs = state.tokens.gather(1, slots - 1)  # the newest committed token, then the drafts
    drafts = inputs[:, 1:]  # [B, W - 1]
    logits = model(state.cache, inputs, slots - 1)  # [R, W, V]
    watch.lap("model", device)
    state.round += 1
    verdict = _verify_fused(law, noise, logits, slots, drafts, state, options)
    target = law(logits, slots, state.cache.guided) if verdict is None else verdict.laws  # [B, W, V]

    if verdict is not None:
        kept = accepted_prefix(verdict.accept)
        if options.redraws:
            refused = kept[:, None]
            state.tokens.scatter_(1, slots.gather(1, refused), verdict.tokens.gather(1, refused))
        else:
            state.tokens.scatter_(1, slots, verdict.tokens)
    elif state.draft_law is None:
        candidates = noise.categorical(target, slots, TOKEN)  # [B, W]
        kept = accepted_prefix(identical_acceptance(candidates[:, :-1], drafts))
        state.tokens.scatter_(1, slots, candidates)
    else:
        laws, tested = (target[:, :-1], state.draft_law[:, :-1]), slots[:, :-1]
        probability = options.rule.probability(*laws, drafts)
        accept = keep = noise.bernoulli(probability, tested, ACCEPT, state.round)  # [B, W - 1]
        kept = accepted_prefix(accept)
        refused = kept[:, None]  # [B, 1], the column after the kept drafts
        if state.meter is not None:
            exact, counted = exact_acceptance(*laws, drafts), columns[:-1] <= refused
            state.meter.add(probability, exact, counted & (tested < model.grid.num_tokens))
            if options.coupling == "maximal":
                # A redraft must follow the target law, its label: behind the refusal the exact rule decides.
                keep = torch.where(counted, accept, noise.bernoulli(exact, tested, RESIDUAL, state.round))
        drafted = F.pad(drafts, (0, 1), value=-1)  # [B, W], the last column has no draft
        if options.coupling == "maximal":
            # Keep-or-replace is itself a draw from the target law, as close to the draft as can be: behind the
            # first refusal it makes the next draft (SCD / MC-SJD).
            refused_draft = drafted.masked_fill(columns != refused, -1)
            law_there = residual(options.rule.refused_target(target, refused_draft), state.draft_law)
            replacement = noise.categorical(law_there, slots, RESIDUAL, state.round)
            state.tokens.scatter_(1, slots, torch.where(F.pad(keep, (0, 1)), drafted, replacement))
        else:
            law_there = options.rule.refused_target(columns_of(target, refused), drafted.gather(1, refused))
            law_there = residual(law_there, columns_of(state.draft_law, refused))
            at = slots.gather(1, refused)
            state.tokens.scatter_(1, at, noise.categorical(law_there, at, RESIDUAL, state.round))

    state.commit_call.scatter_(1, slots, torch.zeros_like(slots) + state.round)
    num_tokens = model.grid.num_tokens
    state.target_calls += state.lengths < num_tokens
    state.lengths = (state.lengths + kept + 1).clamp_(max=num_tokens)
    redraft(model, state, target, kept + 1, law, noise, options, verdict)
    watch.lap("verify", device)


def _verify_fused(
    law: CheckedLaw,
    noise: CounterNoise,
    logits: Tensor,
    slots: Tensor,
    drafts: Tensor,
    state: JacobiState,
    options: JacobiOptions,
) -> fused.Verdict | None:
    """What the branches of `step` find out, by one kernel; None where that does not fit."""
    if not (options.fusible and fused.fits(logits)):
        return None
    window = law, noise, logits, slots, drafts, state.cache.guided
    if state.draft_law is None:
        return fused.verify_identical(*window)
    assert state.draft_columns is not None
    laws = state.draft_law, state.draft_columns
    return fused.verify_exact(*window, *laws, round=state.round, coupling=options.coupling)


def redraft(
    model: NextTokenModel,
    state: JacobiState,
    target: Tensor,
    advance: Tensor,
    law: CheckedLaw,
    noise: CounterNoise,
    options: JacobiOptions,
    verdict: fused.Verdict | None = None,
) -> None:
    """Draft the W - 1 slots behind the committed ones, and label each draft with the law it is drawn from.

    Args:
        target: [B, C, V], the laws of the last call.
        advance: long [B], its columns that were committed. The columns behind them are drafted from their own law,
            and slots the call did not reach get an initial draft.
        verdict: what a kernel found out about that call. It has drawn the drafts, and the laws stay where they are.
    """
    exact = options.acceptance == "exact"
    last_law = options.initial_draft == LAST_LAW
    count = target.shape[1]  # the width of the last call
    offsets = torch.arange(options.window - 1, device=target.device)
    slots = state.lengths[:, None] + offsets  # [B, W - 1]
    source = advance[:, None] + offsets  # the column of `target` that is about the slot
    reached = source < count
    if (
        not exact
    ):  # a wider call before the last one may have scored a slot, too, and its draft needs no label
        reached = reached | (state.commit_call.gather(1, slots) > 0)
    drafts = state.tokens.gather(1, slots)
    label = None
    if verdict is None and (exact or last_law):
        # Behind the last column its law stands in, which is the last-law initial draft already.
        label = columns_of(target, source.clamp(max=count - 1))  # [B, W - 1, V]

    if label is not None and (options.redraws or last_law):
        # Under Gumbel coupling a slot is always drawn with its own noise, so that laws that differ little give
        # the same token; else the noise is fresh in every round.
        stream, round = (TOKEN, 0) if options.coupling == "gumbel" else (DRAFT, state.round)
        drawn = noise.categorical(label, slots, stream, round)
        drafts = drawn if options.redraws else torch.where(reached, drafts, drawn)
    if verdict is not None and verdict.drawn is not None:
        drafts = verdict.drawn.gather(1, source.clamp(max=count - 1))
    if not last_law:
        if options.initial_draft == UNIFORM:
            allowed = law.law.allowed or (0, model.vocab_size)
            initial = uniform_draft(noise, slots, state.round, allowed=allowed, law_like=label)
        else:
            newest = (state.lengths - advance + count - 1)[:, None]  # [B, 1], the last slot the call reached
            initial = copied_draft(
                options.initial_draft, state.tokens, slots, newest, grid=model.grid, law_like=label
            )
        drafts = torch.where(reached, drafts, initial.tokens)
        if label is not None and initial.law is not None:
            label = torch.where(reached[..., None], label, initial.law)
    state.tokens.scatter_(1, slots, drafts)
    if label is not None and exact:
        none = label.new_full((label.shape[0], 1, label.shape[-1]), -torch.inf)
        state.draft_law = torch.cat([label, none], 1)  # [B, W, V]
    elif verdict is not None and exact:
        initial_law = UNIFORM_LAW if options.initial_draft == UNIFORM else POINT_LAW
        columns = torch.where(reached, source, initial_law)
        state.draft_law, state.draft_columns = target, F.pad(columns, (0, 1), value=NO_DRAFT)


class SpeculativeJacobiSampler(Relaxable, SchedulerMixin, ConfigMixin):
    """Jacobi decoding with speculative acceptance: several tokens a call, from the autoregressive law or near it.

    SJD (Teng et al., "Accelerating auto-regressive text-to-image generation with training-free speculative Jacobi
    decoding", ICLR 2025) is coupling "independent" with acceptance "exact". Drawing the drafts of one
    slot with common randomness in successive rounds makes them agree more often: "gumbel" and "maximal" are the two
    couplings of SCD / MC-SJD (So et al., ICML 2026). Acceptance "identical" verifies with the slot's own Gumbel
    noise as well, and returns the tokens of `AutoregressiveSampler` for the same generator. These are lossless.

    The relaxed acceptances of `relaxed.py` are not: "grouped" (GSD, published with coupling "independent"), "clustered"
    (its static variant) and "lantern" (LANTERN, LANTERN++). They fit every coupling, and the trace measures their cost.

    Args:
        window: slots scored by one call, at least 1; or "auto", for acceptance "identical": what commits the most
            tokens a second on this machine, by the calls that were timed (`visual_spec.samplers.core.window`).
        coupling: how the drafts of a slot in successive rounds depend on each other: "gumbel", "independent" or
            "maximal".
        acceptance: "identical" (needs coupling "gumbel"), "exact", "grouped", "clustered" or "lantern".
        initial_draft: the draft of a slot that enters the window: "uniform" over the allowed ids, a copy of the
            token to the "left" or "up", or a draw from the law of the last slot scored, "last_law".
        group_size, probability_gap, code_distance: of "grouped" (the size also of "clustered").
        delta, factor, neighbours: of "lantern".
        bounded: hold a relaxed acceptance back so that no slot moves more than `delta`. All these: see `Relaxation`.
        graph: replay the calls as a CUDA graph, see `visual_spec.samplers.core.graph`; the tokens are the same. "auto"
            does so where it can. Complete samples then stay in the batch to its end.

    Raises:
        ValueError: a value that is not one of these.
    """

    config_name = "sampler_config.json"

    @register_to_config
    def __init__(
        self,
        window: int | str = 32,
        coupling: str = "gumbel",
        acceptance: str = "identical",
        initial_draft: str = "left",
        group_size: int = 14,
        probability_gap: float = 0.15,
        code_distance: float | None = 0.5,
        delta: float = 0.1,
        factor: float | None = None,
        neighbours: int = 64,
        bounded: bool = False,
        graph: bool | str = AUTO_GRAPH,
    ) -> None:
        check_graph(graph)
        _ = self.relaxation, self.options  # which refuse what is not allowed

    @property
    def options(self) -> JacobiOptions:
        """The configuration as a checked record. A relaxed acceptance puts its rule in when the tables are made."""
        names = ("window", "coupling", "acceptance", "initial_draft")
        settings = {name: self.config[name] for name in names}
        if isinstance(settings["window"], str) and settings["window"] != AUTO:
            raise ValueError(f"window={settings['window']!r}; pass an integer of at least 1, or {AUTO!r}.")
        if settings["window"] == AUTO:
            if settings["acceptance"] != "identical":
                raise ValueError(
                    f"window='auto' with acceptance={settings['acceptance']!r}: the window would depend on measured "
                    "times, and with it the tokens of a seed. Pass acceptance='identical', or a number."
                )
            settings["window"] = WIDTHS[-1]
        if settings["acceptance"] in RELAXED:
            settings["acceptance"] = "exact"
        return JacobiOptions(**settings)

    @property
    def identical(self) -> bool:
        """Whether the tokens are those of `AutoregressiveSampler` for the same generator."""
        return self.options.acceptance == "identical"

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
        codebook: Tensor | None = None,
    ) -> SampleResult:
        """Decode a batch. Arguments and errors are those of `AutoregressiveSampler.__call__`, and one more.

        `codebook`, [V, D], is needed where `needs_codebook` says so: the code of every token as it is decoded.

        On CUDA the end is noticed one call late, so `callback` may be called once more after the last commit.
        """
        check_request(model, law, batch_size)
        relaxation, graph = self.relaxation, self.config["graph"]
        relaxation.check(codebook, model.vocab_size)
        recording = wants_graph(graph, model)
        keys = draw_keys(generator, batch_size)
        num_tokens = model.grid.num_tokens
        watch = Stopwatch()
        options = self.options
        cache = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=options.window)
        device = cache.logits.device
        watch.lap("prefill", device)
        options = replace(options, rule=relaxation.rule(codebook, device))
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, num_tokens, deferred=device.type == "cuda")
        state = prepare(model, cache, checked, noise, options)

        def call(state: JacobiState, checked: CheckedLaw, noise: CounterNoise) -> None:
            step(model, state, checked, noise, options, watch)

        parts = state, checked, noise
        advance = partial(call, *parts)
        recording = recording and (graph is True or can_record(cache))
        if recording:
            state.round = torch.zeros((), dtype=torch.long, device=device)
            key = (replace(options, rule=EXACT), relaxation, codebook, law, batch_size)
            parts, advance = recorded(model, key, call, parts, watch, strict=graph is True)
            state, checked, noise = parts
        if self.config["window"] == AUTO:
            policy = WindowPolicy.of(model, (batch_size, law.guided, str(device)))
            advance = adaptive(advance, state, policy, num_tokens)
        return decode(self, state, checked, noise, advance, watch, callback, shrinks=not recording)
