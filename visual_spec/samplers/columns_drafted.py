"""Speculative decoding of columns: a cheap model drafts a few columns, one target call scores them all.

The loop is that of `drafted`, the test of a column that of `columns_jacobi`: with one coin for all K codebooks, which
keeps a column drawn from Q with probability min(1, P / Q), as often as any rule can. Drafts come from text that is
committed, and from drafts behind it. In music this is what matters: what is drafted behind a wrong column, as Jacobi
decoding does, is wrong itself (docs/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import ColumnModel, DecodeState
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.columns import Entries, check_column_request
from visual_spec.samplers.columns_jacobi import ColumnOptions, ColumnState, verify
from visual_spec.samplers.core.base import columns_of, decode
from visual_spec.samplers.core.checks import ACCEPTANCES, CheckedLaw, check_count
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.drafters import draft_law, start_drafter
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import DRAFT, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.trace import SampleResult, Stopwatch


class ColumnFeatureDrafter(Protocol):
    """A drafter that looks at what its target makes of the columns, and gives guided logits in one row a sample.

    The other kind of drafter is any `ColumnModel` with the target's steps, codebooks and codes.
    """

    @property
    def vocab_size(self) -> int: ...

    def follow(self, model: Any, state: Any, *, window: int, guidance_scale: float) -> Any:
        """Allocate the drafter's state beside a target that has just been prefilled; it is not `guided`.

        Args:
            window: the most columns that one call of the drafter will have.

        Raises:
            ValueError: the drafter was made for another target.
        """
        ...

    def observe(self, state: Any, steps: Tensor) -> None:
        """Take note of what the target's last call made of the columns at steps [B, W]."""
        ...

    def __call__(self, state: Any, tokens: Tensor, steps: Tensor) -> Tensor:
        """As `ColumnModel.__call__`, logits [B, W, K, V] whether the target is guided or not."""
        ...


@dataclass(kw_only=True)
class DraftedColumnState(ColumnState):
    """A batch between two target calls. There are no drafts; `draft_law[:, 0]` is that of a draft still to be replaced.

    Attributes:
        drafter_cache: the drafter's own state.
        fed: long [B], the steps before it have been fed to the drafter as they are.
    """

    drafter_cache: DecodeState
    fed: Tensor


def prepare(
    entries: Entries,
    cache: DecodeState,
    drafter_cache: Any,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ColumnOptions,
) -> DraftedColumnState:
    """The state after the prefills: step 0 is committed."""
    rows, device = cache.logits.shape[0], cache.logits.device
    batch_size = rows // 2 if cache.guided else rows
    steps = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    target = entries.laws(law, cache.logits[:, None], steps, cache.guided)  # [B, 1, K, V]
    length = entries.num_steps + options.window
    state = DraftedColumnState(
        cache=cache,
        tokens=steps.new_zeros(batch_size, length, entries.codebooks),
        lengths=steps.new_ones(batch_size),
        # No draft is pending, and none is what this law says.
        draft_law=None
        if options.acceptance == "identical"
        else torch.full_like(target, -torch.inf).repeat(1, options.window, 1, 1),
        pending=torch.zeros(batch_size, dtype=torch.bool, device=device),
        round=0,
        target_calls=steps.new_ones(batch_size),
        commit_call=steps.new_zeros(batch_size, length),
        drafter_cache=drafter_cache,
        fed=steps.new_zeros(batch_size),
    )
    state.write(steps, entries.draw(noise, target, steps, TOKEN))
    return state


