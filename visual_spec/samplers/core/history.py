"""Rules of a law that read the tokens before the slot: repetition penalty, no-repeat n-grams, any function of the text.

`TokenLaw.history` holds them. `prefix` applies them, each position of a window on the text before its own slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.settings import COUNT, Within, read_fields


@dataclass(frozen=True)
class Text:
    """What stands before the slots of a window: S places of the prompt and then of the slots.

    Attributes:
        ids: long [B, S], in the model's own vocabulary of text.
        real: bool [B, S], false at the padding of prompts.
        stops: long [B, W], the places before each slot that a position predicts.
        ids_of: long [V], the id of each token of the sampler's vocabulary.
        num_ids: size of the vocabulary of text.
        start: places of the prompt.
    """

    ids: Tensor
    real: Tensor
    stops: Tensor
    ids_of: Tensor
    num_ids: int
    start: int

    def marked(self, ids: Tensor, where: Tensor) -> Tensor:
        """Return which tokens are among `ids`, long [B, S'], as far as bool [B, W, S'] `where` is true: [B, W, V]."""
        held = torch.where(where, ids[:, None], self.num_ids)  # places that do not count mark one more id
        marks = torch.zeros(*where.shape[:2], self.num_ids + 1, dtype=torch.bool, device=ids.device)
        return marks.scatter_(2, held, True)[..., self.ids_of]

    @property
    def before(self) -> Tensor:
        """Return which places each position reads: bool [B, W, S]."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.stops[..., None]


class HistoryRule(Protocol):
    """Changes the scores of a slot by the text before it. Rules are hashable and hold no state."""

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        """Return scores [B, W, V], from scores [B, W, V]; a position may read the text up to its own stop only."""
        ...


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divide the scores of tokens in the text by `penalty` where they are positive, and multiply them elsewhere.

    Keskar et al., "CTRL", 2019, section 4.1; with a sign, as in transformers.

    Args:
        penalty: above 0; 1 is none.
        window: the number of last tokens that count, prompt included; None: all.

    Raises:
        ValueError: a value is out of its range.
    """

    penalty: Annotated[float, Within(above=0)]
    window: Annotated[int | None, COUNT] = None

    def __post_init__(self) -> None:
        read_fields(self)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        where = text.before & text.real[:, None]
        if self.window is not None:
            places = torch.arange(text.ids.shape[1], device=scores.device)
            where &= places >= text.stops[..., None] - self.window
        changed = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(text.marked(text.ids, where), changed, scores)


@dataclass(frozen=True)
class NoRepeatNgram:
    """Forbid a token that would close an n-gram which the text holds already (Paulus et al. 2018, section 2.5).

    Args:
        size: n, at least 1.

    Raises:
        ValueError: the size is out of its range.
    """

    size: Annotated[int, COUNT]

    def __post_init__(self) -> None:
        read_fields(self)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        count = self.size - 1
        if text.ids.shape[1] <= count:
            return scores
        # The n-gram of start j is ids[j : j + n]; its last id is forbidden where the text ends with the others.
        starts = text.ids.shape[1] - count
        ends = torch.arange(starts, device=scores.device) + count
        where = ends < text.stops[..., None]  # [B, W, starts]
        for back in range(1, count + 1):
            last = text.ids.gather(1, (text.stops - back).clamp(min=0))  # [B, W]
            where = where & (text.ids[:, None, count - back : count - back + starts] == last[..., None])
        where &= (text.stops >= count)[..., None]
        return scores.masked_fill(text.marked(text.ids[:, count:], where), -torch.inf)


@dataclass(frozen=True)
class NotBefore:
    """Forbid a token, such as the end, at the first `count` slots.

    Args:
        token: in the sampler's vocabulary.
        count: at least 0.

    Raises:
        ValueError: the count is out of its range.
    """

    token: int
    count: Annotated[int, Within(0)]

    def __post_init__(self) -> None:
        read_fields(self)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        early = text.stops - text.start < self.count
        chosen = torch.arange(scores.shape[-1], device=scores.device) == self.token
        return scores.masked_fill(early[..., None] & chosen, -torch.inf)


@dataclass(frozen=True)
class TextFunction:
    """A `LogitsProcessor` of transformers, or any function of ids long [1, T] and scores [1, num_ids].

    It must be a function of these two alone: a slot is scored anew in every call, on the text that is drafted then.
    It is called once for every position of every sample.

    Args:
        function: returns scores [1, num_ids] over the vocabulary of text; -inf forbids an id. Ids that the sampler
            does not draw have a score of -inf.
    """

    function: Callable[[Any, Any], Any]

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        whole = scores.new_full((*scores.shape[:2], text.num_ids), -torch.inf)
        whole[..., text.ids_of] = scores
        for row, stops in enumerate(text.stops.tolist()):
            for column, stop in enumerate(stops):
                # A copy: processors may write into what they get.
                scored = whole[row, column, None].clone()
                whole[row, column] = self.function(text.ids[row : row + 1, :stop], scored)[0]
        return whole[..., text.ids_of]
