"""Speculative decoding with a drafter: a cheap model drafts a few tokens, one target call scores them all.

The loop is `prepare`, then `step` until every sample is complete. Both are plain functions of a state, so that the
exactness tests drive the very code that decodes. Between two steps there are no drafts: the state is the committed
text, and the caches of the two models.

The drafter's cache is written by slot, as the target's is. Every step begins by feeding it all that the last target
call can have committed, in one call of fixed width (`catch_up`); what it cached of refused drafts is overwritten by
that, so rollback is a number here too.
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

from visual_spec.models.core.protocol import DecodeState, NextTokenModel
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core.acceptance import (
    EXACT,
    AcceptanceRule,
    accepted_prefix,
    exact_acceptance,
    identical_acceptance,
    residual,
)
from visual_spec.samplers.core.base import columns_of, decode
from visual_spec.samplers.core.checks import ACCEPTANCES, CheckedLaw, check_count, check_request
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.drafters import check_drafter, draft_law, start_drafter
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.relaxed import RELAXED, Relaxable
from visual_spec.samplers.core.trace import DivergenceMeter, SampleResult, Stopwatch

# --------------------------------------------------------------------------------------------------------- state


@dataclass
class DraftedState:
    """A batch between two target calls. Row b has committed `lengths[b]` tokens.

    Attributes:
        cache, drafter_cache: the models' own states.
        tokens: long [B, L + C], by slot: committed tokens, then scratch. C: the most that one call commits.
        lengths: long [B], between 1 and L.
        fed: long [B], the slots before it have been fed to the drafter as they are.
        round: index of the last target call (the prefill is 0).
        target_calls: long [B].
        commit_call: long [B, L + C], by slot: the last call that wrote the slot, which for a committed slot is the
            call that committed it.
        meter: what a relaxed rule does to the law; None for a lossless one.
    """

    cache: DecodeState
    drafter_cache: DecodeState
    tokens: Tensor
    lengths: Tensor
    fed: Tensor
    round: int
    target_calls: Tensor
    commit_call: Tensor
    meter: DivergenceMeter | None = None


def prepare(
    model: NextTokenModel,
    cache: DecodeState,
    drafter_cache: Any,
    law: CheckedLaw,
    noise: CounterNoise,
    most: int,
    rule: AcceptanceRule = EXACT,
) -> DraftedState:
    """The state after the prefills: slot 0 is committed.

    Args:
        most: the most tokens that one call commits.
        rule: what drafts will be tested by; a lossy one is measured.
    """
    rows, device = cache.logits.shape[0], cache.logits.device
    batch_size = rows // 2 if cache.guided else rows
    slots = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    target = law(cache.logits[:, None], slots, cache.guided)  # [B, 1, V]
    tokens = slots.new_zeros(batch_size, model.grid.num_tokens + most)
    tokens[:, :1] = noise.categorical(target, slots, TOKEN)
    return DraftedState(
        cache=cache,
        drafter_cache=drafter_cache,
        tokens=tokens,
        lengths=slots.new_ones(batch_size),
        fed=slots.new_zeros(batch_size),
        round=0,
        target_calls=slots.new_ones(batch_size),
        commit_call=torch.zeros_like(tokens),
        meter=None if rule.lossless else DivergenceMeter(batch_size, device),
    )


def catch_up(drafter: Any, state: DraftedState, most: int) -> Tensor:
    """Feed the drafter what was committed since; logits [R, 1, V] behind the newest token.

    The call has `most` columns whatever was committed. Those behind the newest token hold scratch, at slots that are
    written again before anything looks at them.
    """
    slots = state.fed[:, None] + torch.arange(most, device=state.fed.device)  # [B, C]
    logits = drafter(state.drafter_cache, state.tokens.gather(1, slots), slots)  # [R, C, V]
    newest = (state.lengths - 1 - state.fed).clamp_(min=0)[:, None]  # [B, 1]; a finished row has nothing new
    state.fed = state.lengths
    return columns_of(logits, newest.repeat(logits.shape[0] // newest.shape[0], 1))


def commit(state: DraftedState, tokens: Tensor, kept: Tensor, num_tokens: int) -> None:
    """Append the first `kept + 1` of tokens [B, N] to the text; the others go to scratch. Finished rows stay."""
    slots = state.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, N]
    state.round += 1
    state.tokens.scatter_(1, slots, tokens)
    state.commit_call.scatter_(1, slots, torch.full_like(slots, state.round))
    state.target_calls += state.lengths < num_tokens
    state.lengths = (state.lengths + kept + 1).clamp_(max=num_tokens)


# --------------------------------------------------------------------------------------------------------- chain


@dataclass(frozen=True)
class DraftedOptions:
    """The configuration of the sampler, checked. See `DraftedSampler`.

    Acceptance is "identical" or "exact"; the latter tests by `rule`, which relaxed acceptances replace.
    """

    num_drafts: int
    stop_below: float
    acceptance: str
    rule: AcceptanceRule = EXACT

    def __post_init__(self) -> None:
        check_count("num_drafts", self.num_drafts)
        if not 0 <= self.stop_below <= 1:
            raise ValueError(
                f"stop_below={self.stop_below!r}; pass a probability from 0 (never stop early) to 1."
            )
        if self.acceptance not in ACCEPTANCES:
            raise ValueError(f"acceptance={self.acceptance!r}; pass one of {', '.join(ACCEPTANCES)}.")


@dataclass
class Chain:
    """The drafts of one step.

    Attributes:
        tokens: long [B, K].
        law: [B, K, V] log-probabilities that each draft was drawn from; -inf, the law of no draft, behind a stop.
        drafted: bool [B, K], false behind a stop.
    """

    tokens: Tensor
    law: Tensor
    drafted: Tensor


def propose(
    model: NextTokenModel,
    drafter: Any,
    state: DraftedState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: DraftedOptions,
) -> Chain:
    """Draft up to `num_drafts` tokens behind each row's text, one drafter call each."""
    # The identical mode draws with the slot's own noise: what the target would draw, if the drafter were right.
    stream, round = (TOKEN, 0) if options.acceptance == "identical" else (DRAFT, state.round + 1)
    num_tokens = model.grid.num_tokens
    going = state.lengths < num_tokens  # [B], rows that draft on
    tokens, laws, drafted = [], [], []
    logits = catch_up(drafter, state, options.num_drafts + 1)  # [R, 1, V]
    for index in range(options.num_drafts):
        slots = state.lengths[:, None] + index  # [B, 1]
        if index:
            logits = drafter(state.drafter_cache, tokens[-1], slots - 1)
        draft = draft_law(law, logits, slots, state.cache.guided)  # [B, 1, V]
        tokens.append(noise.categorical(draft, slots, stream, round))
        laws.append(draft.masked_fill(~going[:, None, None], -torch.inf))
        drafted.append(going)
        # The draft that was improbable stays a draft; the stop takes effect behind it. See `DraftedSampler`.
        probable = draft.gather(-1, tokens[-1][..., None])[:, 0, 0].exp() >= options.stop_below
        going = going & probable & (slots[:, 0] + 1 < num_tokens)
        if _nobody(going):
            break
    return Chain(torch.cat(tokens, 1), torch.cat(laws, 1), torch.stack(drafted, 1))


