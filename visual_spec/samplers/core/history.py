"""Laws that read the tokens before the slot: repetition penalty, no-repeat n-grams, any function of the text, and ends.

A law with a history (`TokenLaw.history`) is the law of another autoregressive model: its logits at a slot are guided,
and changed by rules that read the text before the slot. `PrefixModel` is that model. It writes down by slot what it is
fed, as a cache does, so each position of a window reads the drafts before it. A sampler that is exact on the model is
exact on this one: the scores of a slot count only where the drafts stand that they were computed on.

After an end all mass is on the end. So a sample has one length in law, and a sampler may stop a row at its end
(`State.commit`) without changing what the row holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.launch import nowhere
from visual_spec.kernels.law import mixed_logits
from visual_spec.models.core.protocol import DecodeState, TokenGrid
from visual_spec.models.core.settings import COUNT, Within, read_fields
from visual_spec.samplers.core.checks import check_guided, check_returned
from visual_spec.samplers.core.law import TokenLaw


@dataclass(frozen=True)
class Text:
    """What stands before the slots of a window: S places of the prompt and then of the slots.

    Attributes:
        ids: long [B, S], in the model's own vocabulary of text.
        real: bool [B, S], false at the padding of prompts.
        tokens: long [B, S], the ids in the sampler's vocabulary; V where it has no such token.
        stops: long [B, W], the places before each slot that a position predicts.
        ids_of: long [V], the id of each token of the sampler's vocabulary; None: a token is its own id.
        num_ids: size of the vocabulary of text.
        start: places of the prompt.
    """

    ids: Tensor
    real: Tensor
    tokens: Tensor
    stops: Tensor
    ids_of: Tensor | None
    num_ids: int
    start: int

    @property
    def before(self) -> Tensor:
        """Return which places each position reads: bool [B, W, S]."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.stops[..., None]


def ended_by(scores: Tensor, ends: Tensor, stops: Tensor, end: int) -> Tensor:
    """Return scores [B, W, V] with all mass on `end` where one of `ends`, bool [B, S], stands before the stop."""
    if nowhere(ends):
        return scores
    places = torch.arange(ends.shape[1], device=ends.device)
    ended = (ends[:, None] & (places < stops[..., None])).any(-1)
    only = torch.full_like(scores[:1, :1], -torch.inf)
    only[..., end] = 0
    return torch.where(ended[..., None], only, scores)


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
        # Places that do not count hold one more token.
        held, padded = torch.where(where, text.tokens[:, None], scores.shape[-1]), F.pad(scores, (0, 1))
        old = padded.gather(2, held)
        new = torch.where(old < 0, old * self.penalty, old / self.penalty)
        return padded.scatter_(2, held, new)[..., :-1]


@dataclass(frozen=True)
class NoRepeatNgram:
    """Forbid a token that would close an n-gram of `size` that the text holds (Paulus et al. 2018, section 2.5)."""

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
        held = torch.where(where, text.tokens[:, None, count:], scores.shape[-1])
        return F.pad(scores, (0, 1)).scatter_(2, held, -torch.inf)[..., :-1]


@dataclass(frozen=True)
class NotBefore:
    """Forbid a token of the sampler's vocabulary, such as the end, at the first `count` slots."""

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
        ids_of = slice(None) if text.ids_of is None else text.ids_of
        whole = scores.new_full((*scores.shape[:2], text.num_ids), -torch.inf)
        whole[..., ids_of] = scores
        for row, stops in enumerate(text.stops.tolist()):
            for column, stop in enumerate(stops):
                before = text.ids[row : row + 1, :stop]
                whole[row, column] = self.function(before, whole[row, column, None])[0]
        return whole[..., ids_of]


@dataclass
class PrefixState(DecodeState):
    """A batch during decoding; `logits` [B, V] are finished scores.

    Attributes:
        inner: the state of the model inside.
        tokens: long [B, P + L + window], of the prompt, then what was fed, by slot; V where no token is.
        real: bool [B, P + L + window], false at the padding of the prompt.
        ids: as `tokens`, in the vocabulary of text; None where a token is its own id.
        start: P, places of the prompt.
        raw: [R, W, V], the model's logits of the last call.
    """

    inner: Any
    tokens: Tensor
    real: Tensor
    ids: Tensor | None
    start: int
    raw: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def select(self, samples: Tensor) -> None:
        self.inner.select(samples)
        self.logits, self.tokens = self.logits[samples], self.tokens[samples]
        self.real = self.real[samples]
        self.ids = None if self.ids is None else self.ids[samples]

    def narrow(self, width: int) -> None:
        self.inner.narrow(width)
        self.raw = None if self.raw is None else self.raw[:, :width]


