"""The base of every sampler: a frozen configuration, and a decode that checks, prefills, prepares, steps and reports.

A method writes three functions:

    plan(run)                  what all calls have in common, before the prefill
    prepare(run) -> state      the state after the prefill
    step(run, state)           one call of the model

`Run` holds what stays the same from call to call, `State` holds what changes. Nothing else survives a step, so the
exactness tests can drive the same code that decodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Generic, Self

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import modules_of
from visual_spec.models.core.saved import quantised_as
from visual_spec.models.core.settings import in_groups, settings_of, whole
from visual_spec.samplers.core.acceptance import EXACT, RELAXED, AcceptanceRule, Relaxation
from visual_spec.samplers.core.acceptance import IDENTICAL as IDENTICAL_RULE
from visual_spec.samplers.core.checks import (
    CheckedLaw,
    check_guided,
    check_logprobs,
    check_parts,
    check_request,
    check_text_law,
    wants_graph,
)
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise, draw_keys
from visual_spec.samplers.core.precision import (
    EXACT_WIDTH,
    low_precision_of,
    rounding_unit,
    scales_by_batch,
    was_watched,
    watched,
)
from visual_spec.samplers.core.state import (
    SO_FAR,
    WATCHER,
    ActiveSamples,
    HostCopy,
    ModelT,
    Run,
    StateT,
    counted,
)
from visual_spec.samplers.core.trace import (
    IDENTICAL,
    LOSSLESS,
    LOSSY,
    PLAIN,
    DecodeTrace,
    SampleResult,
    Stopwatch,
    kept,
)
from visual_spec.samplers.registry import class_for, class_saved

Callback = Callable[[int, Tensor], object]
_AHEAD = 32  # slots after the window whose noise is drawn with it on the host
STOP = "stop"  # what a callback returns to end the decode


class Sampler(SchedulerMixin, ConfigMixin, Generic[ModelT, StateT]):
    """A decoding method: a frozen configuration without tensors, swapped like a scheduler of diffusers.

    The settings of a constructor are declared with their limits; it refuses others by a `ValueError`.

    Attributes:
        takes: names of the arguments of a call beside the model, its condition and the law, such as "drafter".
        needs_drafter: whether the sampler drafts with a second model.
        law_names: the settings that change the law that plain decoding draws from. Their defaults are plain decoding's.
        keeps: what the rule keeps of plain decoding with the same law settings, in the words of `core.trace`; of a
            sampler with a setting `acceptance`, what that says.
        counts_prefill: whether the prefill predicts the first slots and therefore counts as call 0.
        records_steps: whether the setting `graph` records whole steps; else the method records what it says.
        reads_text: whether the method decodes laws that read the tokens before the slot, and ends that come early.
        gives_logprobs: whether it keeps log-probabilities, see `output_logprobs`.
        no_logprobs: else why not.
    """

    config_name = "sampler_config.json"
    config: Any
    takes: tuple[str, ...] = ()
    needs_drafter: bool = False
    law_names: ClassVar[tuple[str, ...]] = ()
    counts_prefill: ClassVar[bool] = True
    records_steps: bool = True
    reads_text: bool = False
    gives_logprobs: ClassVar[bool] = False
    no_logprobs: ClassVar[str] = "which does not keep them"

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """As usual; settings that moved make an object of the class that has them now, and warn."""
        return object.__new__(class_for(cls, settings))

    @classmethod
    def from_config(cls, config: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As diffusers; a configuration with settings that moved is one of the class that has them now."""
        if not isinstance(config, Mapping):  # diffusers says so
            return super().from_config(config, return_unused_kwargs, **kwargs)
        kind, gone = class_saved(cls, {**config, **kwargs})
        config, kwargs = ({name: one[name] for name in one if name not in gone} for one in (config, kwargs))
        former: Any = super(Sampler, kind)
        return former.from_config(config, return_unused_kwargs, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As of diffusers; what is neither a folder nor a Hub id that can be fetched is refused at once."""
        from visual_spec.models.core.saved import check_there  # folders of samplers are rare

        check_there(pretrained_model_name_or_path, cls.config_name, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def extract_init_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """As diffusers; folders of before 22 November 2026 hold the numbers of a relaxed acceptance one by one."""
        config = dict(config_dict)
        if "relaxation" in cls._get_init_keys(cls):
            flat = {name: config.pop(name) for name in Relaxation.names() if name in config}
            if flat and config.get("acceptance") in RELAXED:
                config["relaxation"] = flat
        known, *others = super().extract_init_dict(config, **kwargs)
        return in_groups(inspect.unwrap(cls.__init__), known), *others

    @staticmethod
    def _get_init_keys(input_class: Any) -> set[str]:
        """As diffusers; a configuration has the settings of groups one by one."""
        own = inspect.signature(input_class.__init__).parameters
        return {*own, *settings_of(inspect.unwrap(input_class.__init__))}

    # -- what a method must write

    def check(self, model: ModelT, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        """Refuse, before any compute, a request that cannot be decoded, by an error that says what can."""
        check_request(model, law)

    def plan(self, run: Run[ModelT]) -> None:
        """Decide, before the prefill, what the calls of this decode have in common.

        By default a call scores one slot of one token, in the model's grid. A method sets `run.window` where it scores
        more; `run.num_tokens` and `run.view` where slots are others or hold something else; `run.model`, where it calls
        another model, around the one that was given.
        """

    def prefill(self, run: Run[ModelT]) -> Any:
        """Run the model's prefill on the condition, and return the model's state."""
        window = run.fixed_width or run.window
        cache = run.model.prefill(run.condition, batch_size=run.batch_size, guided=run.guided, window=window)
        check_guided(cache, run.guided).fixed = run.fixed_width is not None
        return cache

    def prepare(self, run: Run[ModelT]) -> StateT:
        """Return the state after the prefill."""
        raise NotImplementedError

    def step(self, run: Run[ModelT], state: StateT) -> None:
        """Make one call of the model and update `state`, without host synchronisation on CUDA."""
        raise NotImplementedError

    # -- what a method may override

    @property
    def _kept_by_acceptance(self) -> str:
        acceptance = self.config.acceptance
        return IDENTICAL if acceptance == "identical" else LOSSY if acceptance in RELAXED else LOSSLESS

    keeps: Any = _kept_by_acceptance

    @property
    def law_settings(self) -> dict[str, Any]:
        """The settings of the law, by name: plain decoding with the same ones has the law that the rule keeps."""
        settings = {name: self.config.get(name) for name in self.law_names}
        # As files keep them: a configuration that was loaded has lists.
        return {name: list(one) if isinstance(one, tuple) else one for name, one in settings.items()}

    def law_settings_in(self, run: Run[ModelT]) -> dict[str, Any]:
        """Return the same as they are in one run: None where they change nothing there."""
        return self.law_settings

    def promise(self, plain: Sampler | None = None) -> str:
        """Return what is kept of a plain decoding, as `core.trace` says; None: plain decoding with its defaults."""
        if not self.law_names and plain is None:
            return self.keeps
        plain = type(self)() if plain is None else plain
        return kept(self.keeps, self.law_settings, plain.law_settings)

    @property
    def identical(self) -> bool:
        """Whether the tokens equal those of plain decoding, with its defaults and the same generator."""
        return self.promise() == IDENTICAL

    @property
    def lossless(self) -> bool:
        """Whether the output law equals that of plain decoding with its defaults."""
        return self.promise() in (IDENTICAL, LOSSLESS)

    @property
    def measures_at_least(self) -> bool:
        """Whether the measured divergence is only a lower bound, as under an unbounded relaxed rule on one draft."""
        return self.config.get("acceptance") in RELAXED and not self.relaxation.bounded

    @property
    def logprobs_law(self) -> str:
        """What the tokens are to the law of their log-probabilities, see `DecodeTrace.logprobs_law`."""
        moved = self.config.get("acceptance") in RELAXED or self.config.get("greedy")
        return "target" if moved else "drawn"

    measures_at_most: ClassVar[bool] | property = False  # whether it is only an upper bound

    @property
    def needs_codebook(self) -> bool:
        """Whether a call needs `codebook`, the code of every token as the decoder sees it."""
        return self.config.get("acceptance") in RELAXED and self.relaxation.needs_codebook

    @property
    def relaxation(self) -> Relaxation:
        """The relaxed rule of the configuration, with its numbers."""
        return Relaxation.of(self.config.get("acceptance", "exact"), self.config.get("relaxation"))

    def rule(self, model: ModelT, parts: dict[str, Any], device: torch.device) -> AcceptanceRule:
        """Return the rule that tests drafts, with its tables."""
        if "acceptance" not in self.config or self.config.acceptance == "exact":
            return EXACT
        if self.config.acceptance == "identical":
            return IDENTICAL_RULE
        from visual_spec.samplers.core.relaxed import rule_of  # with its tables and kernels

        return rule_of(self.relaxation, parts.get("codebook"), device)

    def planned_calls(self, model: ModelT, parts: dict[str, Any]) -> int | None:
        """Return how often the callback of a decode is called, where settings say it; None: until all is complete."""
        return None

    def progress(self, run: Run[ModelT], state: Any) -> Tensor:
        """Return how many slots each sample has, long [B]. A sample is complete at `run.num_tokens`."""
        return state.lengths

    def committed(self, run: Run[ModelT], state: Any) -> Tensor:
        """Return which slots of each sample are committed, bool [B, L]; asked where a callback ends the decode."""
        return torch.arange(run.num_tokens, device=run.device) < state.lengths[:, None]

    def answered(self, run: Run[ModelT], state: StateT, answer: object) -> None:
        """Use what a callback returned, where a method can: by default nothing is done with it."""

    def measure(self, run: Run[ModelT], state: StateT, tokens: Tensor) -> tuple[float | None, Tensor | None]:
        """Return `divergence` and `moved_mass` of the trace: what the decode did to the law."""
        meter = getattr(state, "meter", None)
        return (None, None) if meter is None else (meter.mean(), meter.moved.cpu())

    def result(self, run: Run[ModelT], state: StateT, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        """Return the result, from tokens [B, L] and the fields of the trace."""
        return SampleResult(tokens, DecodeTrace(**trace))

    # -- one decode

    def begin(
        self,
        model: ModelT,
        condition: object,
        law: TokenLaw,
        keys: Tensor,
        watch: Stopwatch | None = None,
        noise: CounterNoise | None = None,
        prefill: Callable[[Run[ModelT]], Any] | None = None,
        **parts: Any,
    ) -> Run[ModelT]:
        """Decide what all calls have in common, and run the prefill.

        Args:
            keys: int64 [B], one key a sample (`draw_keys`).
            noise: None: drawn by the keys.
            prefill: in place of the method's own.
            parts: the arguments listed by `takes`.
        """
        given, end = law, getattr(law, "end", None)
        if getattr(law, "reads_text", False):
            from visual_spec.samplers.core.history import reading_text

            model, law = reading_text(model, law)
        num_tokens = model.grid.num_tokens if hasattr(model, "grid") else 0
        # Before the prefill.
        run = Run(
            model=model,
            condition=condition,
            batch_size=len(keys),
            law=CheckedLaw(law, num_tokens),
            law_given=given,
            noise=noise or CounterNoise(keys, keys.device),
            watch=watch or Stopwatch(),
            parts=parts,
            num_tokens=num_tokens,
            fixed_width=EXACT_WIDTH if self.config.get("exact_width") else None,
            guided=law.guided,
            end=end,
        )
        self.plan(run)
        run.law.bind(run.num_tokens, getattr(run.model, "vocab_size", None), run.guided)
        if end is None:  # else rows end when they end
            planned = self.planned_calls(run.model, parts)
            run.num_calls = None if planned is None else planned - self.counts_prefill
        if hasattr(run.model, "__dict__"):  # else several models, of which `plan` tells
            run.quantised = quantised_as(*modules_of(run.model))
        # The prefill. A model shows only while it runs what it computes in, so that of a new one is watched.
        verifies = "acceptance" in self.config
        is_new = verifies and not was_watched(run.model)
        if not is_new and (verifies or "exact_width" in self.config):  # else nobody asks
            run.low_precision = low_precision_of(run.model)
        with watched(run.model) if is_new else nullcontext():
            run.filled((prefill or self.prefill)(run))
        run.lap("prefill")
        # After it.
        run.law.deferred = run.device.type == "cuda"
        if noise is None:
            run.noise.keys = keys.to(run.device)
            run.noise.keep = run.window + _AHEAD if run.device.type == "cpu" else 0
        run.rule = self.rule(run.model, parts, run.device)
        if is_new:
            run.low_precision = low_precision_of(run.model)
        if run.rule.identical and run.fixed_width is None and run.low_precision:
            run.unit = rounding_unit(run.low_precision)
        return run

    @torch.no_grad()
    def __call__(
        self,
        model: ModelT,
        condition: object,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | CounterNoise | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
        output_logprobs: bool = False,
        **parts: Any,
    ) -> SampleResult:
        """Decode a batch.

        Args:
            model: a model that answers the calls of this sampler.
            condition: what the model's `prefill` takes, `batch_size` rows of it.
            law: how logits become the distribution a token is drawn from.
            generator: one `torch.Generator` for the batch, a list of one a sample, or None (PyTorch's default); or
                the noise itself.
            callback: called after every target call with the call's index (the prefill is 0) and the number of
                committed slots of each sample, long [B], on the model's device. On CUDA the sampler notices the end one
                call late, so it may call back once more after the last commit; where a graph holds several calls, it
                calls back after each replay. If it returns `STOP`, the decode ends there: `trace.commit_call` is -1 at
                slots that are not committed, whose tokens mean nothing.
            output_logprobs: keep log-probabilities of the tokens in the trace, see `DecodeTrace.logprobs`.
            parts: the arguments listed by `takes`. `drafter`: the drafting model. `drafter_condition`: what the
                drafter's `prefill` takes, if not `condition`. `codebook`: [V, D], the code of every token as the
                decoder sees it; required if `needs_codebook`.

        Raises:
            ValueError, TypeError: the request cannot be served.
            FloatingPointError: logits that define no law.
        """
        whole("batch_size", batch_size)
        check_parts(self, parts)
        check_text_law(self, model, law)
        if output_logprobs:
            check_logprobs(self)
        self.check(model, law, batch_size, parts)
        own: Any = generator if hasattr(generator, "keyed") else None  # noise in place of generators
        keys, watch = draw_keys(generator, batch_size), Stopwatch()
        # What reads the text may be any function of it, on the host; so may noise that is no function of keys.
        reads_text = getattr(law, "reads_text", False)
        recordable = own is None and self.records_steps and not reads_text
        if recordable and wants_graph(self.config.get("graph", False), model):
            from visual_spec.samplers.core.graph import begin_recorded  # on a GPU only

            prefills = type(self).prefill is Sampler.prefill
            run, state, advance = begin_recorded(
                self, model, condition, law, keys, watch, parts, prefills, output_logprobs
            )
        else:
            run = self.begin(model, condition, law, keys, watch, noise=own, **parts)
            run.keeps_scores = output_logprobs
            state, step = self.prepare(run), self.step
            if output_logprobs:
                from visual_spec.samplers.core.logprobs import keeping  # where they are asked for

                step = keeping(self, run, state)
            advance = partial(step, run, state)
        if run.pace is not None:
            advance = run.pace(advance, run, state)
        return decode(self, run, state, advance, callback)


def decode(
    sampler: Sampler[ModelT, StateT],
    run: Run[ModelT],
    state: StateT,
    advance: Callable[[], int | None],
    callback: Callback | None,
) -> SampleResult:
    """Call `advance`, one step on `state` or as many as it returns, until all samples are complete; give the result."""
    active, on_host, watcher = ActiveSamples(state), HostCopy(), WATCHER.get()
    # Completed samples stay in a batch whose steps were recorded, and where all calls have one shape.
    shrinks = not isinstance(state.round, Tensor) and run.fixed_width is None and active.can_shrink
    steps, stopped = 0, False

    def so_far() -> SampleResult:
        return _result(sampler, run, state, active, cut=True)

    while True:
        progress = sampler.progress(run, state)
        if steps or sampler.counts_prefill:  # a target call was made: tell who listens
            answer = None
            if callback is not None:
                before = SO_FAR.set(so_far)
                try:
                    answer = callback(
                        steps - (not sampler.counts_prefill), active.whole("progress", progress).clone()
                    )
                finally:
                    SO_FAR.reset(before)
                if answer is not None:
                    sampler.answered(run, state, answer)
            stopped = answer is STOP or (watcher is not None and watcher(so_far) is STOP)
        if stopped or steps == run.num_calls:
            break
        if run.num_calls is None:
            known = on_host(progress)
            if known is not None:
                ended = known == run.num_tokens
                count = int(ended.sum())
                if count == len(ended):
                    break
                # Removing samples copies the caches, which costs a call or two: large batches remove them in groups.
                if shrinks and 8 * count >= len(ended):
                    active.leave(ended, progress, run.law, run.noise)
                    on_host = HostCopy()
        steps += advance() or 1
    return _result(sampler, run, state, active, cut=stopped and steps != run.num_calls)


def _plain_settings(sampler: Sampler, run: Run, measured: bool) -> dict[str, Any]:
    """Return the law settings of plain decoding in a run, see `PLAIN`; a lossy one that measures nothing has no use."""
    if not sampler.law_names or (sampler.keeps == LOSSY and not measured):
        return sampler.law_settings_in(run)
    plain = PLAIN.get()
    return (type(sampler)() if plain is None else plain()).law_settings_in(run)


def _result(
    sampler: Sampler[ModelT, StateT], run: Run[ModelT], state: StateT, active: ActiveSamples, *, cut: bool
) -> SampleResult:
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
        stopped = run.num_calls is not None or not bool(done.all())
    trace = dict(
        sampler=type(sampler).__name__,
        keeps=sampler.keeps,
        law_settings=sampler.law_settings_in(run),
        plain_settings=_plain_settings(sampler, run, divergence is not None),
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
    trace["quantised"] = run.quantised
    if "acceptance" in sampler.config:  # it tests drafts, so its calls are wider than plain decoding's
        trace |= dict(low_precision=run.low_precision, scales_by_batch=scales_by_batch(run.model))
        trace |= dict(exact_width=run.fixed_width is not None if "exact_width" in sampler.config else None)
    counts = counted(state)
    trace |= {"logprobs_law": sampler.logprobs_law} if "logprobs" in counts else {}
    for name, here in counts.items():
        whole = active.whole(name, here).cpu()
        trace[name] = whole[:, : run.num_tokens].clone() if name.endswith("logprobs") else whole
    return sampler.result(run, state, tokens, trace)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # Python asks for these when it imports
        raise AttributeError(name)
    from visual_spec.moved import find  # for names of earlier versions

    return find(__name__, name)
