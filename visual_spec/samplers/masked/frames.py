"""Videos frame by frame, and the tokens of a frame in parallel: Lumos-1's decoding.

A frame begins with all tokens hidden, and masked decoding (`unmasking`) draws it in `steps` calls; earlier frames are
read from the cache. Then one more call writes the frame for later ones: a copy in which some tokens are hidden again.
The model was trained with such a history (autoregressive discrete diffusion forcing), where a copy of a still
background would have been too easy. With T frames a clip takes `steps` T + T - 1 calls: nothing reads the last frame.

A model may name frames that are drawn together (`frame_groups`), such as key frames before those between them (MMPL).
Then all this holds for groups of frames: three groups take 3 `steps` + 2 calls.

The decoder defines its own output law, a product over frames of the laws of masked decoding.

* Yuan et al., "Lumos-1: on autoregressive video generation with discrete diffusion from a unified model perspective",
  arXiv 2507.08801, section 3.3, and the released code. There the same evenly spaced places are hidden in every frame of
  a clip, 70 % of them in all scripts; a frame takes 18 steps of a cosine schedule, with Gumbel noise of scale 1 on the
  log-probability; and unconditional rows are meant to see no token of the history. Its noise is multiplied by the
  share of steps that are left at every step and never set again, so it is zero from the second frame on:
  `falls="product", later_noise=False`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.masked_protocol import FrameModel, MaskedState
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import (
    CALLS,
    SHARE,
    OneOf,
    fields_of,
    register_to_config,
)
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_guided, check_known_tokens
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHOICE
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import LOSSY, SampleResult
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule
from visual_spec.samplers.masked.unmasking import (
    Dependence,
    MaskedRunState,
    MaskedTrace,
    Unmasking,
    check_masked_law,
)

PATTERNS = ("even", "random")
UNCONDITIONAL = ("hidden", "same")


@dataclass
class FrameTrace(MaskedTrace):
    """A `MaskedTrace` of a decode by frames. Calls that write a frame count, and keep no token.

    Attributes:
        frame_calls: long [G], calls of the batch for each frame, or group of frames that are drawn together: those
            that drew it, and the one that wrote it.
    """

    frame_calls: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def law_in_words(self) -> str:
        """The output law in words."""
        by_frame = "the law of masked decoding, frame by frame"
        if self.divergence is None:
            return by_frame
        return f"{by_frame}, {self.divergence:.4f} a slot from one token a call"


class FrameView:
    """The next group of frames of a `FrameModel` as a `MaskedModel`."""

    def __init__(self, model: FrameModel, grid: TokenGrid) -> None:
        self.model, self.grid = model, grid
        self.vocab_size, self.mask_id = model.vocab_size, model.mask_id

    def __call__(self, state: MaskedState, tokens: Tensor, stage: int) -> Tensor:
        """Score the slots of the group, given its tokens [B, N, 1]: logits [R, N, V]."""
        return self.model(state, tokens[..., 0])


@dataclass
class FramesState:
    """A batch between two calls. L = T N slots, in the order in which their frames are drawn.

    Attributes:
        cache: the model's own state.
        groups: the frames that are drawn together, G groups. "Frame" means such a group below.
        order: long [L], the place of each slot in the clip.
        view: what draws the next frame.
        tokens: long [B, L], the mask id where a token is hidden.
        entry_call: long [B, L], which of its sample's calls kept each token; -1 for tokens not yet kept, and given
            ones.
        target_calls: long [B]; under an entropy bound complete frames wait for the frames of other samples.
        history: bool [B, N], the places that are hidden of every single frame that is written.
        frame_calls: calls of each frame so far.
        drawn: the frames of which some sample has a token to decode.
        frame: the frame that is being decoded.
        drawing: its masked decode.
        round: index of the batch's last call, -1 before the first.
        meter: as in `MaskedRunState`.
        logprobs, model_logprobs: float32 [B, L], see `core.logprobs`; None where nobody asked.
    """

    cache: Any
    groups: list[list[int]]
    order: Tensor
    view: FrameView
    tokens: Tensor
    entry_call: Tensor
    target_calls: Tensor
    history: Tensor
    frame_calls: list[int]
    drawn: list[int]
    meter: Dependence | None
    frame: int = 0
    drawing: MaskedRunState | None = None
    round: int = -1
    logprobs: Tensor | None = None
    model_logprobs: Tensor | None = None

    @property
    def commit_call(self) -> Tensor:
        """The call at which each slot was kept, 0 for given slots: long [B, L]."""
        return self.entry_call.clamp(min=0)

    @property
    def places(self) -> slice:
        """The slots of the frame."""
        count, first = self.history.shape[1], sum(map(len, self.groups[: self.frame]))
        return slice(first * count, (first + len(self.groups[self.frame])) * count)


class FrameMaskedSampler(Sampler[FrameModel, FramesState]):
    """Draws a video frame by frame, each by masked decoding, with a partly hidden history.

    The defaults are the settings of Lumos-1's scripts, up to the noise, which falls evenly in every frame.

    Args:
        steps: calls that draw a frame.
        history_hidden: share of each written frame that later frames do not see, 0 to 1. Above 0 at least one token.
        history_pattern: which places these are, the same in all frames of a clip: "even", evenly spaced from the first
            on, or "random", drawn for each sample.
        unconditional_history: what unconditional rows see of the frames that are written: "hidden", no token, or the
            "same" as the conditional rows.
        measure: as of `MaskedSampler`, within each frame.
        later_noise: whether frames after the first that is drawn have noise on the score.
        schedule, choice, by_step: as of `MaskedSampler`, within each frame.

    A call takes
        known_tokens: long [B, L] or [B, L, 1]; the mask id marks tokens to decode. Frames that are known in all samples
            cost the one call that writes them. None: no token is known.

    and returns tokens long [B, L] with a `FrameTrace`.
    """

    takes = ("known_tokens",)
    law_names = (
        "steps", "history_hidden", "history_pattern", "unconditional_history", "later_noise",
        *fields_of(Schedule, Choice, LawByStep),
    )  # fmt: skip
    keeps = LOSSY
    counts_prefill = False
    records_steps = False
    gives_logprobs = True

    @register_to_config
    def __init__(
        self,
        steps: Annotated[int, CALLS] = 18,
        history_hidden: Annotated[float, SHARE] = 0.7,
        history_pattern: Annotated[str, OneOf(PATTERNS)] = "even",
        unconditional_history: Annotated[str, OneOf(UNCONDITIONAL)] = "hidden",
        measure: bool = False,
        later_noise: bool = True,
        *,
        schedule: Schedule = Schedule(),
        choice: Choice = Choice(choice_temperature=1.0),
        by_step: LawByStep = LawByStep(),
    ) -> None:
        self._first = Unmasking(schedule, choice, by_step)
        quiet = replace(self._first, choice=replace(choice, choice_temperature=0.0))
        self._later = self._first if later_noise else quiet

    def check(self, model: FrameModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        if not (hasattr(model, "mask_id") and hasattr(model, "write")):
            raise ValueError(
                f"{type(model).__name__} does not fill in frames; this sampler decodes a FrameModel, such as "
                "FrameMaskedTransformer."
            )
        check_masked_law(model, law)
        if parts.get("known_tokens") is not None:
            check_known_tokens(model, parts["known_tokens"], batch_size)

    def prefill(self, run: Run) -> Any:
        cache = run.model.prepare(run.condition, batch_size=run.batch_size, guided=run.guided)
        return check_guided(cache, run.guided)

    def planned_calls(self, model: FrameModel, parts: dict[str, Any]) -> int | None:
        if self._first.schedule.rule is not None:
            return None
        drawn = _drawn_frames(model, parts.get("known_tokens"))
        return self.config.steps * len(drawn) + drawn[-1]

    def prepare(self, run: Run) -> FramesState:
        """Hide all tokens that are not given, and begin the first frame."""
        grid, known = run.model.grid, run.parts.get("known_tokens")
        tokens = torch.full((run.batch_size, grid.num_tokens), run.model.mask_id, device=run.device)
        groups = run.model.frame_groups
        order = torch.arange(grid.num_tokens).unflatten(0, (grid.frames, -1))[sum(groups, [])]
        order = order.flatten().to(run.device)
        if known is not None:
            tokens.copy_(known.reshape(tokens.shape)[:, order])
        state = FramesState(
            cache=run.cache,
            groups=groups,
            order=order,
            view=FrameView(run.model, grid),
            tokens=tokens,
            entry_call=torch.full_like(tokens, -1),
            target_calls=torch.zeros_like(tokens[:, 0]),
            history=self._history(run),
            frame_calls=[0] * len(groups),
            drawn=_drawn_frames(run.model, known),
            meter=Dependence(run.batch_size, run.device) if self.config.measure else None,
        )
        self._begin_frame(run, state)
        return state

    def step(self, run: Run, state: FramesState) -> None:
        """Make a call that draws tokens of the frame, or the one that writes it."""
        drawing = state.drawing
        assert drawing is not None
        complete = drawing.round + 1 == len(drawing.plan)
        if complete and state.frame == state.drawn[-1]:
            return  # where draws decide, the end is noticed one call late on a GPU
        state.round += 1
        state.frame_calls[state.frame] += 1
        if complete:
            self._write(run, state)
            return
        before = drawing.target_calls.clone()
        loop = self._first if state.frame == state.drawn[0] else self._later
        loop.step(replace(run, model=state.view, parts={}), drawing)
        tokens, kept = drawing.tokens[..., 0], drawing.entry_call[..., 0] == drawing.round
        state.tokens[:, state.places] = tokens
        for name in ("logprobs", "model_logprobs"):
            if (whole := getattr(state, name)) is not None:
                whole[:, state.places] = getattr(drawing, name)[..., 0]
        entries = state.entry_call[:, state.places]
        state.entry_call[:, state.places] = torch.where(kept, state.target_calls[:, None], entries)
        state.target_calls += drawing.target_calls - before
        if self._first.schedule.rule is not None and not bool((tokens == run.model.mask_id).any()):
            drawing.plan = drawing.plan[: drawing.round + 1]  # the frame is complete before its last step

    def _write(self, run: Run, state: FramesState) -> None:
        """Write the frame, partly hidden, and begin the next one."""
        mask = run.model.mask_id
        hidden = state.history.repeat(1, len(state.groups[state.frame]))
        tokens = state.tokens[:, state.places].masked_fill(hidden, mask)  # [B, N] of each single frame
        if run.guided and self.config.unconditional_history == "hidden":
            tokens = torch.cat([tokens, torch.full_like(tokens, mask)])
        run.model.write(state.cache, tokens)
        state.target_calls += 1
        state.frame += 1
        self._begin_frame(run, state)
        run.lap("write")

    def _begin_frame(self, run: Run, state: FramesState) -> None:
        grid = run.model.grid
        state.view = FrameView(run.model, TokenGrid(grid.height, grid.width, len(state.groups[state.frame])))
        state.drawing = self._first.begin(
            replace(run, model=state.view, parts={}),
            state.tokens[:, state.places, None].clone(),
            [self.config.steps] if state.frame in state.drawn else [0],
            first=state.places.start,
            meter=state.meter,
        )
        if run.keeps_scores:
            from visual_spec.samplers.core import logprobs  # where they are asked for

            logprobs.begin(run, state.drawing, None)

    def _history(self, run: Run) -> Tensor:
        """Return which places of every written frame are hidden, bool [B, N]."""
        count = run.model.grid.height * run.model.grid.width
        number = round(self.config.history_hidden * count)
        if self.config.history_hidden > 0:
            number = max(number, 1)
        places = torch.arange(count, device=run.device).expand(run.batch_size, -1)
        if self.config.history_pattern == "random":
            # Counters past the grid's, which scores of units may use.
            return run.noise.uniform(run.num_tokens + places, CHOICE).argsort(1).argsort(1) < number
        return torch.isin(places, places.new_tensor(even_places(number, count)))

    def progress(self, run: Run, state: FramesState) -> Tensor:
        return (state.tokens != run.model.mask_id).sum(1)

    def committed(self, run: Run, state: FramesState) -> Tensor:
        return state.tokens != run.model.mask_id

    def result(self, run: Run, state: FramesState, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        back = state.order.argsort()
        tokens, names = tokens[:, back], ("commit_call", "logprobs", "model_logprobs")
        trace |= {name: trace[name][:, back.cpu()] for name in names if name in trace}
        whole = FrameTrace(
            **trace,
            entry_call=state.entry_call[:, back, None].cpu(),
            total_correlation=None if state.meter is None else state.meter.correlation.cpu(),
            frame_calls=torch.tensor(state.frame_calls),
        )
        if whole.stopped:  # what is still hidden has the mask's id, which nothing decodes
            tokens = torch.where(tokens < run.model.vocab_size, tokens, 0)
        return SampleResult(tokens, whole)


def even_places(number: int, count: int) -> list[int]:
    """Return `number` of `count` places, evenly spaced from the first on; all of them different."""
    return [round(index * count / number) for index in range(number)]


def _drawn_frames(model: FrameModel, known: Tensor | None) -> list[int]:
    """Return the groups of frames of which some sample has a token to decode."""
    groups = model.frame_groups
    if known is None:
        return list(range(len(groups)))
    hidden = known.reshape(len(known), model.grid.frames, -1) == model.mask_id
    unknown = hidden.any(2).any(0).tolist()  # by frame
    return [index for index, group in enumerate(groups) if any(unknown[frame] for frame in group)]
