"""The base of every sampler: a frozen configuration, and a decode that checks, prefills, prepares, steps and reports.

A method writes two functions:

    prepare(run) -> state      the state after the prefill
    step(run, state)           one call of the model

`Run` holds what stays the same from call to call, `State` holds what changes. Nothing else survives a step, so the
exactness tests can drive the same code that decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.samplers.core.acceptance import EXACT, IDENTICAL, AcceptanceRule
from visual_spec.samplers.core.active import WATCHER, ActiveSamples, HostCopy, counted
from visual_spec.samplers.core.checks import (
    CheckedLaw,
    check_guided,
    check_parts,
    check_request,
    check_returned,
    check_text_law,
)
from visual_spec.samplers.core.graph import can_record, can_record_prefill, prefilled, recorded, wants_graph
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise, draw_keys
from visual_spec.samplers.core.precision import (
    EXACT_WIDTH,
    low_precision_of,
    rounding_unit,
    scales_by_batch,
    watched,
)
from visual_spec.samplers.core.relaxation import RELAXED, Relaxation
from visual_spec.samplers.core.trace import DecodeTrace, DivergenceMeter, SampleResult, Stopwatch
from visual_spec.samplers.core.verification import TOKENS
from visual_spec.samplers.core.window import AUTO, WindowPolicy, adaptive

Callback = Callable[[int, Tensor], Any]
_AHEAD = 32  # slots behind the window whose noise is drawn with it on the host
STOP = "stop"  # what a callback returns to end the decode


@dataclass
class Run:
    """What stays the same from call to call of one decode.

    Attributes:
        model, condition, batch_size: as given. Completed samples leave the batch, so steps take its size from the
            state.
        cache: the model's own state after its prefill.
        law: turns logits into laws, and checks them.
        law_given: the law as given. Methods whose law varies from call to call replace `law` by others.
        noise: the noise of the samples.
        watch: measures the time of each phase.
        rule: the rule that tests drafts, with its tables.
        parts: the other arguments of the call, by the names in the sampler's `takes`.
        tables: tensors that the method computed once for the whole decode.
        view: what a slot holds, one token or a column (`TokenView`).
        fixed_width: positions of every call of the model; None: as many as there are to score.
        unit: the unit to which numbers are rounded (`rounding_unit`) where near-ties are counted; else None.
        end: the token at which a sample ends; None: none does.
    """

    model: Any
    condition: Any
    batch_size: int
    cache: Any
    law: CheckedLaw
    law_given: TokenLaw
    noise: CounterNoise
    watch: Stopwatch
    rule: AcceptanceRule = EXACT
    parts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)
    view: Any = TOKENS
    fixed_width: int | None = None
    unit: float | None = None
    end: int | None = None

    def score(self, cache: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        """Call the model on a window, and fill the window up where all calls have one width.

        The tokens behind the window are zeros. No position of the window sees them, and each is written again before
        it is seen.

        Args:
            tokens: long [B, W], or [B, W, K] columns.
            slots: long [B, W], consecutive.

        Returns:
            logits [R, W, ...], as from the model.
        """
        width = slots.shape[1]
        if self.fixed_width is None:
            return self.model(cache, tokens, slots)
        extra = self.fixed_width - width
        behind = slots[:, -1:] + torch.arange(1, extra + 1, device=slots.device)
        shape = (len(tokens), extra, *tokens.shape[2:])
        tokens, slots = torch.cat([tokens, tokens.new_zeros(shape)], 1), torch.cat([slots, behind], 1)
        logits = self.model(cache, tokens, slots)
        rest = (None,) * (logits.dim() - 2)
        logits = check_returned(logits, len(tokens), self.guided, self.fixed_width, *rest)[:, :width]
        cache.narrow(width)
        return logits

    @property
    def guided(self) -> bool:
        """Whether the model also runs unconditional rows."""
        return self.cache.guided

    @property
    def device(self) -> torch.device:
        """The device of the decode."""
        return device_of(self.cache)

    @property
    def num_tokens(self) -> int:
        """Number of slots to decode."""
        return self.law.num_tokens

    @property
    def drafter_condition(self) -> Any:
        """The condition of a second model that is no feature drafter: its own, or else the target's."""
        own = self.parts.get("drafter_condition")
        return self.condition if own is None else own

    @property
    def drafter(self) -> Any:
        """The second model, if the sampler takes one."""
        return self.parts.get("drafter")

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to `phase`."""
        self.watch.lap(phase, self.device)


def device_of(cache: Any) -> torch.device:
    """Return the device of a model's state."""
    return cache.device if hasattr(cache, "device") else cache.logits.device


