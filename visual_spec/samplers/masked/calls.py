"""How a masked decoder calls its model: full calls, calls that go on from an earlier one, and calls as CUDA graphs.

`recap` says what calls may reuse. What a decoder does beside the model is a few kernels; the call itself is
hundreds of launches, which a small picture on a fast GPU waits for. All calls of one kind have the same shapes: whole
ones, ones that keep, and local ones of a group, whose width is rounded up (`recap.group_width`). The first of a kind
runs as it is, the second is recorded, and the others are replayed. Recordings live as long as the decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from torch import Tensor

from visual_spec.models.core.settings import SHARE, OneOf, Within
from visual_spec.samplers.core.graph import RecordedFunction
from visual_spec.samplers.core.masking import Spans, least_sure
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.masked.recap import KINDS, full_calls, group_width, last_of_group, places_of
from visual_spec.samplers.masked.state import CodebookStage, MaskedRunState


@dataclass(frozen=True)
class Reuse:
    """Which calls of the model reuse what an earlier one computed.

    Attributes:
        reuse: calls after each full one that reuse what it computed (`recap`); 0: all calls are full.
        reuse_from: share of the calls of a codebook that are full before any reuse.
        reuse_by: "recap" (keys and values: calls of the tokens that they may keep) or "shortcut" (features: a small
            network in place of the model).
    """

    reuse: Annotated[int, Within(0)] = 0
    reuse_from: Annotated[float, SHARE] = 0.5
    reuse_by: Annotated[str, OneOf(tuple(KINDS))] = "recap"

    @property
    def by_shortcut(self) -> bool:
        """Whether a network stands in for the model."""
        return bool(self.reuse) and self.reuse_by == "shortcut"

    def full(self, steps: int) -> list[bool]:
        """Whether each of `steps` calls is a full one."""
        return full_calls(steps, self.reuse, self.reuse_from)

    def room(self, stage_shares: Sequence[float], spans: Spans) -> int:
        """The width of the widest local call of a codebook; 0 where there is none."""
        full = self.full(len(stage_shares))
        groups = [(step, last_of_group(full, step)) for step in range(len(full)) if full[step]]
        return max(
            (_width(stage_shares, spans, *group) for group in groups if group[0] < group[1]), default=0
        )

    def places(self, stage: CodebookStage) -> Tensor | None:
        """The slots, long [B, n], that a step computes: the slots of its group; None: all of them."""
        return None if stage.full[stage.step] or self.by_shortcut else stage.places

    def logits(self, run: Run, state: MaskedRunState, stage: CodebookStage) -> Tensor:
        """Call the model, or what stands in for it: logits `[R, L, V]`, or `[R, n, V]` of `places`."""
        cache, tokens, full = stage.cache, state.tokens, stage.full[stage.step]
        if not full and self.by_shortcut:
            state.reused_calls += 1
            return self._by_shortcut(run, state, stage)
        if not full:
            assert stage.places is not None
            state.reused_calls += 1
            state.whole_calls += min(stage.places.shape[1] / tokens.shape[1], 1.0)
            return state.calls(cache, tokens, stage.codebook, places=stage.places)
        state.whole_calls += 1
        if last_of_group(stage.full, stage.step) == stage.step:
            return state.calls(cache, tokens, stage.codebook)
        return state.calls(cache, tokens, stage.codebook, keep=0 if self.by_shortcut else stage.room)

    def choose_group(self, stage: CodebookStage, spans: Spans, score: Tensor) -> None:
        """After a full call: the tokens that the calls which reuse it will keep, and their order `score [B, U]`."""
        last = last_of_group(stage.full, stage.step)
        if last == stage.step or not stage.full[stage.step] or self.by_shortcut:
            return
        group = stage.hidden & ~least_sure(score, stage.hidden, stage.counts[last + 1])
        width = _width(stage.shares, spans, stage.step, last)
        stage.score, stage.places = score, places_of(stage.unknown & spans.spread(group), width)

    def _by_shortcut(self, run: Run, state: MaskedRunState, stage: CodebookStage) -> Tensor:
        """Logits `[R, L, V]` of the features that the shortcut makes of the features of the call before."""
        assert stage.newest is not None
        cache, tokens = stage.cache, state.tokens[..., stage.codebook]
        repeats = 2 if cache.guided else 1
        shown, newest = tokens.repeat(repeats, 1), stage.newest.repeat(repeats, 1)
        share = (stage.hidden.sum(1) / stage.hidden.shape[1]).repeat(repeats)
        cache.features = run.parts["shortcut"](cache.features, shown, newest, share)
        return run.model.scores(cache, cache.features, stage.codebook)


def _width(shares: Sequence[float], spans: Spans, first: int, last: int) -> int:
    """Places of the calls of the group that steps `first` to `last` keep."""
    return min(group_width(shares, spans.count, spans.length, first, last), spans.num_tokens)


class RecordedCalls:
    """A masked model that is called with one state, and records its calls.

    Args:
        model: the model.
        state: from its `prepare`. Calls that keep something, or go on from it, are recorded only if the state says that
            what is kept stays where it is (`MaskedState.fixed`).
    """

    def __init__(self, model: Any, state: Any) -> None:
        self.model, self.state = model, state
        self._functions: dict[Any, RecordedFunction] = {}

    def __call__(self, state: Any, tokens: Tensor, stage: int, **reuse: Any) -> Tensor:
        """See `ReusingMaskedModel`. Returns logits in memory of their own."""
        assert state is self.state, "recordings read the state that they were made with"
        if reuse and not state.fixed:
            return self.model(state, tokens, stage, **reuse)
        keep, places = reuse.get("keep"), reuse.get("places")
        kind = stage, keep, places is None
        if kind not in self._functions:
            self._functions[kind] = RecordedFunction(self.model, partial(self._call, stage, keep))
        return self._functions[kind](*([tokens] if places is None else [tokens, places]))

    def _call(self, stage: int, keep: int | None, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        reuse = {"keep": keep, "places": places}
        return self.model(
            self.state, tokens, stage, **{name: one for name, one in reuse.items() if one is not None}
        )
