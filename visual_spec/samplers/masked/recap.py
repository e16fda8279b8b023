"""What a masked decoder keeps from one call to the next: keys and values (ReCAP), or features (a shortcut).

Between two calls of a masked model few tokens change, so most of a call repeats the one before. A policy says which
calls are full (`policies.Reuse`), and what stands in for the others:

* ReCAP (2505.19089): a full call chooses the tokens of the
  next few calls at once, its group. A local call computes only the slots of the group, which attend to the keys and
  values that the full call left for all others. The order inside the group does not change.
* Shortcut (MIGM-Shortcut, 2602.23996): a network of one block makes the features of the next call from the features of
  the last one and the tokens that were kept since. Only the model's head runs on them.

Both are approximations of the model. `MaskedSampler(measure=True)` measures how far they lead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.samplers.core.checks import check_returned
from visual_spec.samplers.core.masking import Spans, last_of_group, least_sure
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.masked.unmasking import CodebookStage, MaskedRunState

_BUCKET = 8  # group widths are rounded up to multiples of this, so that few shapes occur


class ReusedCalls:
    """A `ReusingMaskedModel` whose calls go on from earlier ones, called as it is.

    Args:
        model: the model, or what records its calls.
        run: of the decode.
        by_shortcut: whether a network stands in for the model, in place of local calls.
    """

    def __init__(self, model: Any, run: Run, by_shortcut: bool) -> None:
        self.model, self.run, self.by_shortcut = model, run, by_shortcut
        self._stage: CodebookStage | None = None
        self._cache: Any = None  # the model's state in the last full call
        self._order: Tensor | None = None  # of the stage, in which full calls keep
        self._places = torch.empty(0)  # the slots of the group

    def __call__(self, cache: Any, state: MaskedRunState, stage: CodebookStage) -> Tensor:
        """Logits `[R, L, V]` of a codebook. Those of slots outside the group of a local call mean nothing."""
        tokens, codebook, step = state.tokens, stage.codebook, stage.step
        if self._stage is not stage:
            self._stage, self._order = stage, stage.order
        if stage.full[step]:
            self._cache, stage.order = cache, self._order
            if last_of_group(stage.full, step) == step:
                return self.model(cache, tokens, codebook)
            return self.model(
                cache, tokens, codebook, keep=0 if self.by_shortcut else self._room(stage, state.spans)
            )
        cache = self._cache
        state.reused_calls += 1
        if self.by_shortcut:
            state.saved_calls += 1
            return self._by_shortcut(cache, tokens[..., codebook], stage)
        if stage.full[step - 1]:
            self._choose_group(stage, state.spans)
        places, (batch, length) = self._places, stage.unknown.shape
        state.saved_calls += 1 - min(places.shape[1] / length, 1.0)
        logits = self.model(cache, tokens, codebook, places=places)
        check_returned(logits, batch, cache.guided, places.shape[1], self.run.model.vocab_size)
        whole = logits.new_zeros(len(logits), length, logits.shape[2])
        return scattered(logits, places.repeat(len(logits) // batch, 1), whole)

    def _choose_group(self, stage: CodebookStage, spans: Spans) -> None:
        """The tokens that the full call kept, and those that the local calls after it will keep, in its order."""
        first, scores = stage.step - 1, stage.scores
        assert scores is not None and stage.newest is not None
        last = last_of_group(stage.full, first)
        later = stage.hidden & ~least_sure(scores, stage.hidden, stage.counts[last + 1])
        group = stage.newest | (stage.unknown & spans.spread(later))
        stage.order, self._places = scores, places_of(group, _width(stage, spans, first, last))

    def _room(self, stage: CodebookStage, spans: Spans) -> int:
        """The width of the widest local call: full calls keep so many scratch places, whatever follows."""
        groups = [(step, last_of_group(stage.full, step)) for step, full in enumerate(stage.full) if full]
        return max(_width(stage, spans, *group) for group in groups if group[0] < group[1])

    def _by_shortcut(self, cache: Any, tokens: Tensor, stage: CodebookStage) -> Tensor:
        """Logits `[R, L, V]` of the features that the shortcut makes of the features of the call before."""
        assert stage.newest is not None
        repeats = 2 if cache.guided else 1
        shown, newest = tokens.repeat(repeats, 1), stage.newest.repeat(repeats, 1)
        share = (stage.hidden.sum(1) / stage.hidden.shape[1]).repeat(repeats)
        cache.features = self.run.parts["shortcut"](cache.features, shown, newest, share)
        return self.run.model.scores(cache, cache.features, stage.codebook)


def _width(stage: CodebookStage, spans: Spans, first: int, last: int) -> int:
    """Places of the calls of the group that steps `first` to `last` keep."""
    return min(group_width(stage.shares, spans.count, spans.length, first, last), spans.num_tokens)


def group_width(shares: Sequence[float], num_units: int, span: int, first: int, last: int) -> int:
    """Return the most tokens that steps `first` to `last` keep, told from the schedule alone, rounded up to a bucket.

    Counts of samples with given tokens are on the device, and reading them would stall it.

    Args:
        shares: hidden share of the units before each step.
        num_units: of a whole sample.
        span: tokens of a unit.
    """
    after = shares[last + 1] if last + 1 < len(shares) else 0.0
    # Counts are rounded, at least one unit is kept a step, and one is hidden until the last step.
    units = math.ceil((shares[first] - after) * num_units) + 2 + last - first
    width = min(units, num_units) * span
    return -(-width // _BUCKET) * _BUCKET


def places_of(group: Tensor, width: int) -> Tensor:
    """Return the slots of a group, long [B, width], in order, and after them places past the grid, L and up.

    `group`: bool [B, L], at most `width` true in a row.
    """
    length = group.shape[1]
    order = torch.sort((~group).long(), dim=1, stable=True).indices[:, :width]
    order = F.pad(order, (0, width - order.shape[1]))
    place = torch.arange(width, device=group.device)
    return torch.where(place < group.sum(1, keepdim=True), order, length + place)


def scattered(values: Tensor, places: Tensor, whole: Tensor) -> Tensor:
    """Return `whole [B, L, ...]` with `values [B, n, ...]` at `places`, long [B, n]; those past the grid go nowhere."""
    index = places.view(*places.shape, *[1] * (values.ndim - 2)).expand_as(values)
    wide = torch.cat([whole, torch.zeros_like(values)], 1)
    return wide.scatter(1, index, values)[:, : whole.shape[1]]
