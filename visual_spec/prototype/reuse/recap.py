"""What a masked decoder keeps from one call to the next: keys and values (ReCAP), features (a shortcut), or logits.

Between two calls of a masked model few tokens change, so most of a call repeats the one before. `Reuse` says which
calls are full, and what stands in for the others:

* ReCAP (2505.19089): a full call chooses the tokens of the
  next few calls at once, its group. A local call computes only the slots of the group, which attend to the keys and
  values that the full call left for all others. The order inside the group does not change.
* Shortcut (MIGM-Shortcut, 2602.23996): a network of one block makes the features of the next call from the features of
  the last one and the tokens that were kept since. Only the model's head runs on them.
* Logits (the cache of Lumina-DiMOO's release): a later call computes the places whose likeliest code has the least
  logit, those of the prompt too, and each guidance row chooses its own. All others keep their logits, keys and values.

All are approximations of the model. `measure=True` measures how far they lead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.settings import SHARE, OneOf, Within, read_fields
from visual_spec.samplers.core.checks import check_returned
from visual_spec.samplers.core.masking import least_sure
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.masked.unmasking import CodebookStage, MaskedRunState

_BUCKET = 8  # group widths are rounded up to multiples of this, so that few shapes occur


@dataclass(frozen=True)
class Reuse:
    """Which calls of the model reuse what an earlier one computed.

    Attributes:
        reuse: calls after each full one that reuse what it computed; 0: all calls are full.
        reuse_from: share of the calls of a codebook that are full before any reuse.
        reuse_by: "recap" (keys and values: calls of the tokens that they may keep), "shortcut" (features: a small
            network in place of the model), or "logits" (calls of the least sure places; of a `DimooTransformer`).
        reuse_share: of all places that a call of "logits" computes. (The release: 1 - cache_ratio. Its
            refresh_interval is `reuse` + 1, and warmup_ratio w of n calls is `reuse_from` = int(w * n) / n.)
    """

    reuse: Annotated[int, Within(0)] = 0
    reuse_from: Annotated[float, SHARE] = 0.5
    reuse_by: Annotated[str, OneOf(("recap", "shortcut", "logits"))] = "recap"
    reuse_share: Annotated[float, SHARE] = 0.1

    def __post_init__(self) -> None:
        read_fields(self)

    @property
    def by_shortcut(self) -> bool:
        """Whether a network stands in for the model."""
        return bool(self.reuse) and self.reuse_by == "shortcut"


def full_calls(steps: int, reuse: int, reuse_from: float) -> list[bool]:
    """Return which of `steps` calls are full; the others reuse what an earlier one computed.

    Args:
        reuse: calls after each full call that reuse it; 0: all are full.
        reuse_from: share of the calls, rounded up, that are full before any reuse: features change most at the
            beginning.
    """
    first = math.ceil(reuse_from * steps - 1e-9) if reuse else steps
    return [step < first or (step - first) % (reuse + 1) == 0 for step in range(steps)]


def last_of_group(full: Sequence[bool], step: int) -> int:
    """Return the last step of those that reuse the full call `step`; `step` itself if none does."""
    last = step
    while last + 1 < len(full) and not full[last + 1]:
        last += 1
    return last


class ReusedCalls:
    """What a step calls in the place of a `ReusingMaskedModel`: some calls go on from earlier ones.

    Args:
        run, state: of the decode.
        reuse: which calls go on, and how.

    Attributes:
        count: calls that went on from an earlier one.
        saved: calls of all slots that they saved.
    """

    def __init__(self, run: Run, state: MaskedRunState, reuse: Reuse) -> None:
        self.run, self.state, self.reuse = run, state, reuse
        self.count, self.saved = 0, 0.0
        self._stage: CodebookStage | None = None
        self._full: list[bool] = []  # of the stage: which calls are full
        self._order: Tensor | None = None  # of the stage: in which full calls keep
        self._cache: Any = None  # the model's state in the last full call
        self._places = torch.empty(0)  # the slots of the group

    def __call__(self, cache: Any, tokens: Tensor, codebook: int) -> Tensor:
        """Logits `[R, L, V]` of a codebook. Those of slots outside the group of a local call mean nothing."""
        stage, model = self.state.stage, self.state.model
        assert stage is not None
        step = stage.step
        if self._stage is not stage:
            self._stage, self._order = stage, stage.order
            self._full = full_calls(len(stage.laws), self.reuse.reuse, self.reuse.reuse_from)
        if self._full[step]:
            self._cache, stage.order = cache, self._order
            if last_of_group(self._full, step) == step:
                return model(cache, tokens, codebook)
            return model(
                cache, tokens, codebook, keep=self._room(stage) if self.reuse.reuse_by == "recap" else 0
            )
        cache = self._cache
        self.count += 1
        # Tokens that the last step kept.
        newest = self.state.entry_call[..., codebook] == self.state.round - 1
        if self.reuse.by_shortcut:
            self.saved += 1
            return self._by_shortcut(cache, tokens[..., codebook], newest, stage)
        if self.reuse.reuse_by == "logits":
            self.saved += 1 - self.reuse.reuse_share
            return model(cache, tokens, codebook, least=self.reuse.reuse_share)
        if self._full[step - 1]:
            self._choose_group(stage, newest)
        places, (batch, length) = self._places, stage.unknown.shape
        self.saved += 1 - min(places.shape[1] / length, 1.0)
        logits = model(cache, tokens, codebook, places=places)
        check_returned(logits, batch, cache.guided, places.shape[1], self.run.model.vocab_size)
        whole = logits.new_zeros(len(logits), length, logits.shape[2])
        return scattered(logits, places.repeat(len(logits) // batch, 1), whole)

    def _choose_group(self, stage: CodebookStage, newest: Tensor) -> None:
        """The tokens that the full call kept, and those that the local calls after it will keep, in its order."""
        first, scores, spans = stage.step - 1, stage.scores, self.state.spans
        assert scores is not None
        last = last_of_group(self._full, first)
        later = stage.hidden & ~least_sure(scores, stage.hidden, stage.counts[last + 1])
        group = newest | (stage.unknown & spans.spread(later))
        stage.order, self._places = scores, places_of(group, self._width(stage, first, last))

    def _room(self, stage: CodebookStage) -> int:
        """The width of the widest local call: full calls keep so many scratch places, whatever follows."""
        groups = [(step, last_of_group(self._full, step)) for step, full in enumerate(self._full) if full]
        return max(self._width(stage, *group) for group in groups if group[0] < group[1])

    def _width(self, stage: CodebookStage, first: int, last: int) -> int:
        """Places of the calls of the group that steps `first` to `last` keep."""
        spans = self.state.spans
        return min(group_width(stage.shares, spans.count, spans.length, first, last), spans.num_tokens)

    def _by_shortcut(self, cache: Any, tokens: Tensor, newest: Tensor, stage: CodebookStage) -> Tensor:
        """Logits `[R, L, V]` of the features that the shortcut makes of the features of the call before."""
        repeats = 2 if cache.guided else 1
        shown, newest = tokens.repeat(repeats, 1), newest.repeat(repeats, 1)
        share = (stage.hidden.sum(1) / stage.hidden.shape[1]).repeat(repeats)
        model = self.run.model
        cache.features = self.run.parts["shortcut"].follow(model, cache, shown, newest, share)
        return model.scores(cache, cache.features, stage.codebook)


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
