"""What samplers of continuous tokens share: their law, their state, their trace, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from visual_spec.models.core.continuous import AnyContinuousModel, ChainSettings
from visual_spec.models.core.orders import check_order
from visual_spec.models.core.settings import OneOf, Within
from visual_spec.samplers.continuous import conditions
from visual_spec.samplers.continuous.denoising import ChainLaw
from visual_spec.samplers.continuous.head_loop import HeadLoop
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ORDER, UNCONDITIONAL
from visual_spec.samplers.core.state import ModelT, Run, State, StateT
from visual_spec.samplers.core.trace import LOSSY, DecodeTrace, DivergenceMeter, SampleResult

ORDERS = ("random", "raster")


@dataclass
class ContinuousTrace(DecodeTrace):
    """A `DecodeTrace` of continuous tokens.

    Attributes:
        head_calls: long [B], calls of the target's head that had to wait for each other. Heads that run side by side
            for several slots or levels are one call.
        tested, kept: long [B], drafts of tokens, or of points within the head, that were tested, and that were kept.
        draft_calls: long [B], calls of the drafter.
    """

    head_calls: Tensor | None = None
    tested: Tensor | None = None
    kept: Tensor | None = None
    draft_calls: Tensor | None = None

    @property
    def acceptance(self) -> float | None:
        """Share of the tested drafts that were kept; None where nothing was tested."""
        if self.tested is None or self.kept is None or not self.tested.any():
            return None
        return float(self.kept.sum() / self.tested.sum())

    def summary(self) -> str:
        """Return the line of `DecodeTrace`, with calls of the head and acceptance."""
        assert self.head_calls is not None
        kept = "" if self.acceptance is None else f", {100 * self.acceptance:.0f} % of the drafts kept"
        return f"{super().summary()}; {self.head_calls.float().mean():.0f} head calls{kept}"


COUNTS = ("head_calls", "tested", "kept", "draft_calls")


@dataclass
class ContinuousState(State):
    """A `State` of continuous tokens: `tokens` are [B, L + scratch, d], by slot.

    Attributes:
        places: long [B, L + scratch], where each slot stands on the grid; scratch slots stand past it.
        law: how tokens are drawn.
        head_calls, tested, kept, draft_calls: long [B], see `ContinuousTrace`.
    """

    places: Tensor
    law: ChainLaw
    head_calls: Tensor
    tested: Tensor
    kept: Tensor
    draft_calls: Tensor

    def put(self, slots: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Write the first `count`, long [B], of tokens [B, N, d] at slots long [B, N]."""
        wanted = torch.arange(slots.shape[1], device=slots.device) < count[:, None]
        at = slots[..., None].expand_as(tokens)
        held = self.tokens.gather(1, at)
        self.tokens.scatter_(1, at, torch.where(wanted[..., None], tokens.to(held.dtype), held))

    def count(self, name: str, calls: int | Tensor, num_tokens: int) -> None:
        """Add to a count of the samples that are not complete."""
        setattr(self, name, getattr(self, name) + torch.where(self.lengths < num_tokens, calls, 0))


ContinuousT = TypeVar("ContinuousT", bound=ContinuousState)

# Settings that are part of the law: a sampler is lossless with respect to plain decoding with the same ones. `Order`:
# of a masked model. `Guidance`: "linear" grows with the share of slots that are filled, as published. The last three
# are of the chain of a token (`ChainSettings`).
_OWN = "the model's own"
Order = Annotated[str | Sequence[int] | None, OneOf(ORDERS), Within(0, none="random, or the model's own")]
Guidance = Annotated[str, OneOf(("linear", "constant"))]
HeadSteps = Annotated[int | None, Within(1, 1000, none=_OWN)]
Eta = Annotated[float | None, Within(0, 1, none=_OWN)]
FinalNoise = Annotated[float | None, Within(0, none=_OWN)]