def _where_drafted(chain: Chain, probability: Tensor) -> Tensor:
    """0 where there is no draft: what a rule says of a missing one may be anything, even nan."""
    return torch.where(chain.drafted, probability, torch.zeros_like(probability))


def _nobody(going: Tensor) -> bool:
    """Whether the rest of the drafting is idle. Only asked on the CPU: elsewhere asking would stall the device."""
    return going.device.type == "cpu" and not going.any()


def step(
    model: NextTokenModel,
    drafter: Any,
    state: DraftedState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: DraftedOptions,
    watch: Stopwatch,
) -> None:
    """Draft, score the drafts in one target call, keep those before the first refusal, and commit one token more.

    Updates `state`. A finished row stays as it is. No host synchronisation on CUDA.
    """
    device = state.tokens.device
    chain = propose(model, drafter, state, law, noise, options)
    watch.lap("draft", device)
    columns = torch.arange(chain.tokens.shape[1] + 1, device=device)
    slots = state.lengths[:, None] + columns  # [B, K + 1], the slots this call scores
    newest = state.tokens.gather(1, slots[:, :1] - 1)
    logits = model(state.cache, torch.cat([newest, chain.tokens], 1), slots - 1)  # [R, K + 1, V]
    watch.lap("model", device)
    target = law(logits, slots, state.cache.guided)  # [B, K + 1, V]
    round = state.round + 1

    if options.acceptance == "identical":
        committed = noise.categorical(target, slots, TOKEN)  # [B, K + 1]
        accept = identical_acceptance(committed[:, :-1], chain.tokens) & chain.drafted
        kept = accepted_prefix(accept)
    else:
        laws, tested = (target[:, :-1], chain.law), slots[:, :-1]
        probability = _where_drafted(chain, options.rule.probability(*laws, chain.tokens))
        kept = accepted_prefix(noise.bernoulli(probability, tested, ACCEPT, round))
        refused = kept[:, None]  # [B, 1], the column behind the kept drafts
        if state.meter is not None:
            exact = _where_drafted(chain, exact_acceptance(*laws, chain.tokens))
            met = (columns[:-1] <= refused) & chain.drafted
            state.meter.add(probability, exact, met & (tested < model.grid.num_tokens))
        # The slot behind the last draft has no draft: its residual is the target itself, the bonus token's law.
        label = torch.cat([chain.law, torch.full_like(target[:, :1], -torch.inf)], 1)
        draft = F.pad(chain.tokens.masked_fill(~chain.drafted, -1), (0, 1), value=-1)  # [B, K + 1]
        there = options.rule.refused_target(columns_of(target, refused), draft.gather(1, refused))
        there = residual(there, columns_of(label, refused))
        replacement = noise.categorical(there, slots.gather(1, refused), RESIDUAL, round)
        committed = torch.cat([chain.tokens, newest], 1).scatter(1, refused, replacement)
    if hasattr(drafter, "observe"):
        cache: Any = state.cache
        drafter.observe(state.drafter_cache, cache.features, slots - 1)
    commit(state, committed, kept, model.grid.num_tokens)
    watch.lap("verify", device)


