"""Laws of speech programs that a `TokenLaw` does not know, as rules of the text before a slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.launch import nowhere
from visual_spec.kernels.law import descending
from visual_spec.samplers.core.history import RepetitionPenalty, Text, ended_by

if TYPE_CHECKING:
    from transformers import TopPLogitsWarper


@dataclass(frozen=True)
class BySlot:
    """Processors of transformers that read a slot's scores alone, such as `TopPLogitsWarper`, in their order."""

    processors: tuple[Callable[..., Tensor], ...]

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        rows = scores.flatten(0, 1)
        for process in self.processors:
            rows = process(None, rows)
        return rows.view_as(scores)


@dataclass(frozen=True)
class TopP:
    """`TopPLogitsWarper` of transformers; on a processor by value, as NumPy sorts scores alone sooner."""

    warper: TopPLogitsWarper

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if scores.device.type == "cpu" and scores.itemsize > 2:
            ordered = descending(scores).flip(-1)
            gone = ordered.softmax(-1).cumsum(-1) <= 1 - self.warper.top_p
            removed = gone[..., :-1].sum(-1, keepdim=True)
            below = scores < ordered.gather(-1, removed)
            if torch.equal(below.sum(-1, keepdim=True), removed):
                return scores.masked_fill(below, -torch.inf)
        # Of equal scores some go and some stay: the warper decides.
        return BySlot((self.warper,))(scores, text)


@dataclass(frozen=True)
class Forbidden:
    """Codes that are never drawn."""

    codes: tuple[int, ...]

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        return scores.index_fill(-1, torch.tensor(self.codes, device=scores.device), -torch.inf)


@dataclass(frozen=True)
class Closing:
    """After one of `codes` all mass is on `end`: a sample that any of several codes may end."""

    codes: tuple[int, ...]
    end: int

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        closes = torch.isin(text.ids, torch.tensor(self.codes, device=scores.device))
        closes[:, : text.start] = False
        return ended_by(scores, closes, text.stops, self.end)


@dataclass(frozen=True)
class PenaltyAtFirst:
    """The repetition penalty of `code` at the first slot alone."""

    code: int
    penalty: float

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if nowhere(text.stops == text.start):
            return scores
        prompt = torch.full_like(text.ids[:, :1], self.code)
        first = Text(
            prompt,
            torch.ones_like(prompt, dtype=torch.bool),
            prompt,
            (text.stops == text.start).long(),
            text.ids_of,
            text.num_ids,
            1,
        )
        return RepetitionPenalty(self.penalty)(scores, first)


@dataclass(frozen=True)
class RepetitionAware:
    """Repetition-aware sampling: one draw from the nucleus, and where that code stands among the last ones another draw
    from all codes. The law of both draws together, by enumeration of the first.

    Source: Chen et al., "VALL-E 2" (2406.05370), section 3; CosyVoice's `ras_sampling`.

    Args:
        top_p, top_k: of the nucleus.
        last: codes that are looked at; 0: all of the text.
        times: occurrences among them from which a code is drawn anew.
        excluded: whether the second draw is one of the other codes.
    """

    top_p: float
    top_k: int
    last: int
    times: float
    excluded: bool

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        log = scores.log_softmax(-1)
        ranked, order = log.exp().sort(dim=-1, descending=True, stable=True)
        inside = (ranked.cumsum(-1) - ranked < self.top_p) & (
            torch.arange(scores.shape[-1], device=scores.device) < self.top_k
        )
        inside = torch.zeros_like(inside).scatter(-1, order, inside)
        nucleus = log.masked_fill(~inside, -torch.inf).log_softmax(-1)
        again = self._occurrences(log, text) >= self.times
        drawn_anew = nucleus.masked_fill(~again, -torch.inf)
        if self.excluded:
            drawn_anew = _without_own(drawn_anew - _without_own(log))
        else:
            drawn_anew = drawn_anew.logsumexp(-1, keepdim=True)
        return torch.logaddexp(nucleus.masked_fill(again, -torch.inf), log + drawn_anew)

    def _occurrences(self, scores: Tensor, text: Text) -> Tensor:
        """How often each code stands among the last ones, [B, W, V]."""
        places = torch.arange(text.ids.shape[1], device=scores.device)
        first = text.stops[..., None] - self.last if self.last else 0
        seen = text.before & (places >= text.start) & (places >= first)
        held = torch.where(seen, text.tokens[:, None], scores.shape[-1])
        return F.pad(torch.zeros_like(scores), (0, 1)).scatter_add(-1, held, seen.to(scores))[..., :-1]


def _without_own(log: Tensor) -> Tensor:
    """For each code, the logarithm of the sum of what the others have: exact also beside one that has nearly all."""
    total, largest = log.logsumexp(-1, keepdim=True), log.argmax(-1, keepdim=True)
    rest = log.scatter(-1, largest, -torch.inf).logsumexp(-1, keepdim=True)
    share = (log - total).exp().nan_to_num(0).scatter(-1, largest, 0)
    return (total + (-share).log1p()).scatter(-1, largest, rest)