class VectorSampler(Sampler[ModelT, StateT]):
    """The base of samplers whose tokens are vectors. `run.tables["places"]`, long [B, >= L], is where the slots stand
    on the grid; without it they stand in raster order.
    """

    no_logprobs = (
        "whose tokens are vectors: they have a density, and what makes them tells no more than samples"
    )

    def check(self, model: AnyContinuousModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        off = TokenLaw()
        for name in ("top_k", "top_p", "allowed", "guidance_until"):
            if getattr(law, name) != getattr(off, name):
                raise ValueError(
                    f"{name}={getattr(law, name)} given, which is for tokens out of a vocabulary; the tokens of this "
                    "model are vectors. Leave it out."
                )

    def plan(self, run: Run) -> None:
        run.view = None

    def prefill(self, run: Run) -> Any:
        asked: dict[str, Any] = dict(batch_size=run.batch_size, guided=run.guided, window=run.window)
        return conditions.begin(run.model, run.condition, **asked)

    def measure(self, run: Run, state: State, tokens: Tensor) -> tuple[float | None, Tensor | None]:
        meter = getattr(state, "meter", None)
        if meter is None or not meter.tested.any():
            return None, None
        return meter.mean(), meter.moved.cpu()

    def result(self, run: Run, state: State, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        """Tokens float [B, L, d] in raster order, whatever the order of decoding.

        Raises:
            FloatingPointError: tokens that are not finite; names the first.
        """
        places = run.tables.get("places")
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        check_tokens(tokens, places)
        length = tokens.shape[1]
        trace["commit_call"] = conditions.on_grid(trace["commit_call"], places.cpu(), length)
        return SampleResult(conditions.on_grid(tokens, places, length), self.trace_of(state, trace))

    def trace_of(self, state: Any, trace: dict[str, Any]) -> DecodeTrace:
        """Return the trace, from its fields and what the state counts."""
        return DecodeTrace(**trace)


class ContinuousTokenSampler(VectorSampler[AnyContinuousModel, ContinuousT]):
    """The base of samplers of continuous tokens. The constructors of its methods declare the settings of the law.

    Args:
        order: of a masked model: "random", "raster", or all places of the grid, each once; None: random.
        guidance: "linear", growing with the share of slots that are filled, as published, or "constant".
        head_steps, eta, final_noise: of the chain of a token (`ChainSettings`); None: the model's own.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    law_names: ClassVar[tuple[str, ...]] = (
        "steps",
        "order",
        "guidance",
        "head_steps",
        "last_head_steps",
        "eta",
        "final_noise",
    )

    def chain_settings(self, own: ChainSettings) -> ChainSettings:
        """The chain, where a model's own is `own`."""
        given = {name: self.config[name] for name in ("head_steps", "eta", "final_noise")}
        return ChainSettings(**{k: getattr(own, k) if v is None else v for k, v in given.items()})

    def law_settings_in(self, run: Run) -> dict[str, Any]:
        """As of `Sampler`, with what None stands for in this model."""
        model, asked = run.model, self.law_settings
        chain = self.chain_settings(model.chain)
        levels, last = chain.head_steps, asked["last_head_steps"]
        return asked | {
            "steps": self.num_steps(model),
            "order": None if asked["order"] == "random" else asked["order"],
            "guidance": asked["guidance"] if run.guided else None,
            "head_steps": levels,
            "last_head_steps": None if last == levels else last,
            "eta": chain.eta,
            "final_noise": chain.final_noise,
        }

    def num_steps(self, model: AnyContinuousModel) -> int:
        """Calls of a model that draws every token of a call at once."""
        return model.grid.num_tokens

    def check(self, model: AnyContinuousModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        self.check_model(model)

    def check_model(self, model: AnyContinuousModel) -> None:
        """Refuse a model that cannot be decoded with these settings.

        Raises:
            ValueError: an order for a model that has its own, or one that is no permutation.
        """
        order = self.config.order
        if order is None:
            return
        if conditions.is_causal(model):
            raise ValueError(
                f"order={order!r} given, but this model knows one order only, its own; leave order out."
            )
        if order not in ORDERS:
            length = model.grid.num_tokens
            if len(order) != length:
                raise ValueError(
                    f"an order of {len(order)} places given; the model has {length}, name each once."
                )
            check_order(torch.tensor([list(order)]))

    # -- what methods begin with

    def open(
        self,
        run: Run,
        kind: type[ContinuousT],
        scratch: int,
        first: int = 1,
        lengths: Sequence[int] | None = None,
        **more: Any,
    ) -> ContinuousT:
        """The state after call 0, which draws and commits the first slots.

        Args:
            kind: of the state, a `ContinuousState`.
            scratch: number of slots past the grid that calls may write.
            first: how many slots that call draws.
            lengths: levels that plain chains may have; None: as many as set.
            more: the other fields of `kind`.
        """
        model, size, device = run.model, run.batch_size, run.device
        places = run.tables["places"] = self.places(run, scratch, device)
        z = conditions.first_conditions(model, run.cache, places, first)
        dtype = torch.promote_types(z.dtype, torch.float32)
        state = kind.blank(
            run,
            torch.zeros(*places.shape, model.token_dim, dtype=dtype, device=device),
            meter=None if self.keeps != LOSSY else DivergenceMeter(size, device),
            places=places,
            law=self.chain_law(run, scratch, device, lengths),
            **{name: torch.zeros(size, dtype=torch.long, device=device) for name in COUNTS},
            **more,
        )
        run.lap("model")
        self.draw_plainly(run, state, z)
        if run.guided and conditions.starts_unguided(model) and self.config.guidance == "linear":
            self._draw_unconditional(run, state, z)
        return state

    def _draw_unconditional(self, run: Run, state: ContinuousState, z: Tensor) -> None:
        """Draw what the unconditional rows hold at slot 0, with conditions `z [R, 1, dim]` and noise of their own."""
        law, levels = state.law, self.chain_levels(state)
        state.count("head_calls", levels, run.num_tokens)
        schedules, settings = law.loop.schedules.values(), law.settings
        loop = HeadLoop(
            run.model, schedules, temperature=law.temperature, final_noise=settings.final_noise, guided=False
        )
        places, scales = state.places[:, :1], law.scales[:1].expand(run.batch_size, 1)
        own = loop(z.chunk(2)[1], scales, run.noise, places, levels, UNCONDITIONAL)
        run.cache.first = own[:, 0]
        run.lap("head")

    def draw_plainly(self, run: Run, state: ContinuousState, z: Tensor) -> None:
        """Draw and commit the next slots with conditions `z [R, N, dim]`, each by its own chain and noise."""
        slots = state.next_slots(z.shape[1])
        tokens = self.draw(run, state, z, slots)
        count = torch.full_like(state.lengths, z.shape[1])
        state.put(slots, tokens, count)
        state.commit(slots, count, run.num_tokens)
        run.lap("head")

    def draw(self, run: Run, state: ContinuousState, z: Tensor, slots: Tensor) -> Tensor:
        """Tokens [B, N, d] of slots [B, N] with conditions `z [R, N, dim]`, by the plain chain."""
        levels = self.chain_levels(state)
        state.count("head_calls", levels, run.num_tokens)
        law, places = state.law, state.places.gather(1, slots)
        return law.loop(z, law.scales[slots], run.noise, places, levels)

    def chain_levels(self, state: ContinuousState) -> int:
        """Levels of the plain chains of the next call."""
        return state.law.levels

    def chain_law(
        self, run: Run, scratch: int, device: torch.device, lengths: Sequence[int] | None = None
    ) -> ChainLaw:
        """How the tokens of this decode are drawn. `lengths`: levels that plain chains may have; None: as set."""
        model, law = run.model, run.law_given
        settings = self.chain_settings(model.chain)
        linear = self.config.guidance == "linear"
        steps = self.num_steps(model)
        scales = conditions.scales_of_slots(model, law.guidance_scale, steps, linear=linear, scratch=scratch)
        schedule = model.schedule(settings.head_steps, settings.eta)
        loop = HeadLoop(
            model,
            (model.schedule(count, settings.eta) for count in dict.fromkeys(lengths or [schedule.num_steps])),
            temperature=law.temperature,
            final_noise=settings.final_noise,
            guided=run.guided,
        )
        return ChainLaw(settings, schedule, law.temperature, run.guided, scales.to(device), loop)

    def places(self, run: Run, scratch: int, device: torch.device) -> Tensor:
        """Where the slots stand, long [B, L + scratch]."""
        length = run.model.grid.num_tokens
        every = torch.arange(length, device=device).expand(run.batch_size, -1)
        order = self.config.order
        if conditions.is_causal(run.model):
            every = run.model.places[:length].to(device).expand(run.batch_size, -1)
        elif order in (None, "random"):
            every = run.noise.uniform(every, ORDER, dtype=torch.float64).argsort(-1)
        elif order != "raster":
            every = torch.tensor(list(order), device=device).expand(run.batch_size, -1)
        past = torch.arange(length, length + scratch, device=device).expand(run.batch_size, -1)
        return torch.cat([every, past], 1)

    def trace_of(self, state: ContinuousState, trace: dict[str, Any]) -> ContinuousTrace:
        return ContinuousTrace(**trace)


def check_tokens(tokens: Tensor, places: Tensor | None = None) -> None:
    """Refuse tokens [B, L, d], by slot, that are not finite. `places`: long [B, >= L], where they are not the slots."""
    bad = (~tokens.isfinite().all(-1)).nonzero()
    if len(bad):
        sample, slot = bad[0].tolist()
        where = f"slot {slot}" if places is None else f"place {int(places[sample, slot])} (slot {slot})"
        raise FloatingPointError(
            f"the token of sample {sample}, {where} is not finite. Check the weights, or run the model in float32 or "
            "bfloat16 if it overflows in float16."
        )
