"""Masked parallel decoding: MaskGIT, MAGNeT, and other methods made of the same parts.

All tokens are hidden at first. Every step is one forward of a `MaskedModel`. It draws all hidden tokens, keeps some of
the draws for good, and hides the others again; the last step keeps all. Codebooks are decoded one after the other. The
decoder defines its own output law: there is no autoregressive law to compare it with.

`unmasking` has the loop, `policies` what it decides by, `presets` published settings, and `frames` videos frame by
frame.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from visual_spec.models.core.masked_protocol import MaskedModel, MaskedState, Rescorer
from visual_spec.models.core.settings import (
    CALLS,
    COUNT,
    SHARE,
    Graph,
    OneOf,
    fields_of,
    register_to_config,
)
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_guided, check_known_tokens, wants_graph
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import SPAN_SCORES
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import LOSSY, SampleResult
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule
from visual_spec.samplers.masked.unmasking import (
    Dependence,
    MaskedRunState,
    MaskedTrace,
    Unmasking,
    check_masked_model,
)

if TYPE_CHECKING:
    from visual_spec.samplers.core.graph import RecordedFunction


class MaskedSampler(Sampler[MaskedModel, MaskedRunState]):
    """Draws all hidden tokens at every step, and keeps the tokens of highest score. `presets` has published settings.

    Args:
        steps: forwards of each codebook: one number for all of them, or one for each.
        span: slots that are kept or hidden together. More than 1 for sequences only.
        span_score: "max" is the score of a span's best token, "sum" the sum of its scores (with log-probabilities: the
            probability of the whole span).
        rescorer_share: weight of the masked model in the probability of a draw, if another model rescores it.
        graph: replay the model's calls as CUDA graphs (`RecordedCalls`), one by one. "auto": wherever possible.
        measure: estimate, by one more call of the model a step, what drawing a group independently moves; see
            `Dependence`. The trace reports it; its time does not count as decoding.
        schedule: how many tokens stay hidden.
        choice: how tokens are drawn, and which of them are kept.
        by_step: temperature and guidance of each step.

    `config`, saved folders and the command line have the settings of these groups one by one.

    A call takes
        known_tokens: long [B, L, K] (or [B, L] for one codebook); the mask id marks tokens to decode. None: no
            token is known.
        rescorer: an autoregressive model of the same codes; draws are then ranked by a mixture of both models'
            probabilities (MAGNeT, section 3.4, which the released code lacks). It costs one forward a step, except in
            the last step of each codebook. Hidden codes, and codes outside a clip, are its special token.
        rescorer_condition: condition of the rescorer; None: the model's.

    and returns tokens long [B, L], or [B, L, K] for several codebooks, with a `MaskedTrace`. The callback gets the
    number of kept or given tokens of each sample, divided by the number of codebooks and rounded down.
    """

    takes: tuple[str, ...] = ("known_tokens", "rescorer", "rescorer_condition")
    law_names: ClassVar[tuple[str, ...]] = (
        "steps",
        "span",
        "span_score",
        "rescorer_share",
        *fields_of(Schedule, Choice, LawByStep),
    )
    keeps = LOSSY
    counts_prefill = False
    records_steps = False
    gives_logprobs = True

    @register_to_config
    def __init__(
        self,
        steps: Annotated[int | Sequence[int], CALLS] = 8,
        *,
        span: Annotated[int, COUNT] = 1,
        span_score: Annotated[str, OneOf(tuple(SPAN_SCORES))] = "max",
        rescorer_share: Annotated[float, SHARE] = 0.5,
        graph: Graph = False,
        measure: bool = False,
        schedule: Schedule = Schedule(),
        choice: Choice = Choice(),
        by_step: LawByStep = LawByStep(),
    ) -> None:
        self._loop = Unmasking(schedule, choice, by_step, span, span_score, rescorer_share)

    def check(self, model: MaskedModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        check_masked_model(model, law)
        steps, grid, span = self.config.steps, model.grid, self.config.span
        if not isinstance(steps, int) and len(steps) != grid.codebooks:
            raise ValueError(
                f"steps={tuple(steps)} are for {len(steps)} codebooks, and the model has {grid.codebooks}; pass "
                f"{grid.codebooks} numbers, or one for all codebooks."
            )
        if span > 1 and (span > grid.num_tokens or grid.num_tokens != grid.width):
            size = f"{grid.frames} x {grid.height} x {grid.width} slots"
            raise ValueError(
                f"span={span}, but the model decodes {size}; pass "
                + (f"1 to {grid.width}." if grid.num_tokens == grid.width else "1: spans are for sequences.")
            )
        rule = self._loop.schedule.rule
        if rule is not None and grid.codebooks > 1:
            raise ValueError(
                f"{rule}={self.config[rule]}, but the model has {grid.codebooks} codebooks; pass {rule}=None, which is "
                "for models of several."
            )
        wants_graph(self.config.get("graph", False), model)  # refuses what cannot be recorded
        if parts.get("known_tokens") is not None:
            check_known_tokens(model, parts["known_tokens"], batch_size)
        if parts.get("rescorer") is not None:
            _check_rescorer(model, parts["rescorer"], self._loop.choice)

    def plan(self, run: Run) -> None:
        run.num_tokens = run.model.grid.num_tokens * run.model.grid.codebooks

    def prefill(self, run: Run) -> Any:
        cache = run.model.prepare(run.condition, batch_size=run.batch_size, guided=run.guided)
        return check_guided(cache, run.guided)

    def planned_calls(self, model: MaskedModel, parts: dict[str, Any]) -> int | None:
        if self._loop.schedule.rule is not None:
            return None
        return sum(self._steps(model, parts.get("known_tokens")))

    def prepare(self, run: Run) -> MaskedRunState:
        """Hide all tokens that are not given."""
        grid, known = run.model.grid, run.parts.get("known_tokens")
        shape = (run.batch_size, grid.num_tokens, grid.codebooks)
        tokens = torch.full(shape, run.model.mask_id, device=run.device)
        if known is not None:
            tokens.copy_(known.reshape(shape))
        recording = wants_graph(self.config.get("graph", False), run.model)

        @functools.cache
        def conditional() -> Any:
            return run.model.prepare(run.condition, batch_size=run.batch_size, guided=False)

        lean = run.guided and self._loop.by_step.guided_steps is not None and not recording
        return self._loop.begin(
            run,
            tokens,
            self._steps(run.model, known),
            model=RecordedCalls(run.model, run.cache) if recording else run.model,
            meter=Dependence(run.batch_size, run.device) if self.config.get("measure") else None,
            conditional=conditional if lean else None,
        )

    def step(self, run: Run, state: MaskedRunState) -> None:
        self._loop.step(run, state)

    def progress(self, run: Run, state: MaskedRunState) -> Tensor:
        return (state.tokens != run.model.mask_id).sum((1, 2)) // run.model.grid.codebooks

    def committed(self, run: Run, state: MaskedRunState) -> Tensor:
        return (state.tokens != run.model.mask_id).all(-1)

    def result(self, run: Run, state: MaskedRunState, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        rescored = [step + 1 < steps for _, step, steps in state.plan]
        if state.logprobs is not None and run.model.grid.codebooks == 1:
            trace |= {name: trace[name][..., 0] for name in ("logprobs", "model_logprobs")}
        whole = MaskedTrace(
            **trace,
            entry_call=state.entry_call.cpu(),
            rescorer_calls=0 if run.parts.get("rescorer") is None else sum(rescored),
            total_correlation=None if state.meter is None else state.meter.correlation.cpu(),
        )
        if whole.stopped:  # what is still hidden has the mask's id, which nothing decodes
            tokens = torch.where(tokens < run.model.vocab_size, tokens, 0)
        return SampleResult(tokens if run.model.grid.codebooks > 1 else tokens[..., 0], whole)

    def _steps(self, model: MaskedModel, known: Tensor | None) -> list[int]:
        """Return the calls of each codebook. A codebook whose tokens are all given costs none."""
        steps, codebooks = self.config.steps, model.grid.codebooks
        counts = [steps] * codebooks if isinstance(steps, int) else list(steps)
        if known is None:
            return counts
        unknown = (known.reshape(-1, codebooks) == model.mask_id).any(0).tolist()
        return [count if some else 0 for count, some in zip(counts, unknown, strict=True)]


def _check_rescorer(model: MaskedModel, rescorer: Rescorer, choice: Choice) -> None:
    """Refuse a rescorer of other codes or clips, and scores that are no probabilities."""
    if rescorer.vocab_size != model.vocab_size:
        raise ValueError(
            f"the rescorer knows {rescorer.vocab_size} codes, and the model {model.vocab_size}; pass two models of the "
            "same codec."
        )
    if rescorer.num_frames != model.grid.num_tokens:
        raise ValueError(
            f"the rescorer is made for clips of {rescorer.num_frames} frames, and the model for "
            f"{model.grid.num_tokens}; pass one for as many frames."
        )
    if choice.second_draw:
        raise ValueError("second_draw=True with a rescorer, which ranks the draws themselves; leave one out.")
    if not choice.of_draws:
        raise ValueError(
            f"score={choice.score!r} asks for no probability of a draw, so there is nothing to rescore; pass "
            "score='log_probability' or 'probability', or no rescorer."
        )


class RecordedCalls:
    """A masked model that is called with one state, and records its calls as CUDA graphs.

    Beside the model a decoder runs a few kernels; a call is hundreds of launches, which a small picture waits for on a
    fast GPU. All calls of a codebook have the same shapes: the first runs as it is, the second is recorded, and the
    others are replayed.

    Args:
        model: the model.
        state: from its `prepare`.
    """

    def __init__(self, model: Any, state: MaskedState) -> None:
        self.model, self.state = model, state
        self._known: dict[Hashable, RecordedFunction] = {}

    def __call__(self, state: Any, tokens: Tensor, stage: int) -> Tensor:
        """See `MaskedModel`. Returns logits in memory of their own."""
        assert state is self.state, "recordings read the state that they were made with"
        return self.replayed(stage, lambda tokens: self.model(state, tokens, stage), tokens)

    def replayed(self, kind: Hashable, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What `call` makes of the inputs. All calls of a kind make the same of the same inputs."""
        if kind not in self._known:
            from visual_spec.samplers.core.graph import RecordedFunction  # on a GPU only

            self._known[kind] = RecordedFunction(self.model, call)
        return self._known[kind](*inputs)
