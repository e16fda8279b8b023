"""Any-order models along an order: what their samplers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.orders import AnyOrderModel
from visual_spec.models.core.protocol import ANY_ORDER, DecodeState, TokenGrid, trained_order
from visual_spec.models.core.settings import LARGEST, OneOf, Within
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_guided, check_known_tokens, check_request, check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import FIXED_ORDERS, Spans, fixed_order
from visual_spec.samplers.core.noise import CHOICE, CounterNoise
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult
from visual_spec.samplers.orders.locality import locality_order

LOCALITY = "locality"
NAMED_ORDERS = (*FIXED_ORDERS, LOCALITY)


def _check_slots(name: str, order: str | Sequence[int], settings: Mapping[str, Any]) -> None:
    if not isinstance(order, str) and sorted(order) != list(range(len(order))):
        raise ValueError(
            f"order={order!r}; pass one of {', '.join(NAMED_ORDERS)}, or all slots of the grid in the order of "
            "decoding, each once."
        )


SlotOrder = Annotated[str | Sequence[int], OneOf(NAMED_ORDERS), Within(0), _check_slots]
S = TypeVar("S", bound=State)
GuidanceStart = Annotated[float | None, Within(0, LARGEST, none="the law's guidance at every place")]


@dataclass
class AlongOrderState(DecodeState):
    """A batch of an `AlongOrder`. Places count along the order. Its logits [R, P, V] predict the first P places.

    Attributes:
        inner: the any-order model's own state.
        order: long [B, L + window], the slot at each place; places past the grid are their own slots.
        rank: long [B, L], the place of each slot.
        raw: [R, W, V], the logits of the last call before a ramp of guidance.
    """

    inner: Any
    order: Tensor
    rank: Tensor
    raw: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.logits = self.logits[rows]
        self.order, self.rank = self.order[samples], self.rank[samples]
        self.inner.select(samples)


class AlongOrder(nn.Module):
    """An any-order model as a `NextTokenModel` whose slots are the places of an order.

    Args:
        model: the any-order model.
        order: long [B, L], the slots of each sample in the order of decoding.
        first: places that the prefill asks.
        ramp: guidance at the first place, and the guidance of the law, which is reached linearly after the last;
            None: the guidance of the law at every place.

    Attributes:
        grouped: whether places of one call are drawn together, those of the prefill among them.
        ends_group: whether the places of the prefill have the guidance of the place after them.
    """

    def __init__(
        self, model: AnyOrderModel, order: Tensor, first: int = 1, ramp: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        self.model, self.order, self.first, self.ramp = model, order, first, ramp
        self.grid = TokenGrid(1, model.grid.num_tokens)
        self.vocab_size = model.vocab_size
        self.known: Tensor | None = None
        self.known_tokens: Tensor | None = None
        self.grouped, self.ends_group = False, False

    def begin_with(self, known_tokens: Tensor) -> None:
        """Put the known slots of each row first, in their order among themselves; the prefill then feeds them.

        Afterwards `self.known` is their number, long [B], and `self.known_tokens` the tokens by place, long [B, L].

        Args:
            known_tokens: long [B, L] by slot, -1 where a token is to be decoded.
        """
        known_tokens = known_tokens.to(self.order.device)
        is_open = (known_tokens < 0).gather(1, self.order)
        self.order = self.order.gather(1, is_open.long().sort(dim=1, stable=True).indices)
        if not bool(is_open.all()):
            self.known, self.known_tokens = (~is_open).sum(1), known_tokens.gather(1, self.order)

    def prefill(self, condition: object, *, batch_size: int, guided: bool, window: int) -> AlongOrderState:
        """Run the condition, and predict the first open places from it and from the tokens that are known."""
        length = self.grid.num_tokens
        beyond = torch.arange(length, length + window).expand(batch_size, -1)
        order = torch.cat([self.order.cpu(), beyond], 1)  # [B, L + window]
        rank = order[:, :length].argsort(1)
        together = self.grouped and self.first > 1
        more: Any = {"together": True} if together else {}  # which only a group of several needs
        asked = order[:, : self.first]
        inner = self.model.prefill(
            condition, batch_size=batch_size, guided=guided, window=window, asked=asked, **more
        )
        check_returned(check_guided(inner, guided).logits, batch_size, guided, self.first, self.vocab_size)
        device = inner.logits.device
        places = torch.arange(self.first, device=device).expand(batch_size, -1)
        levels = torch.full_like(places, self.first) if self.ends_group else places
        logits = self._ramped(inner.logits, levels, guided)
        state = AlongOrderState(
            logits, guided, window, inner, order.to(device), rank.to(device), inner.logits
        )
        if self.known is not None and self.known_tokens is not None:
            known = self.known.to(device)[:, None]
            fed = torch.arange(int(known.max()), device=device).expand(batch_size, -1)  # [B, F]
            # A row that knows fewer repeats a place past the grid.
            fed = torch.where(fed < known, fed, length)
            tokens = F.pad(self.known_tokens.to(device), (0, 1)).gather(1, fed)
            seen = torch.cat([fed.clamp(max=known), known.expand(-1, self.first)], 1)
            asked, levels = torch.cat([fed, known + places], 1), torch.cat([fed, known + levels], 1)
            logits = self.ask(state, tokens, asked, seen, levels, together)
            state.logits = logits[:, fed.shape[1] :]
        return state

    def ask(
        self,
        state: AlongOrderState,
        tokens: Tensor,
        places: Tensor,
        known: Tensor,
        levels: Tensor | None = None,
        together: bool = False,
    ) -> Tensor:
        """Predict places, and feed tokens at the first of them.

        Args:
            tokens: long [B, F].
            places: long [B, W].
            known: long [B, W], how many places of the order each position sees.
            levels: long [B, W], the place at which the ramp of guidance is read for each; None: its own.
            together: see `AnyOrderModel`.

        Returns:
            logits [R, W, V].
        """
        seen = state.rank[:, None] < known[..., None]  # [B, W, L]
        more: Any = {"together": True} if together else {}
        logits = self.model(state.inner, tokens, state.order.gather(1, places), seen=seen, **more)
        state.raw = check_returned(logits, len(places), state.guided, places.shape[1], self.vocab_size)
        return self._ramped(logits, places if levels is None else levels, state.guided)

    def _ramped(self, logits: Tensor, places: Tensor, guided: bool) -> Tensor:
        """Return logits [R, W, V] that the law guides as the ramp says at `places [B, W]`."""
        if self.ramp is None or not guided:
            return logits
        first, last = self.ramp
        share = (first + (last - first) * places.to(logits.dtype) / self.grid.num_tokens) / last  # [B, W]
        conditional, other = logits.chunk(2)
        forbidden = conditional.isneginf() | other.isneginf()
        moved = other + share[..., None] * (conditional - other)
        return torch.cat([moved.masked_fill(forbidden, -torch.inf), other])

    def forward(self, state: AlongOrderState, tokens: Tensor, slots: Tensor) -> Tensor:
        """As `NextTokenModel`: feed `tokens [B, W]` at consecutive places, predict the places that follow: [R, W, V].

        One call with a permutation mask: a position sees the places before its own, whatever was asked there before.
        """
        places = torch.cat([slots, slots[:, -1:] + 1], 1)  # [B, W + 1]
        return self.ask(state, tokens, places, places)[:, 1:]


class AlongOrderSampler(Sampler[AnyOrderModel, State]):
    """A sampler of any-order models. A method reads places: `run.model` is an `AlongOrder`.

    It reads the settings `order`, a `SlotOrder`, and `guidance_start`, the guidance at the first place. The argument
    `known_tokens` of a call, long [B, L] by slot, holds tokens that stay, and -1 where one is to be decoded: known
    slots come first in the order, and one more call feeds them.
    """

    takes: tuple[str, ...] = ("known_tokens",)
    law_names = ("order", "guidance_start")
    gives_logprobs = True

    def law_settings_in(self, run: Run) -> dict[str, Any]:
        start, scale = self.config.guidance_start, run.law_given.guidance_scale
        ramps = run.guided and start != scale
        return self.law_settings | {"guidance_start": start if ramps else None}

    def first_places(self, num_tokens: int) -> int:
        """Return how many places the prefill asks."""
        return 1

    def check(self, model: AnyOrderModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        who = type(model).__name__
        if hasattr(model, "mask_id"):
            raise ValueError(
                f"{who} is a masked model: every hidden token is predicted from all known ones, so its predictions "
                "along an order come from as many calls and need not agree with one joint law, and one call cannot "
                "verify drafts. Use SpeculativeMaskedSampler, which scores them in rows, or MaskedSampler."
            )
        if trained_order(model) != ANY_ORDER:
            raise ValueError(
                f"{who} was trained for order {trained_order(model)!r}; this sampler decodes any-order models, such as "
                "RandAR's. Use AutoregressiveSampler or SpeculativeJacobiSampler for raster order, OrderedSampler for "
                "others."
            )
        check_request(model, law, any_order=True)
        if law.guidance_until is not None:
            raise ValueError(
                f"guidance_until={law.guidance_until} counts slots in raster order, and this sampler decodes in "
                "another; pass guidance_until=None."
            )
        if parts.get("known_tokens") is not None:
            check_known_tokens(model, parts["known_tokens"], batch_size)
        order, count = self.config.order, model.grid.num_tokens
        if order == LOCALITY and model.grid.frames > 1:
            raise ValueError(
                f"order={order!r} is of one picture; the grid of {who} has {model.grid.frames} frames."
            )
        if not isinstance(order, str) and len(order) != count:
            raise ValueError(
                f"an order of {len(order)} slots for a grid of {count}; pass every slot of it once."
            )

    def plan(self, run: Run) -> None:
        order = self.order_of(run.model.grid, run.noise.keys)
        start, law = self.config.guidance_start, run.law.law
        ramp = (start, law.guidance_scale) if start is not None and law.guided else None
        run.model = AlongOrder(run.model, order, self.first_places(order.shape[1]), ramp)
        if run.parts.get("known_tokens") is not None:
            run.model.begin_with(run.parts["known_tokens"])

    def order_of(self, grid: TokenGrid, keys: Tensor) -> Tensor:
        """Return the slots of each sample in the order of decoding, long [B, L]; see `slots_in_order`."""
        return slots_in_order(self.config.order, grid, keys)

    def start(self, run: Run, kind: type[S], scratch: int, **more: Any) -> S:
        """Return the state after the prefill, of a class `kind`: known tokens stand, the place after them is drawn."""
        known = None if run.model.known is None else run.model.known.to(run.device)
        state = kind.begin(run, scratch, known=known, **more)
        slots = torch.arange(run.model.first, device=run.device).expand(run.batch_size, -1)
        run.scored = run.cache.logits, slots if known is None else known[:, None] + slots
        if known is not None:
            stands = torch.arange(run.num_tokens, device=run.device) < known[:, None]
            held = run.model.known_tokens.to(run.device)
            state.tokens[:, : run.num_tokens] = held.where(stands, state.tokens[:, : run.num_tokens])
            state.target_calls += 1  # which fed them
        return state

    def result(self, run: Run, state: State, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        return placed_in_grid(run.model.order, tokens, trace)


def slots_in_order(
    order: SlotOrder, grid: TokenGrid, keys: Tensor, sizes: Sequence[int] | None = None, repulsion: int = 0
) -> Tensor:
    """Return the slots of each sample in the order of decoding, long [B, L], on the device of the keys.

    Args:
        keys: int64 [B], the keys of the samples: a random order depends on its sample only.
        sizes, repulsion: of the groups of "locality", see `locality_order`; None: one slot each.
    """
    if not isinstance(order, str):
        return torch.tensor(order, device=keys.device).expand(len(keys), -1)
    slots = torch.arange(grid.num_tokens, device=keys.device).expand(len(keys), -1)
    noise = CounterNoise(keys, keys.device)
    if order == LOCALITY:
        sizes = sizes or (1,) * grid.num_tokens
        ties = (
            torch.stack([noise.uniform(slots, CHOICE, call) for call in range(len(sizes))], 1).cpu().numpy()
        )
        found = [locality_order(sizes, grid.height, grid.width, tie, repulsion) for tie in ties]
        return torch.tensor(found, device=keys.device)
    score = fixed_order(order, grid, Spans(slots.shape[1], 1), noise, slots)
    return score.sort(dim=1, descending=True, stable=True).indices


def placed_in_grid(
    order: Tensor, tokens: Tensor, trace: dict[str, Any], kind: type[DecodeTrace] = DecodeTrace
) -> SampleResult:
    """Return the result of what was decoded by place, by slot.

    Args:
        order: long [B, L], the slot at each place.
        tokens: long [B, L], by place.
        trace: the fields of the trace; `commit_call` and log-probabilities are by place.
    """
    order, names = order.to(tokens.device), ("commit_call", "logprobs", "model_logprobs")
    for name, values in {name: trace[name] for name in names if name in trace}.items():
        trace[name] = torch.empty_like(values).scatter_(1, order.cpu(), values)
    return SampleResult(torch.empty_like(tokens).scatter_(1, order, tokens), kind(**trace))