class PrefixModel:
    """A `NextTokenModel` that returns another one's logits under guidance, a history, and an end.

    Args:
        model: scores the tokens. If it has a text, `text_of(condition)` returns its ids long [B, P] and bool [B, P],
            false at padding. `ids_of` long [V] are the ids of its tokens, if not the tokens, and `num_ids` counts all.
        law: the law that reads the text.
    """

    def __init__(self, model: Any, law: TokenLaw) -> None:
        self.wrapped, self.law = model, law
        self.grid: TokenGrid = model.grid
        self.vocab_size: int = model.vocab_size
        self.num_ids: int = getattr(model, "num_ids", model.vocab_size)
        self.ids_of: Tensor | None = getattr(model, "ids_of", None)
        self.guidance = replace(law, history=(), end=None).numbers(True, model.vocab_size)

    def prefill(self, condition: object, *, batch_size: int, guided: bool, window: int) -> PrefixState:
        """Run the prompt, with unconditional rows where the law is guided; `guided` is false."""
        inner = self.wrapped.prefill(condition, batch_size=batch_size, guided=self.law.guided, window=window)
        check_guided(inner, self.law.guided)
        device = inner.logits.device
        slots = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        if hasattr(self.wrapped, "text_of"):
            prompt, real = (part.to(device) for part in self.wrapped.text_of(condition))
        else:
            prompt = slots[:, :0]
            real = prompt.bool()
        size, room = self.vocab_size, (0, self.grid.num_tokens + window)
        tokens, ids = prompt, None
        if self.ids_of is not None:
            self.ids_of, ids = self.ids_of.to(device), F.pad(prompt, room)
            table = torch.full((self.num_ids,), size, device=device)
            tokens = table.scatter_(0, self.ids_of, torch.arange(size, device=device))[prompt]
        state = PrefixState(
            logits=inner.logits,
            guided=False,
            window=window,
            inner=inner,
            tokens=F.pad(tokens, room, value=size),
            real=F.pad(real, room, value=True),
            ids=ids,
            start=prompt.shape[1],
        )
        state.logits = self.scores(state, inner.logits[:, None], slots)[:, 0]
        return state

    def __call__(self, state: PrefixState, tokens: Tensor, slots: Tensor) -> Tensor:
        """Feed tokens [B, W] at slots [B, W]; scores [B, W, V], position w for slot `slots[b, w] + 1`."""
        places = state.start + slots
        state.tokens.scatter_(1, places, tokens)
        if state.ids is not None and self.ids_of is not None:
            state.ids.scatter_(1, places, self.ids_of[tokens])
        state.inner.fixed = state.fixed
        return self.scores(state, self.wrapped(state.inner, tokens, slots), slots + 1)

    def stops(self, predicted: Tensor) -> Tensor:
        """Return how many slots stand before each that is predicted: long [B, W]."""
        return predicted

    def scores(self, state: PrefixState, logits: Tensor, predicted: Tensor) -> Tensor:
        """Return scores [B, W, V] of the slots `predicted` [B, W], from logits [R, W, V]."""
        law, stops, state.raw = self.law, self.stops(predicted), logits
        check_returned(logits, predicted.shape[0], law.guided, predicted.shape[1], self.vocab_size)
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if law.guided:
            scores = mixed_logits(scores, predicted, self.guidance)
        if law.history:
            # Of a row whose samples are in the scratch after the grid any finite scores will do.
            text = Text(
                ids=state.tokens if state.ids is None else state.ids,
                real=state.real,
                tokens=state.tokens,
                stops=state.start + stops,
                ids_of=self.ids_of,
                num_ids=self.num_ids,
                start=state.start,
            )
            for rule in law.history:
                scores = rule(scores, text)
            beyond = predicted >= self.grid.num_tokens
            if not nowhere(beyond):
                scores = scores.masked_fill(beyond[..., None], 0)
        if law.end is not None:
            scores = ended_by(scores, state.tokens[:, state.start :] == law.end, stops, law.end)
        return scores


def reading_text(model: Any, law: TokenLaw) -> tuple[Any, TokenLaw]:
    """Return the model and law in whose place a law that reads the text stands.

    The model returned does what the law says of guidance, history and end; the law returned does the rest.
    """
    rest = replace(law, guidance_scale=1.0, guidance_until=None, history=(), end=None)
    return PrefixModel(model, law), rest