@dataclass
class State:
    """A batch between two calls. Row b has committed its first `lengths[b]` slots. Axis 0 of all tensors is the sample.

    Attributes:
        cache: the model's own state.
        tokens: long [B, L + scratch], by slot: committed tokens, then drafts, then scratch. Models of columns have
            [B, L + scratch, K].
        lengths: long [B].
        round: index of the last call (the prefill is 0); a long tensor [] where calls are recorded as graphs.
        target_calls: long [B].
        commit_call: long [B, L + scratch], by slot: the last call whose window held the slot. For a committed slot that
            is the call that committed it.
        meter: measures what a lossy rule does to the law; None for a lossless rule.
        near_ties: long [B], committed slots at near-ties; None where they are not counted.
        end: the token at which a sample ends, see `TokenLaw.end`.
    """

    cache: Any
    tokens: Tensor
    lengths: Tensor
    round: int | Tensor
    target_calls: Tensor
    commit_call: Tensor
    meter: DivergenceMeter | None
    near_ties: Tensor | None = field(default=None, kw_only=True)
    end: int | None = field(default=None, kw_only=True)

    @classmethod
    def begin(cls, run: Run, scratch: int, **more: Any) -> Self:
        """Return the state after the prefill of a next-token model: slot 0 is drawn from its law and committed.

        Args:
            scratch: number of slots past the grid that calls may write.
            more: the other fields of a subclass.
        """
        view, logits = run.view, run.view.first(run.cache.logits)
        slots = torch.zeros(run.batch_size, 1, dtype=torch.long, device=run.device)
        tokens = view.empty(slots, run.num_tokens + scratch)
        view.write(tokens, slots, view.draw(run.law, run.noise, logits, slots, run.guided))
        state = cls(
            cache=run.cache,
            tokens=tokens,
            lengths=slots.new_ones(run.batch_size),
            round=0,
            target_calls=slots.new_ones(run.batch_size),
            commit_call=slots.new_zeros(tokens.shape[:2]),
            meter=None if run.rule.lossless else DivergenceMeter(run.batch_size, run.device),
            near_ties=None if run.unit is None else torch.zeros_like(slots[:, 0]),
            end=run.end,
            **more,
        )
        state._stop_at_ends(slots, torch.zeros_like(state.lengths), run.num_tokens)
        return state

    def next_slots(self, count: int) -> Tensor:
        """Return the `count` slots after the committed tokens of each row: long [B, count]."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def commit(self, slots: Tensor, count: Tensor, num_tokens: int, near: Tensor | None = None) -> None:
        """Commit the first `count`, long [B], of the slots long [B, N] of a call; complete rows do not change.

        Args:
            near: bool [B, N], the near-ties among the slots, where they are counted.
        """
        if near is not None:
            assert self.near_ties is not None
            taken = torch.arange(near.shape[1], device=near.device) < count[:, None]
            self.near_ties = self.near_ties + (near & taken & (slots < num_tokens)).sum(1)
        self.commit_call.scatter_(1, slots, torch.zeros_like(slots) + self.round)
        self.target_calls += self.lengths < num_tokens
        before, self.lengths = self.lengths, (self.lengths + count).clamp_(max=num_tokens)
        self._stop_at_ends(slots, before, num_tokens)

    def _stop_at_ends(self, slots: Tensor, before: Tensor, num_tokens: int) -> None:
        """Complete the rows that committed an end: what follows it holds ends, which no call committed.

        Args:
            slots: long [B, N], those of the call.
            before: long [B], the committed slots before the call.
        """
        if self.end is None:
            return
        new = (slots >= before[:, None]) & (slots < self.lengths[:, None])
        ends = new & (self.tokens.gather(1, slots) == self.end)
        first = torch.where(ends, slots, num_tokens).amin(1)  # [B], num_tokens where there is none
        after = torch.arange(self.tokens.shape[1], device=slots.device) > first[:, None]
        self.tokens = self.tokens.masked_fill(after, self.end)
        self.commit_call = self.commit_call.masked_fill(after, -1)
        self.lengths = torch.where(first < num_tokens, num_tokens, self.lengths)


class Sampler(SchedulerMixin, ConfigMixin):
    """A decoding method: a frozen configuration without tensors, swapped like a scheduler of diffusers.

    Attributes:
        takes: names of the arguments of a call beside the model, its condition and the law, such as "drafter".
        needs_drafter: whether the sampler drafts with a second model.
        promise: "identical", "lossless" or "lossy" for a sampler without a setting `acceptance`; else None.
        counts_prefill: whether the prefill predicts the first slots and therefore counts as call 0.
        records_steps: whether the setting `graph` records whole steps; else the method records what it says.
        reads_text: whether the method decodes laws that read the tokens before the slot, and ends that come early.
    """

    config_name = "sampler_config.json"
    config: Any
    takes: tuple[str, ...] = ()
    needs_drafter: bool = False
    promise: ClassVar[str | None] = None
    counts_prefill: ClassVar[bool] = True
    records_steps: bool = True
    reads_text: ClassVar[bool] = False

    # -- what a method must write

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        """Refuse, before any compute, a request that cannot be decoded.

        Raises:
            ValueError, TypeError: the request cannot be decoded; the message says what can.
        """
        check_request(model, law, batch_size)

    def window_of(self, model: Any) -> int:
        """Return the most slots that one call of the model scores."""
        return 1

    def prepare(self, run: Run) -> Any:
        """Return the state after the prefill."""
        raise NotImplementedError

    def step(self, run: Run, state: Any) -> None:
        """Make one call of the model and update `state`, without host synchronisation on CUDA."""
        raise NotImplementedError

    # -- what a method may override

    @property
    def fixed_width(self) -> int | None:
        """Positions of every call of the model under the setting `exact_width`; None: as many as there are to score."""
        return EXACT_WIDTH if self.config.get("exact_width") else None

    @property
    def identical(self) -> bool:
        """Whether the tokens equal those of plain decoding with the same generator."""
        return (self.promise or self.config.acceptance) == "identical"

    @property
    def lossless(self) -> bool:
        """Whether the output law equals that of plain decoding."""
        return (self.promise or self.config.acceptance) not in ("lossy", *RELAXED)

    @property
    def measures_at_least(self) -> bool:
        """Whether the measured divergence is only a lower bound, as that of an unbounded relaxed rule on one draft."""
        return "acceptance" in self.config and not (self.relaxation.lossless or self.relaxation.bounded)

    measures_at_most: ClassVar[bool] | property = False  # whether it is only an upper bound

    @property
    def needs_codebook(self) -> bool:
        """Whether a call needs `codebook`, the code of every token as the decoder sees it."""
        return "acceptance" in self.config and self.relaxation.needs_codebook

    @property
    def relaxation(self) -> Relaxation:
        """The relaxed rule of the configuration, with its numbers."""
        return Relaxation.of(self.config.acceptance, self.config.get("relaxation"))

    def rule(self, model: Any, parts: dict[str, Any], device: torch.device) -> AcceptanceRule:
        """Return the rule that tests drafts, with its tables."""
        if "acceptance" not in self.config or self.config.acceptance == "exact":
            return EXACT
        if self.config.acceptance == "identical":
            return IDENTICAL
        from visual_spec.samplers.core.relaxed import rule_of  # with its tables and kernels

        return rule_of(self.relaxation, parts.get("codebook"), device)

    def serve(self, model: Any, law: TokenLaw, keys: Tensor) -> Any:
        """Return the model that the method calls: `model` itself, or one around it, such as along an order."""
        return model

    def view(self, model: Any, device: torch.device) -> Any:
        """Return how tokens are read and written, see `TokenView`."""
        return TOKENS

    def prefill(
        self, model: Any, condition: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]
    ) -> Any:
        """Run the model's prefill on the condition."""
        window = self.fixed_width or self.window_of(model)
        cache = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=window)
        check_guided(cache, law.guided)
        cache.fixed = self.fixed_width is not None
        return cache

    def num_slots(self, model: Any, parts: dict[str, Any]) -> int:
        """Return the number of slots of one sample. The law does not check logits of later slots."""
        return model.grid.num_tokens

    def num_calls(self, run: Run) -> int | None:
        """Return the number of steps if it is known beforehand; None: step until every sample is complete."""
        return None

    def planned_calls(self, model: Any, parts: dict[str, Any]) -> int | None:
        """Return how often the callback of a decode is called, where that is a setting; None: it is not."""
        return None

    def progress(self, run: Run, state: Any) -> Tensor:
        """Return how many slots each sample has, long [B]. A sample is complete at `run.num_tokens`."""
        return state.lengths

    def committed(self, run: Run, state: Any) -> Tensor:
        """Return which slots of each sample are committed, bool [B, L]; asked where a callback ends the decode."""
        return torch.arange(run.num_tokens, device=run.device) < state.lengths[:, None]

    def answered(self, run: Run, state: Any, answer: Any) -> None:
        """Use what a callback returned, where a method can: by default nothing is done with it."""

    def measure(self, run: Run, state: Any, tokens: Tensor) -> tuple[float | None, Tensor | None]:
        """Return `divergence` and `moved_mass` of the trace: what the decode did to the law."""
        if state.meter is None:
            return None, None
        return state.meter.mean(), state.meter.moved.cpu()

    def result(self, run: Run, state: Any, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        """Return the result, from tokens [B, L] and the fields of the trace."""
        return SampleResult(tokens, DecodeTrace(**trace))

    # -- one decode

    def begin(
        self,
        model: Any,
        condition: Any,
        law: TokenLaw,
        keys: Tensor,
        watch: Stopwatch | None = None,
        cache: Any = None,
        **parts: Any,
    ) -> Run:
        """Run the prefill, and set up what `prepare` and `step` read.

        Args:
            keys: int64 [B], one key a sample (`draw_keys`).
            cache: the model's state, if the prefill has been run.
            parts: the arguments listed by `takes`.
        """
        watch, given = watch or Stopwatch(), law
        if getattr(law, "reads_text", False):
            from visual_spec.samplers.core.prefix import reading_text

            model, law = reading_text(model, law)
        model = self.serve(model, law, keys)
        if cache is None:
            with watched(model, wanted="acceptance" in self.config):
                cache = self.prefill(model, condition, law, len(keys), parts)
        watch.lap("prefill", device := device_of(cache))
        vocab, deferred = getattr(model, "vocab_size", None), device.type == "cuda"
        checked = CheckedLaw(law, self.num_slots(model, parts), deferred=deferred, vocab_size=vocab)
        rule = self.rule(model, parts, device)
        ahead = self.window_of(model) + _AHEAD
        noise = CounterNoise(keys, device, keep=ahead if device.type == "cpu" else 0)
        run = Run(model, condition, len(keys), cache, checked, given, noise, watch, rule, parts)
        run.end, run.view = getattr(given, "end", None), self.view(model, device)
        run.fixed_width = self.fixed_width
        if rule is not None and rule.identical and self.fixed_width is None:
            low = low_precision_of(model)
            run.unit = rounding_unit(low) if low else None
        return run

    def _prefilled(
        self, model: Any, condition: Any, key: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Run a prefill that can be recorded, see `prefilled`; a state of None: it was not run."""
        if not can_record_prefill(model) or type(self).prefill is not Sampler.prefill:
            return key, None, None
        given: Any = dict(guided=law.guided, window=self.fixed_width or self.window_of(model))
        given |= dict(drafter=parts.get("drafter"), strict=self.config.graph is True)
        with watched(model, wanted="acceptance" in self.config):
            key, cache, prefill = prefilled(model, condition, key, batch_size=batch_size, **given)
        check_guided(cache, law.guided).fixed = self.fixed_width is not None
        return key, cache, prefill

    def paced(self, advance: Callable[[], None], run: Run, state: Any) -> Callable[[], None]:
        """Return `advance`, with the state's `width` set before each call where calls differ in it."""
        if self.config.get("window") != AUTO or self.fixed_width is not None:
            return advance
        policy = WindowPolicy.of(run.model, (run.batch_size, run.law_given.guided, str(run.device)))
        return adaptive(advance, state, policy, run.num_tokens)

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        condition: Any,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
        **parts: Any,
    ) -> SampleResult:
        """Decode a batch.

        Args:
            model: a model that answers the calls of this sampler.
            condition: what the model's `prefill` takes, `batch_size` rows of it.
            law: how logits become the distribution a token is drawn from.
            generator: one `torch.Generator` for the batch, a list of one a sample, or None (PyTorch's default).
            callback: called after every target call with the call's index (the prefill is 0) and the number of
                committed slots of each sample, long [B], on the model's device. On CUDA the sampler notices the end one
                call late, so it may call back once more after the last commit. If it returns `STOP`, the decode ends
                there: `trace.commit_call` is -1 at slots that are not committed, whose tokens mean nothing.
            parts: the arguments listed by `takes`. `drafter`: the drafting model. `drafter_condition`: what the
                drafter's `prefill` takes, if not `condition`. `codebook`: [V, D], the code of every token as the
                decoder sees it; required if `needs_codebook`.

        Raises:
            ValueError, TypeError: the request cannot be served.
            FloatingPointError: logits that define no law.
        """
        check_parts(self, parts)
        check_text_law(self, model, law)
        self.check(model, law, batch_size, parts)
        graph = self.config.get("graph", False)
        # What reads the text may be any function of it, on the host.
        recording = self.records_steps and wants_graph(graph, model) and not getattr(law, "reads_text", False)
        keys, watch = draw_keys(generator, batch_size), Stopwatch()
        # What a recording depends on. Only the prefill uses `drafter_condition`.
        others = [part for name, part in parts.items() if name != "drafter_condition"]
        key: Any = (type(self), repr(sorted(self.config.items())), law, batch_size, *others)
        cache = prefill = None
        if recording:
            key, cache, prefill = self._prefilled(model, condition, key, law, batch_size, parts)
        run = self.begin(model, condition, law, keys, watch, cache=cache, **parts)
        state = self.prepare(run)

        # The recording outlives this decode. Of the prefill it reads only what the state holds.
        lasting = replace(run, condition=None, cache=None)

        def call(state: Any, law: CheckedLaw, noise: CounterNoise) -> None:
            self.step(replace(lasting, cache=state.cache, law=law, noise=noise), state)

        def advance() -> None:
            self.step(run, state)

        recording = recording and (graph is True or can_record(state))
        if recording:
            state.round = torch.full((), state.round, dtype=torch.long, device=run.device)
            run.noise.keep = 0  # later decodes write their keys over these
            fixed, advance = recorded(
                model,
                key,
                call,
                (state, run.law, run.noise),
                run.watch,
                drafter=run.drafter,
                prefill=prefill,
                strict=graph is True,
            )
            state, run.law, run.noise = fixed
        advance = self.paced(advance, run, state)
        shrinks = not recording and self.fixed_width is None
        return decode(self, run, state, advance, callback, shrinks=shrinks)


def decode(
    sampler: Sampler,
    run: Run,
    state: Any,
    advance: Callable[[], None],
    callback: Callback | None,
    *,
    shrinks: bool,
) -> SampleResult:
    """Call `advance`, one step on `state`, until every sample is complete; then build the result.

    Args:
        shrinks: whether completed samples leave the batch. False for steps that were recorded for the whole batch, and
            where all calls have one shape.
    """
    active, num_tokens = ActiveSamples(state), run.num_tokens
    shrinks, on_host = shrinks and active.can_shrink, HostCopy()
    num_calls, steps, watcher = sampler.num_calls(run), 0, WATCHER.get()
    first = 1 if sampler.counts_prefill else 0  # index of the first step's call

    def stops(call: int) -> bool:
        """Tell the callback and the watcher about a call. Returns whether they end the decode."""
        answer = None
        if callback is not None:
            answer = callback(call, active.whole("progress", sampler.progress(run, state)).clone())
            sampler.answered(run, state, answer)
        if watcher is not None and watcher(lambda: _result(sampler, run, state, active, cut=True)) is STOP:
            return True
        return answer is STOP

    stopped = bool(first) and stops(0)
    while steps != num_calls and not stopped:
        if num_calls is None:
            progress = on_host(sampler.progress(run, state))
            if progress is not None:
                ended = progress == num_tokens
                if ended.all():
                    break
                # Removing samples copies the caches, which costs a call or two: large batches remove them in groups.
                if shrinks and 8 * int(ended.sum()) >= len(ended):
                    active.leave(ended, sampler.progress(run, state), run.law, run.noise)
                    on_host = HostCopy()
        advance()
        stopped = stops(steps + first)
        steps += 1
    return _result(sampler, run, state, active, cut=stopped and steps != num_calls)


def _result(sampler: Sampler, run: Run, state: Any, active: ActiveSamples, *, cut: bool) -> SampleResult:
    """Build the result of a decode. `cut`: a callback ended it before its last step."""
    tokens = active.whole("tokens", state.tokens)[:, : run.num_tokens].clone()
    divergence, moved_mass = sampler.measure(run, state, tokens)
    run.law.finish()
    seconds, phase_seconds = run.watch.read()
    commit_call = active.whole("commit_call", state.commit_call)[:, : run.num_tokens].cpu()
    stopped = cut
    if cut:
        done = torch.ones(commit_call.shape, dtype=torch.bool)
        done[active.samples.cpu()] = sampler.committed(run, state).cpu()
        commit_call = commit_call.masked_fill(~done, -1)
        stopped = sampler.num_calls(run) is not None or not bool(done.all())
    trace = dict(
        sampler=type(sampler).__name__,
        lossless=sampler.lossless,
        identical=sampler.identical,
        target_calls=active.whole("target_calls", state.target_calls).cpu(),
        commit_call=commit_call,
        seconds=seconds,
        phase_seconds=phase_seconds,
        peak_memory=run.watch.peak_memory(run.device),
        divergence=divergence,
        moved_mass=moved_mass,
        at_least=sampler.measures_at_least,
        at_most=sampler.measures_at_most,
        stopped=stopped,
    )
    if "acceptance" in sampler.config:  # it tests drafts, so its calls are wider than those of plain decoding
        trace |= dict(low_precision=low_precision_of(run.model), scales_by_batch=scales_by_batch(run.model))
        trace |= dict(exact_width=run.fixed_width is not None if "exact_width" in sampler.config else None)
    trace |= {name: active.whole(name, here).cpu() for name, here in counted(state).items()}
    return sampler.result(run, state, tokens, trace)
