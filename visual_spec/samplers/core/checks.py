"""Checks: settings that do not go together, requests that cannot be served, and logits that define no law.

The errors, `ValueError` if nothing else is said, name what was passed, what is allowed, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from torch import Tensor

from visual_spec.kernels.law import LawNumbers, law_reference
from visual_spec.models.core.protocol import (
    ANY_ORDER,
    RASTER_ORDER,
    DecodeState,
    NextTokenModel,
    modules_of,
    trained_order,
)
from visual_spec.models.core.settings import AUTO, COUNT, OneOf
from visual_spec.samplers.core.law import TokenLaw, check_finite, non_finite
from visual_spec.samplers.core.precision import EXACT_WIDTH

if TYPE_CHECKING:
    from visual_spec.models.core.masked_protocol import HidingModel
    from visual_spec.models.core.orders import AnyOrderModel

CacheT = TypeVar("CacheT")
DecodeT = TypeVar("DecodeT", bound=DecodeState)

# COUPLINGS: how the drafts of a slot in successive rounds depend on each other. ACCEPTANCES: how they are tested.
COUPLINGS = ("gumbel", "independent", "maximal")
ACCEPTANCES = ("identical", "exact")
WIDTHS = (1, 4, 8, 16, 32, 64)  # windows to choose from


def _check_coupling(name: str, coupling: str, settings: Mapping[str, Any]) -> None:
    if settings["acceptance"] == "identical" and coupling != "gumbel":
        raise ValueError(
            "acceptance='identical' compares a draft with the token that the slot's own noise draws, so it needs "
            f"coupling='gumbel', got coupling={coupling!r}. Pass coupling='gumbel', or acceptance='exact'."
        )


def _check_window(name: str, window: int | str | None, settings: Mapping[str, Any]) -> None:
    acceptance = settings["acceptance"]
    if window == AUTO and acceptance != "identical":
        raise ValueError(
            f"window='auto' with acceptance={acceptance!r}: the window would depend on measured times, and with it the "
            "tokens of a seed. Pass acceptance='identical', or a number."
        )
    graph = settings.get("graph")
    if window == AUTO and type(graph) is int and graph > 1:
        raise ValueError(
            f"graph={graph} with window='auto', which chooses the window of every call; pass graph='auto'."
        )


def _check_exact_width(name: str, exact_width: bool, settings: Mapping[str, Any]) -> None:
    if not exact_width:
        return
    acceptance = settings.get("acceptance", "identical")
    if acceptance != "identical":
        raise ValueError(
            f"exact_width=True with acceptance={acceptance!r}: it keeps the promise of acceptance='identical' where "
            "numbers are rounded coarsely. Pass acceptance='identical', or leave exact_width out."
        )
    width = settings["num_drafts"] + 1 if "num_drafts" in settings else settings.get("window")
    if isinstance(width, int) and width > EXACT_WIDTH:
        raise ValueError(
            f"exact_width=True and calls of up to {width} positions; with it every call has {EXACT_WIDTH}. Pass a "
            f"window of at most {EXACT_WIDTH} (at most {EXACT_WIDTH - 1} drafts)."
        )


Acceptance = Annotated[str, OneOf(ACCEPTANCES)]
Coupling = Annotated[str, OneOf(COUPLINGS), _check_coupling]
Window = Annotated[int | str, COUNT, OneOf((AUTO,)), _check_window]
ExactWidth = Annotated[bool, _check_exact_width]


def check_request(model: NextTokenModel | AnyOrderModel, law: TokenLaw, *, any_order: bool = False) -> None:
    """Refuse, before any compute, a request that a next-token sampler cannot decode.

    `any_order`: whether the sampler decodes models that were trained for another order than raster order.
    """
    if model.grid.codebooks != 1:
        raise ValueError(
            f"the model has {model.grid.codebooks} codebooks a slot; this sampler decodes one token a slot. "
            "Use a sampler that accepts whole columns."
        )
    check_allowed(law, model.vocab_size)
    own = trained_order(model)
    if not any_order and own != RASTER_ORDER:
        use = (
            "AnyOrderSampler()"
            if own == ANY_ORDER
            else "OrderedSampler(), which follows the model's own order"
        )
        raise ValueError(
            f"{type(model).__name__} was trained for order {own!r}, and this sampler decodes in raster order. "
            f"Use {use}."
        )


def check_guided(cache: CacheT, guided: bool) -> CacheT:
    """Return the state of a prefill, refused if it did not do what `guided` asked for: guidance would be off unseen."""
    made = getattr(cache, "guided", guided)
    if bool(made) != guided:
        raise ValueError(
            f"prefill(guided={guided}) returned a state with guided={made}; hold unconditional rows exactly where "
            "guided is true, and say so in the state."
        )
    return cache


def check_returned(
    returned: Tensor, batch_size: int, guided: bool, *sizes: int | None, who: str = "the model"
) -> Tensor:
    """Return what a model returned, refused if it has another shape: it could be cut or spread over others unseen.

    Args:
        returned: [R, *sizes], R = B, or 2B when guided.
        sizes: None where any size will do.
        who: what returned it, for the message.
    """
    wanted = ((2 if guided else 1) * batch_size, *sizes)
    shape = tuple(returned.shape)
    if len(shape) == len(wanted) and all(
        size in (None, one) for size, one in zip(wanted, shape, strict=True)
    ):
        return returned
    kinds = "conditional rows, then as many unconditional ones" if guided else "one row a sample"
    asked = ", ".join("any size" if size is None else str(size) for size in wanted)
    raise ValueError(
        f"{who} returned shape {shape} for {sizes[0]} slots of {batch_size} samples; return ({asked}): {kinds}, every "
        "slot that was asked for, the whole vocabulary."
    )


def check_prefill(cache: DecodeT, batch_size: int, guided: bool, vocab_size: int, who: str) -> DecodeT:
    """Return the state of a second model's prefill, refused as by `check_guided` and `check_returned`.

    Some samplers read its caches and not its logits, so no law would see that it has other rows.
    """
    sizes = (*[None] * (check_guided(cache, guided).logits.dim() - 2), vocab_size)
    check_returned(cache.logits, batch_size, guided, *sizes, who=who)
    return cache


def check_parts(sampler: Any, parts: Mapping[str, object]) -> None:
    """Refuse arguments that the sampler does not take."""
    unknown = [name for name in parts if name not in sampler.takes]
    if unknown:
        takes = ", ".join(sampler.takes) or "nothing else"
        raise TypeError(
            f"{type(sampler).__name__} was given {', '.join(unknown)}; beside a model, a condition and a law it takes "
            f"{takes}."
        )


def check_text_law(sampler: Any, model: Any, law: TokenLaw) -> None:
    """Refuse a law that reads the tokens before the slot where the sampler cannot show them to it."""
    if not getattr(law, "reads_text", False):
        return
    given = f"history={law.history!r}, end={law.end!r}"
    name = type(sampler).__name__
    if not sampler.reads_text:
        raise ValueError(
            f"{name} decodes no laws that read the tokens before the slot ({given}); use AutoregressiveSampler or "
            "SpeculativeJacobiSampler without a drafter."
        )
    if sampler.config.get("graph", False) not in (False, AUTO):
        raise ValueError(
            f"graph={sampler.config.graph} with {given}: such calls are not recorded. Pass graph='auto'."
        )
    if law.end is not None and law.end >= model.vocab_size:
        raise ValueError(f"end={law.end}; pass a token of the vocabulary of {model.vocab_size}.")


def check_logprobs(sampler: Any) -> None:
    """Refuse `output_logprobs` of a sampler that does not keep them."""
    if not getattr(sampler, "gives_logprobs", False):
        why = getattr(sampler, "no_logprobs", "which does not keep them")
        raise ValueError(f"output_logprobs of a {type(sampler).__name__}, {why}; leave it out.")


def check_allowed(law: TokenLaw, vocab_size: int) -> None:
    """Refuse a law that allows ids outside the vocabulary."""
    if law.allowed is not None and law.allowed[1] > vocab_size:
        raise ValueError(
            f"allowed={law.allowed} reaches beyond the vocabulary of {vocab_size} tokens; "
            f"pass a range within (0, {vocab_size})."
        )


def device_of(model: object) -> torch.device:
    """Return where a model's calls run, as it says itself, or else where its weights are."""
    weights = (weight for module in modules_of(model) for weight in module.parameters())
    return torch.device(getattr(model, "device", None) or getattr(next(weights, None), "device", "cpu"))


