"""What accelerated models of other libraries share: functions are hung on the object, and taken off again."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from visual_spec.samplers.core.precision import low_precision_of
from visual_spec.samplers.core.trace import IDENTICAL, LOSSLESS, OTHER, promised, up_to_near_ties
from visual_spec.samplers.registry import check_sampler

if TYPE_CHECKING:
    from visual_spec.samplers.core.base import Sampler

Thing = TypeVar("Thing")
PLAIN = "_visual_spec_plain"
_ABSENT = object()


class Adapter(ABC):
    """How `visual_spec.accelerate` treats one kind of models. It has no state: what is hung lies on the models.

    Attributes:
        takes: names of what it takes, for refusals.
        calls: kinds of calls that its models answer.
        fast_sampler: text of the sampler that `accelerate` sets by default; None: there is nothing to choose.
        options: arguments of `accelerate` beside the sampler that it takes: "drafter", "codes", "end".
        kin: patterns of the names of classes of transformers that are for it, be it to refuse them; else see `models`.
    """

    takes: ClassVar[Sequence[str]]
    calls: ClassVar[tuple[str, ...]] = ()
    fast_sampler: ClassVar[str | None]
    options: ClassVar[Collection[str]] = ()
    kin: ClassVar[Collection[str]] = ()

    @abstractmethod
    def models(self, thing: object) -> Sequence[Any]:
        """The models of this kind that an object is, wraps or holds."""

    @abstractmethod
    def accelerate(self, thing: Thing, sampler: Any, **options: Any) -> Thing:
        """Hang the accelerated functions on the models of an object, and return the object; refusals change nothing."""

    def claims(self, thing: object) -> bool:
        """Whether an object is for this adapter, be it to refuse it by name."""
        return is_of(unwrapped(thing), self.kin) or bool(self.models(thing))

    def parts(self, model: Any) -> Sequence[object]:
        """What `accelerate` hangs functions on: a model, and parts of it."""
        return (model,)

    def read_text(self, text: str) -> object:
        """The sampler of a text: `name` or `name:setting=value,...`."""
        from visual_spec.pipelines.sampler_text import read_sampler

        return read_sampler(text)

    def restore(self, thing: Thing) -> Thing:
        """Undo `accelerate`; what was not accelerated is left as it is. Returns the same object."""
        for model in self.models(thing):
            for part in self.parts(model):
                take_off(part)
        return thing

    def summary(self, thing: object) -> str:
        """What the last call of each accelerated model cost, a line each."""
        lines = [self.line(model) for model in self.models(thing) if is_accelerated(model)]
        return "\n".join(lines) or f"{type(thing).__name__}: not accelerated"

    def line(self, model: Any) -> str:
        """What the last call of an accelerated model cost; before the first, what to expect."""
        trace = model.last_trace
        return self.promised(model) if trace is None else trace.summary()

    def promised(self, model: object) -> str:
        """One line on an accelerated model whatever it has decoded: what was done, and whether its output stays."""
        return f"{type(model).__name__}: {self.expects(model)}; nothing decoded yet"

    def expects(self, model: Any) -> str:
        """What an accelerated model does, and whether its output stays."""
        return promise(model.sampler, model=model)


def promise(sampler: Sampler, plain: Sampler | None = None, model: object = None) -> str:
    """A sampler by name, and what becomes of the tokens beside those of `plain`; None: plain decoding's defaults.

    `model`: whose type limits it, where rounding decides near-ties.
    """
    kept = promised(sampler, plain)
    low = (
        None
        if model is None or getattr(sampler, "config", {}).get("exact_width")
        else low_precision_of(model)
    )
    words = {IDENTICAL: up_to_near_ties("the same tokens", low), LOSSLESS: "the same law", OTHER: OTHER}
    return f"{type(sampler).__name__}, {words.get(kept, 'not lossless')}"


def hang(model: object, **attributes: object) -> None:
    """Set attributes of an object, and remember those that it had of its own before it was first accelerated.

    Copies and pickles of the object are plain: what is hung belongs to this one, and may hold graphs of a GPU.
    """
    own = vars(model)
    before = own.setdefault(PLAIN, {})
    attributes["__getstate__"] = functools.partial(_plain_state, model)
    for name, value in attributes.items():
        before.setdefault(name, own.get(name, _ABSENT))
        own[name] = value


def take_off(thing: object) -> None:
    """Give an object back what it had before `hang`."""
    _made_plain(vars(thing))


def _made_plain(own: dict[str, Any]) -> dict[str, Any]:
    for name, value in own.pop(PLAIN, {}).items():
        own.pop(name, None)
        if value is not _ABSENT:
            own[name] = value
    return own


def _plain_state(model: object) -> object:
    """What `copy` and `pickle` make another object of."""
    blank = object.__new__(type(model))
    vars(blank).update(_made_plain(dict(vars(model))))
    return blank.__getstate__()


def tell(model: object, before: bool, **values: object) -> None:
    """Set what the last call has come to, such as `last_trace`; not on a model that was accelerated `before` the call
    and restored meanwhile."""
    if is_accelerated(model) or not before:
        vars(model).update(values)


def is_accelerated(model: object) -> bool:
    """Whether something is hung on it."""
    return PLAIN in vars(model)


def plain(model: object, name: str) -> Any:
    """A method of an accelerated model as it was before."""
    before = vars(model)[PLAIN].get(name, _ABSENT)
    return getattr(type(model), name).__get__(model) if before is _ABSENT else before


def unwrapped(thing: Any) -> Any:
    """The model inside a compiled model, a PEFT model or a pipeline of transformers; other things as they are.

    What is hung on it is seen through the wrapper, too: all three look up there what they do not have themselves.

    Raises:
        TypeError: a PEFT model that learned a prompt, which is no part of the model inside.
    """
    while True:
        kinds = type(thing).__mro__
        if "_orig_mod" in getattr(thing, "_modules", {}):  # torch.compile
            thing = thing._orig_mod
        elif any(kind.__name__ == "PeftModel" for kind in kinds):
            if getattr(thing.active_peft_config, "is_prompt_learning", False):
                raise TypeError(
                    f"cannot accelerate a {type(thing).__name__} that learned a prompt; pass an adapter that changes "
                    "weights, such as LoRA."
                )
            thing = thing.get_base_model()
        elif any(kind.__module__.startswith("transformers.pipelines") for kind in kinds):
            thing = thing.model
        else:
            return thing


def is_of(thing: object, names: Collection[str], library: str = "transformers") -> bool:
    """Whether it is an object of a class of a library ("": of any), or of a subclass, by name: nothing is imported."""
    begins = f"{library}." if library else ""
    return any(
        fnmatchcase(kind.__name__, name) and kind.__module__.startswith(begins)
        for kind in type(thing).__mro__
        for name in names
    )


def refuse_sampler(model: object, sampler: object, why: str) -> None:
    """Refuse a sampler of a model that takes none.

    Raises:
        TypeError: says why.
    """
    if sampler is not None:
        raise TypeError(
            f"{type(sampler).__name__} given; a {type(model).__name__} takes no sampler: {why}. Pass the model alone."
        )


def check_needs(sampler: object, drafter: object, fitting: str) -> None:
    """Refuse a sampler that could not make its first call.

    Raises:
        ValueError: it drafts with a second model, and there is none; or it needs a codebook, which is not at hand.
    """
    name = type(sampler).__name__
    if getattr(sampler, "needs_codebook", False):
        raise ValueError(
            f"{name} with these settings needs the codebook of the decoder, which no model of transformers hands out; "
            "pass a sampler without a codebook, such as 'speculative-jacobi'."
        )
    if getattr(sampler, "needs_drafter", False) and drafter is None:
        raise ValueError(
            f"{name} needs a drafter; pass visual_spec.accelerate(model, sampler, drafter=...), {fitting}."
        )


def check_writes_texts(
    sampler: Sampler, calls: tuple[str, ...], fitting: str, drafter: object = None
) -> None:
    """Refuse a sampler that does not fit a model of these calls, or that decodes no texts which end early.

    `fitting`: about the drafter, see `check_needs`.

    Raises:
        TypeError: it does not fit.
        ValueError: see `check_needs`.
    """
    check_sampler(sampler, calls)
    check_needs(sampler, drafter, fitting)
    if not getattr(sampler, "reads_text", False):
        raise TypeError(
            f"{type(sampler).__name__} decodes no texts that end early; pass 'speculative-jacobi' or "
            "'autoregressive'."
        )