def propose(
    drafter: Any,
    entries: Entries,
    state: DraftedColumnState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ColumnOptions,
) -> Tensor:
    """Draft the W - 1 columns behind each row's text, long [B, W - 1, K], one drafter call each.

    Labels them in `state.draft_law`; a pending row keeps the label of the draft that was refused.
    """
    # The identical mode draws with the entries' own noise: what the target would draw, if the drafter were right.
    stream, round = (TOKEN, 0) if options.acceptance == "identical" else (DRAFT, state.round + 1)
    # All that the last call can have committed, in one call of fixed width. Columns behind the newest one are scratch,
    # at steps that are fed again before anything looks at them.
    steps = state.fed[:, None] + torch.arange(options.window, device=state.fed.device)  # [B, W]
    logits = drafter(
        state.drafter_cache, entries.with_special(columns_of(state.tokens, steps), steps), steps
    )  # [R, W, K, V]
    newest = (state.lengths - 1 - state.fed).clamp_(min=0)[:, None]  # [B, 1]; a finished row has nothing new
    state.fed = state.lengths
    picked = columns_of(logits.flatten(2), newest.repeat(len(logits) // len(newest), 1))
    logits = picked.view(len(logits), 1, *logits.shape[2:])  # [R, 1, K, V]
    tokens, laws = [], []
    for index in range(options.window - 1):
        steps = state.lengths[:, None] + index  # [B, 1]
        if index:
            fed = entries.with_special(tokens[-1], steps - 1)
            logits = drafter(state.drafter_cache, fed, steps - 1)
        # [B, 1, K, V]
        laws.append(entries.laws(partial(draft_law, law), logits, steps, state.drafter_cache.guided))
        tokens.append(entries.draw(noise, laws[-1], steps, stream, round))
    if state.draft_law is not None:
        refused = state.draft_law[:, :1]
        laws[0] = torch.where(state.pending[:, None, None, None], refused, laws[0])
        # The step behind the last draft has none: it is drawn from the target itself.
        state.draft_law = torch.cat([*laws, torch.full_like(refused, -torch.inf)], 1)  # [B, W, K, V]
    return torch.cat(tokens, 1)


def step(
    model: ColumnModel,
    drafter: Any,
    entries: Entries,
    state: DraftedColumnState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ColumnOptions,
    watch: Stopwatch,
) -> None:
    """Draft, score the drafts in one target call, keep those before the first refusal, and commit one column more.

    Updates `state`. Commits no column only where the replacement of a draft was not found among its tries; the next
    call goes on with them. No host synchronisation on CUDA.
    """
    device = state.tokens.device
    drafts = propose(drafter, entries, state, law, noise, options)  # [B, W - 1, K]
    watch.lap("draft", device)
    columns = torch.arange(options.window, device=device)
    steps = state.lengths[:, None] + columns  # [B, W], the steps this call scores
    state.write(steps[:, :-1], drafts)
    inputs = columns_of(state.tokens, steps - 1)  # [B, W, K], the newest committed column, then the drafts
    logits = model(state.cache, entries.with_special(inputs, steps - 1), steps - 1)  # [R, W, K, V]
    watch.lap("model", device)
    target = entries.laws(law, logits, steps, state.cache.guided)
    _, refused_law = verify(entries, state, target, drafts, steps, noise, options)
    if refused_law is not None and state.draft_law is not None:
        state.draft_law[:, 0] = refused_law
    if hasattr(drafter, "observe"):
        drafter.observe(state.drafter_cache, steps - 1)
    watch.lap("verify", device)


class DraftedColumnSampler(SchedulerMixin, ConfigMixin):
    """Speculative decoding of several codebooks: a drafter draws a chain of columns, the target keeps a prefix of it.

    As `DraftedSampler` (Leviathan et al., ICML 2023, algorithm 1), with the column as the unit; with a
    `ColumnEagleDrafter`, the chain of EAGLE. Lossless for any drafter. It needs one: `pipe.drafter`.

    Args:
        num_drafts: columns drafted before a target call, at least 1. Each costs a drafter call.
        acceptance: "exact", one coin for each column, or "identical": draft and verify with each entry's own noise, for
            the tokens of `ColumnAutoregressiveSampler` for the same generator. That keeps fewer drafts.

    Raises:
        ValueError: a value that is not one of these.
    """

    config_name = "sampler_config.json"
    needs_drafter = True
    lossless = True

    @register_to_config
    def __init__(self, num_drafts: int = 3, acceptance: str = "exact") -> None:
        _ = self.options  # which refuses what is not allowed

    @property
    def options(self) -> ColumnOptions:
        """The configuration as a checked record: that of a window of the newest column and the drafts."""
        num_drafts, acceptance = self.config["num_drafts"], self.config["acceptance"]
        check_count("num_drafts", num_drafts)
        if acceptance not in ACCEPTANCES:
            raise ValueError(f"acceptance={acceptance!r}; pass one of {', '.join(ACCEPTANCES)}.")
        return ColumnOptions(num_drafts + 1, "gumbel", acceptance, "column", "left")

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
        drafter: Any = None,
        drafter_condition: Any = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
    ) -> SampleResult:
        """Decode a batch. Arguments, result and errors are those of `ColumnAutoregressiveSampler.__call__`, and:

        Args:
            drafter: a `ColumnFeatureDrafter`, such as a `ColumnEagleDrafter`, or any `ColumnModel` of the same steps,
                codebooks and codes.
            drafter_condition: what the latter is conditioned on; default: `condition`.

        Raises:
            ValueError: no drafter, or one that does not fit the model.
            FloatingPointError: also of the drafter's logits.
        """
        check_column_request(model, law, batch_size)
        check_column_drafter(model, drafter)
        keys, options = draw_keys(generator, batch_size), self.options
        watch = Stopwatch()
        cache = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=options.window)
        device = cache.logits.device
        drafting = start_drafter(
            drafter,
            model,
            cache,
            condition if drafter_condition is None else drafter_condition,
            batch_size=batch_size,
            window=options.window,
            guidance_scale=law.guidance_scale,
        )
        watch.lap("prefill", device)
        noise, entries = CounterNoise(keys, device), Entries(model, options.window, device)
        checked = CheckedLaw(law, model.grid.num_tokens, deferred=device.type == "cuda")
        state = prepare(entries, cache, drafting, checked, noise, options)

        def advance() -> None:
            step(model, drafter, entries, state, checked, noise, options, watch)

        result = decode(self, state, checked, noise, advance, watch, callback)
        every = torch.arange(model.grid.num_tokens, device=device)
        return SampleResult(entries.with_special(result.tokens, every), result.trace)


def check_column_drafter(model: ColumnModel, drafter: Any) -> None:
    """Refuse, before any compute, a drafter whose columns the model could not score.

    Raises:
        ValueError: no drafter, or one of other codebooks, steps or codes; says what fits.
    """
    fits = f"{model.grid.codebooks} codebooks of {model.vocab_size} codes"
    if drafter is None:
        raise ValueError(
            "DraftedColumnSampler needs a drafter, and got none; pass drafter=..., a ColumnEagleDrafter trained for "
            f"this model (scripts/train_column_drafter.py), or a smaller model of {fits} in the same steps."
        )
    if hasattr(drafter, "follow"):
        return drafter.check_target(model)
    if (drafter.grid, drafter.vocab_size) != (model.grid, model.vocab_size) or not torch.equal(
        drafter.valid.cpu(), model.valid.cpu()
    ):
        raise ValueError(
            f"the drafter predicts {drafter.grid.codebooks} codebooks of {drafter.vocab_size} codes in "
            f"{drafter.grid.num_tokens} steps, but the model {fits} in {model.grid.num_tokens}, and in its own "
            "pattern; pass a drafter of the model's columns."
        )