def wants_graph(graph: bool | int | str, model: object) -> bool:
    """Return whether to record a decode, before anything is computed. "auto" records wherever recording is possible.

    Raises:
        ValueError: `graph` is True or a number, but the device is not CUDA, or the model is moved between devices.
    """
    if graph is False:
        return False
    device = device_of(model)
    if device.type != "cuda":
        if graph != AUTO:
            raise ValueError(f"graph={graph} on {device}: only CUDA records graphs; pass graph='auto'.")
        return False
    if any(hasattr(module, "_hf_hook") for root in modules_of(model) for module in root.modules()):
        if graph != AUTO:
            raise ValueError(
                f"graph={graph} for a model that is offloaded: a graph knows weights by their address. Keep the model "
                "on the device, or pass graph='auto'."
            )
        return False
    return True


class CheckedLaw:
    """A `TokenLaw` that refuses logits which define no law.

    Args:
        num_tokens: L. Logits that predict slots past the grid are not checked.
        deferred: remember the first bad slot of each sample, and raise in `finish`, after the decode. For CUDA, where
            an immediate check would stall the device at every call.
        vocab_size: V, where it is known.
    """

    def __init__(
        self, law: TokenLaw, num_tokens: int, *, deferred: bool = False, vocab_size: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.law = law
        self.num_tokens = num_tokens
        self.deferred = deferred
        # The law, what its numbers depend on beside it, and these.
        self._known: tuple[TokenLaw, tuple[bool, int], LawNumbers] | None = None
        self._first_bad: Tensor | None = None  # [B]
        self._samples: Tensor | None = None  # the samples still decoded; None: all

    def bind(self, num_tokens: int, vocab_size: int | None, guided: bool) -> None:
        """Decide what all calls of a decode have in common."""
        self.num_tokens, self.vocab_size = num_tokens, vocab_size
        if vocab_size is not None:
            self._decide(guided, vocab_size)

    def _decide(self, guided: bool, vocab_size: int) -> LawNumbers:
        check_allowed(self.law, vocab_size)
        numbers = self.law.numbers(guided, vocab_size)
        self._known = self.law, (guided, vocab_size), numbers
        return numbers

    def select(self, samples: Tensor) -> None:
        """Continue with the samples long [N] only. Messages keep the original numbers of the samples."""
        self._samples = samples if self._samples is None else self._samples[samples]

    def __call__(
        self, logits: Tensor, slots: Tensor, guided: bool, numbers: LawNumbers | None = None
    ) -> Tensor:
        """Return log-probabilities [B, W, V] from logits [R, W, V] that predict `slots` [B, W].

        `numbers`: of the law, where the caller knows them, and has looked at the shape of the logits.

        Raises:
            ValueError: logits of another shape, see `check_returned`.
            FloatingPointError: logits are nan, +inf, or only -inf (unless deferred); names sample, position and slot.
        """
        numbers = numbers or self.numbers(logits, slots, guided)
        # One look for all: few models forbid tokens by logits of -inf.
        finite = not self.deferred and math.isfinite(float(logits.sum()))
        if not finite:
            inside = logits[..., numbers.first : numbers.stop]
            bad = non_finite(inside)  # [R, W]
            if self.deferred:
                self.remember(bad, slots)
            elif bad.any():
                bad &= (slots < self.num_tokens).repeat(logits.shape[0] // slots.shape[0], 1)
                check_finite(logits.masked_fill(~bad[..., None], 0), slots, self.law.allowed, self._samples)
        return law_reference(logits, slots, numbers, finite=finite)

    def numbers(self, logits: Tensor, slots: Tensor, guided: bool) -> LawNumbers:
        """Return the law's numbers for logits [R, W, V] that predict `slots` [B, W]; refuse those of another shape."""
        size = logits.shape[-1] if self.vocab_size is None else self.vocab_size
        if tuple(logits.shape) != ((2 if guided else 1) * len(slots), slots.shape[1], size):
            check_returned(logits, len(slots), guided, slots.shape[1], self.vocab_size)
        known = self._known
        if known is not None and known[0] is self.law and known[1] == (guided, size):
            return known[2]
        return self._decide(guided, size)

    def remember(self, bad: Tensor, slots: Tensor) -> None:
        """Record for `finish` where logits define no law: BoolTensor [R, W], R a multiple of B. No host sync."""
        if not slots.shape[1]:
            return
        bad = bad.view(-1, *slots.shape).any(0) if len(bad) > len(slots) else bad
        # [samples still decoded]; slots past the grid come after all others.
        first = torch.where(bad, slots, self.num_tokens).amin(1)
        if self._first_bad is None:
            self._first_bad = torch.full_like(first, self.num_tokens)
        if self._samples is None:
            torch.minimum(self._first_bad, first, out=self._first_bad)
        else:
            self._first_bad.scatter_reduce_(0, self._samples, first, "amin")

    def finish(self) -> None:
        """Raise the error that was deferred.

        Raises:
            FloatingPointError: some logits defined no law; names sample and slot.
        """
        if self._first_bad is None:
            return
        for sample, slot in enumerate(self._first_bad.tolist()):
            if slot < self.num_tokens:
                raise FloatingPointError(
                    f"the logits of sample {sample}, slot {slot} hold nan, +inf, or only -inf; a law needs finite "
                    "logits, or -inf for forbidden tokens beside a finite one. Check the weights, or run the model "
                    "in float32 or bfloat16 if it overflows in float16."
                )


def open_id(model: object) -> int:
    """Return what stands for a token to decode in `known_tokens`: the mask id of a masked model, else -1."""
    return getattr(model, "mask_id", -1)


def check_known_tokens(
    model: NextTokenModel | AnyOrderModel | HidingModel, known_tokens: Tensor, batch_size: int
) -> None:
    """Refuse known tokens of a wrong shape or range, or none to decode."""
    grid, hidden = model.grid, open_id(model)
    shapes = [(batch_size, grid.num_tokens, grid.codebooks)]
    shapes += [shapes[0][:2]] if grid.codebooks == 1 else []
    if tuple(known_tokens.shape) not in shapes or known_tokens.dtype != torch.long:
        raise ValueError(
            f"known_tokens is {known_tokens.dtype} of shape {tuple(known_tokens.shape)}; pass int64 {shapes[-1]}, "
            f"with {hidden} where a token is to be decoded."
        )
    known = known_tokens[known_tokens != hidden]
    if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < model.vocab_size:
        raise ValueError(
            f"known_tokens holds ids from {int(known.min())} to {int(known.max())}; tokens are 0 to "
            f"{model.vocab_size - 1}, and {hidden} is to be decoded."
        )
    if known.numel() == known_tokens.numel():
        raise ValueError(f"all tokens are known; leave some at {hidden} to have them decoded.")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # Python asks for these when it imports
        raise AttributeError(name)
    from visual_spec.moved import find  # for names of earlier versions

    return find(__name__, name)