# ------------------------------------------------------------------------------------------------------- sampler


class DraftedSampler(Relaxable, SchedulerMixin, ConfigMixin):
    """Speculative decoding: a drafter draws a chain of tokens, the target keeps a prefix of it and adds one.

    Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023, algorithm 1;
    with an `EagleDrafter`, the chain of EAGLE (Li et al., ICML 2024). Lossless for any drafter over the model's tokens,
    but under the relaxed acceptances of `relaxed.py`; the trace measures what those cost.

    Early stop. A row drafts no further once the drafter gave its draft a probability below `stop_below`, and that
    draft stays. So whether slot i has a draft depends on the tokens and laws of the slots before i alone; given those,
    a draft that is there follows the law on its label, and a slot without one is drawn from the target: this is all
    that exactness takes. To drop the improbable draft itself would not be exact: drafts that are left would be
    those of high probability, and their label would be wrong.

    Args:
        num_drafts: the most drafts before a target call, at least 1. Each costs a drafter call.
        stop_below: a probability; 0 never stops early. Shapes stay fixed, so on a GPU a stop saves no time; on
            the CPU drafting ends as soon as all rows have stopped, and fewer columns are scored.
        acceptance: "exact" (keep a draft with probability min(1, target / draft)), "identical" (draft and verify
            with each slot's own noise: the tokens of `AutoregressiveSampler` for the same generator), or a relaxed
            rule: "grouped", "clustered" or "lantern".
        group_size, probability_gap, code_distance, delta, factor, neighbours, bounded: of relaxed rules, see
            `Relaxation`. What each guarantees for drawn drafts is said with the rule.

    Raises:
        ValueError: a value that is not one of these.
    """

    config_name = "sampler_config.json"
    needs_drafter = True

    @register_to_config
    def __init__(
        self,
        num_drafts: int = 5,
        stop_below: float = 0.0,
        acceptance: str = "exact",
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
    def options(self) -> DraftedOptions:
        """The configuration as a checked record. A relaxed acceptance puts its rule in when the tables are made."""
        acceptance = self.config["acceptance"]
        acceptance = "exact" if acceptance in RELAXED else acceptance
        return DraftedOptions(self.config["num_drafts"], self.config["stop_below"], acceptance)

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
        drafter: Any = None,
        drafter_condition: Any = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
        codebook: Tensor | None = None,
    ) -> SampleResult:
        """Decode a batch. Arguments and errors are those of `AutoregressiveSampler.__call__`, and:

        Args:
            drafter: a `NextTokenModel` or `FeatureDrafter` over the model's grid and vocabulary.
            drafter_condition: what the drafter's `prefill` takes, where that is not the model's `condition`.
            codebook: [V, D], the code of every token as it is decoded; needed where `needs_codebook` says so.

        Raises:
            ValueError: no drafter, or one that does not fit the model; the same of a codebook.
        """
        check_request(model, law, batch_size)
        check_drafter(self, model, drafter)
        relaxation = self.relaxation
        relaxation.check(codebook, model.vocab_size)
        most = self.config["num_drafts"] + 1
        keys = draw_keys(generator, batch_size)
        watch = Stopwatch()
        cache = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=most)
        device = cache.logits.device
        asked = condition if drafter_condition is None else drafter_condition
        drafter_cache = start_drafter(drafter, model, cache, asked, batch_size=batch_size, window=most)
        watch.lap("prefill", device)
        options = replace(self.options, rule=relaxation.rule(codebook, device))
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, model.grid.num_tokens, deferred=device.type == "cuda")
        state = prepare(model, cache, drafter_cache, checked, noise, most, options.rule)
        advance = partial(step, model, drafter, state, checked, noise, options, watch)
        return decode(self, state, checked, noise, advance, watch, callback)
