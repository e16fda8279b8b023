"""The table of all samplers. Plain data, without PyTorch.

Exports, the reload of saved pipelines, the command line, the tables, the settings that `bench` and `eval` measure, and
the parametrised tests all read this table, and what other packages register (docs/EXTENDING.md).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

# The kinds of calls that models answer and samplers make, as `visual_spec.models.core.protocol` defines them.
RASTER = "raster"  # NextTokenModel: a window of tokens in raster order
TREE = "tree"  # TreeModel: several continuations of one sequence
ORDER = "order"  # OrderModel: positions out of raster order, each with its own mask
ANY_ORDER = "any-order"  # AnyOrderModel: any slots, each asked by name
OWN_ORDER = "own order"  # TrainedOrderModel, or an OrderModel of raster order: the steps it was trained for
BLOCKS = "blocks"  # TrainedOrderModel of blocks of tokens: a window of blocks
SCALES = "scales"  # ScaleModel: all tokens of a scale at once
COLUMNS = "columns"  # ColumnModel: columns of several codebooks
MASKED = "masked"  # MaskedModel: all hidden tokens at once
FRAMES = "frames"  # FrameModel: all hidden tokens of a frame at once, one frame after the other
CHUNKS = "chunks"  # ChunkModel of `continuous.chunks`: chunks of frames
CONTINUOUS = "continuous"  # CausalContinuousModel, MaskedContinuousModel: conditions of vectors
DENOISED = "denoised"  # BlockModel of `prototype.acdit.sampler`: blocks of noisy vectors
FLOW_SCALES = "flow scales"  # FlowScaleModel: a map of vectors at once, by flow matching
VECTORS = (CONTINUOUS, DENOISED, FLOW_SCALES)  # kinds whose tokens are vectors
DISTILLED = "distilled"  # DistilledModel: all tokens of a picture from its noise

RASTER_TREE_ORDER = (RASTER, TREE, ORDER, OWN_ORDER)

DRAFTER = "drafter"


@dataclass(frozen=True)
class SamplerEntry:
    """One sampler.

    Attributes:
        name: name on the command line.
        path: "module:class".
        calls: the kind of model calls it makes (the names above).
        promise: its output law, in words, for tables.
        needs: "drafter" if it needs a second model, else "".
        asks: what else it asks of a model that answers its calls, or of the model's law, in words.
        plain: whether it is the plain decoding of its kind of calls, which others are compared with.
        settings: what `bench` and `eval` measure if no samplers are named, as on the command line; ("",) measures
            the defaults, and () measures nothing.
        parts: "module:class" of the networks that it brings, which saved folders may name; of a sampler that needs a
            drafter these are its drafters.
    """

    name: str
    path: str
    calls: str
    promise: str
    needs: str = ""
    asks: str = ""
    plain: bool = False
    settings: tuple[str, ...] = ("",)
    parts: tuple[str, ...] = ()

    @property
    def class_name(self) -> str:
        """The class name."""
        return self.path.partition(":")[2]

    @property
    def module(self) -> str:
        """The name of the class's module."""
        return self.path.partition(":")[0]


_HERE = "visual_spec.samplers"
SAMPLERS = (
    SamplerEntry(
        "autoregressive",
        f"{_HERE}.raster.autoregressive:AutoregressiveSampler",
        RASTER,
        "the reference",
        plain=True,
    ),
    SamplerEntry(
        "speculative-jacobi",
        f"{_HERE}.raster.jacobi:SpeculativeJacobiSampler",
        RASTER,
        "identical or lossless; grouped, relaxed: measured",
        settings=(
            "",
            "coupling=gumbel,acceptance=exact",
            "coupling=maximal,acceptance=exact",
            "coupling=independent,acceptance=exact",
        ),
    ),
    SamplerEntry(
        "drafted",
        f"{_HERE}.raster.drafted:DraftedSampler",
        RASTER,
        "identical or lossless",
        DRAFTER,
        settings=(),
    ),
    SamplerEntry(
        "tree", f"{_HERE}.raster.tree:TreeSampler", TREE, "lossless; relaxed: measured", DRAFTER, settings=()
    ),
    SamplerEntry("zipar", f"{_HERE}.orders.zipar:ZipARSampler", ORDER, "measured", settings=()),
    SamplerEntry(
        "ordered",
        f"{_HERE}.orders.ordered:OrderedSampler",
        OWN_ORDER,
        "lossless in the model's own order; in others approximate, not measured",
        settings=(),
    ),
    SamplerEntry(
        "block-jacobi",
        f"{_HERE}.orders.blocks:BlockJacobiSampler",
        BLOCKS,
        "identical or lossless, to one block a call",
        settings=("", "coupling=maximal,acceptance=exact"),
    ),
    SamplerEntry(
        "any-order",
        f"{_HERE}.orders.any_order:AnyOrderSampler",
        ANY_ORDER,
        "the reference; several tokens a call (RandAR, LPD, ARPG): a law of its own",
        plain=True,
    ),
    SamplerEntry(
        "speculative-any-order",
        f"{_HERE}.orders.any_order_speculative:SpeculativeAnyOrderSampler",
        ANY_ORDER,
        "identical or lossless, to one token a call in its order",
        settings=("", "acceptance=exact"),
    ),
    SamplerEntry(
        "columns", f"{_HERE}.raster.columns:ColumnAutoregressiveSampler", COLUMNS, "the reference", plain=True
    ),
    SamplerEntry(
        "column-jacobi",
        f"{_HERE}.raster.columns_jacobi:ColumnJacobiSampler",
        COLUMNS,
        "identical or lossless; relaxed: measured",
        settings=(
            "",
            "coupling=gumbel,acceptance=exact",
            "coupling=maximal,acceptance=exact",
            "coupling=independent,acceptance=exact",
            "coupling=maximal,acceptance=grouped,unit=codebook",
            "coupling=maximal,acceptance=lantern,unit=codebook",
        ),
    ),
    SamplerEntry("masked", f"{_HERE}.masked.masked:MaskedSampler", MASKED, "a law of its own", plain=True),
    SamplerEntry(
        "speculative-masked",
        f"{_HERE}.masked.speculative:SpeculativeMaskedSampler",
        MASKED,
        "identical or lossless, to one token a call in its order",
        settings=(),
        asks="one codebook",
    ),
    SamplerEntry(
        "frame-masked",
        f"{_HERE}.masked.frames:FrameMaskedSampler",
        FRAMES,
        "a law of its own, frame by frame",
        plain=True,
    ),
    SamplerEntry(
        "scale-wise",
        f"{_HERE}.scales.scales:ScaleWiseSampler",
        SCALES,
        "the reference; several models (CoDe), schedules: measured on request",
        plain=True,
    ),
    SamplerEntry(
        "continuous",
        f"{_HERE}.continuous.continuous:ContinuousSampler",
        CONTINUOUS,
        "the reference; fewer steps or levels: another law",
        plain=True,
    ),
    SamplerEntry(
        "speculative-continuous",
        f"{_HERE}.continuous.drafted:SpeculativeContinuousSampler",
        CONTINUOUS,
        "lossless; aligned, cspd: measured",
        DRAFTER,
        settings=(),
        asks="final_noise",
    ),
    SamplerEntry(
        "continuous-jacobi",
        f"{_HERE}.continuous.jacobi:ContinuousJacobiSampler",
        CONTINUOUS,
        "lossless; aligned: lossy",
        settings=(),
        asks="final_noise",
    ),
    SamplerEntry(
        "head-speculation",
        f"{_HERE}.continuous.head:HeadSpeculativeSampler",
        CONTINUOUS,
        "lossless",
        settings=(),
    ),
    SamplerEntry(
        "chunk-wise",
        f"{_HERE}.continuous.chunks:ChunkWiseSampler",
        CHUNKS,
        "a law of its own, chunk by chunk",
        plain=True,
        settings=(),
    ),
)


def registered(group: str) -> list[Any]:
    """What packages offer under an entry point, `visual_spec.samplers` or `visual_spec.families`.

    An entry point leads to a tuple of records. That of `visual_spec.prototype` is read with or without the metadata of
    an installation, which a checkout lacks. A package that cannot be imported is left out with a warning.
    """
    from importlib.metadata import EntryPoint, entry_points  # not at `import visual_spec`: it takes a while

    own = EntryPoint("prototype", f"visual_spec.prototype.table:{group.rpartition('.')[2].upper()}", group)
    records: list[Any] = []
    for point in {point.value: point for point in (own, *entry_points(group=group))}.values():
        try:
            records += point.load()
        except Exception as error:  # of somebody else's code
            warnings.warn(f"{point.value}, registered as {group}, cannot be used: {error!r}", stacklevel=2)
    return records


@functools.cache
def all_samplers() -> tuple[SamplerEntry, ...]:
    """The samplers of this table, then those that packages register; of two with one name the first."""
    by_names: dict[str, SamplerEntry] = {}
    for entry in (*SAMPLERS, *registered("visual_spec.samplers")):
        if by_names.setdefault(entry.name, entry) is not entry:
            warnings.warn(
                f"{entry.path} is left out: {entry.name} is {by_names[entry.name].path}", stacklevel=2
            )
    return tuple(by_names.values())


def names() -> list[str]:
    """Return the command-line names, in the order of the table."""
    return [entry.name for entry in all_samplers()]


def meant(name: str, known: Iterable[str]) -> str:
    """How an error about an unknown name ends: with the nearest one there is; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]}?" if near else ""


def by_name(name: str) -> SamplerEntry:
    """Return the entry of a command-line name, or of "module:class" of a sampler that nobody registers.

    Raises:
        ValueError: the name is unknown; the message lists the names.
    """
    if ":" in name:
        return _unregistered(name)
    for table in (lambda: SAMPLERS, all_samplers):  # what packages register is read if it is needed
        for entry in table():
            if entry.name == name:
                return entry
    raise ValueError(f"unknown sampler {name!r}; pass one of {', '.join(names())}.{meant(name, names())}")


def _unregistered(path: str) -> SamplerEntry:
    """The entry of a class by its path: it makes the calls of its nearest parent, if it does not declare `calls`."""
    if "" not in sys.path:
        sys.path.append("")  # the folder that a command runs in
    kind = sampler_class(SamplerEntry(path, path, "", ""))
    known = {entry.path: entry for entry in all_samplers()}
    parents = [f"{one.__module__}:{one.__name__}" for one in kind.__mro__]
    entry = next(
        (known[parent] for parent in parents if parent in known), SamplerEntry(path, path, "", "its own")
    )
    calls = getattr(kind, "calls", entry.calls)
    return replace(entry, name=path, path=path, calls=calls, plain=False, settings=())


def by_class(class_name: str) -> SamplerEntry:
    """Return the entry of a class.

    Raises:
        ValueError: the class is unknown; the message lists the classes.
    """
    for entry in all_samplers():
        if entry.class_name == class_name:
            return entry
    raise ValueError(
        f"{class_name} is no sampler; pass one of {', '.join(entry.class_name for entry in all_samplers())}."
    )


def sampler_class(entry: SamplerEntry) -> Any:
    """Return the class of an entry. Imports its module only.

    Raises:
        ValueError: there is no such module or class.
    """
    try:
        return getattr(importlib.import_module(entry.module), entry.class_name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"no sampler {entry.path}: {error}; pass one of {', '.join(names())}, or module:class."
        ) from error


# Settings that other samplers have now: by the class that had them, their names, and the sampler of today.
MOVED_SETTINGS = {
    "MaskedSampler": (("reuse", "reuse_from", "reuse_by"), "reusing-masked"),
    "ContinuousSampler": (("reuse", "reuse_from", "local_levels"), "reusing-continuous"),
}


def class_for(kind: Any, settings: Mapping[str, Any]) -> Any:
    """Return the class of a sampler with these settings; warns where it is another one than `kind`."""
    names, now = MOVED_SETTINGS.get(kind.__name__, ((), ""))
    moved = [name for name in names if name in settings]
    if not moved:
        return kind
    entry = by_name(now)
    text = (
        f"{kind.__name__}({', '.join(moved)}) is {entry.class_name}, {now}; this goes with visual_spec 0.3."
    )
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return sampler_class(entry)


def class_saved(kind: Any, config: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Return the class of a sampler with a saved configuration, and settings in it which that class has no more.

    Folders load for ever, so nothing warns.
    """
    names, now = MOVED_SETTINGS.get(kind.__name__, ((), ""))
    return (sampler_class(by_name(now)), ()) if now and config.get("reuse") else (kind, names)


def fitting(calls: tuple[str, ...]) -> list[SamplerEntry]:
    """Return the samplers whose calls a model answers."""
    return [entry for entry in all_samplers() if entry.calls in calls]


def fit(calls: tuple[str, ...], entry: SamplerEntry) -> str:
    """Return whether a sampler fits models of these calls: "yes", "+ " and what else it takes, or "-".

    A pipeline itself knows more: `visual_spec.pipelines.accelerate.refusals`.
    """
    if entry.calls not in calls:
        return "-"
    return ", ".join(f"+ {part}" for part in (entry.needs, entry.asks) if part) or "yes"


# What a sampler should do, and how those that do it are named.
_FITTING = {
    RASTER: ("fit a next-token model", "those that fit: "),
    SCALES: ("fit a next-scale model", "pass a "),
    COLUMNS: ("decode several codebooks", "those that do: "),
    MASKED: ("fill in hidden codes", "those that do: "),
}


def check_sampler(sampler: Any, calls: tuple[str, ...]) -> None:
    """Refuse a sampler that makes other calls than the model answers.

    What is not in the registry fits if it is callable and says whether it is `lossless`; if it declares its `calls`, a
    kind of this table or several, these have to be among them.

    Raises:
        TypeError: names those that fit.
    """
    if isinstance(sampler, type):
        raise TypeError(
            f"sampler is the class {sampler.__name__}; pass an object of it, {sampler.__name__}()."
        )
    states = hasattr(type(sampler), "lossless") or hasattr(sampler, "lossless")
    if states and callable(sampler) and _calls_of(sampler) <= set(calls):
        return
    does, advice = _FITTING.get(calls[0], ("fit this model", "those that fit: "))
    names = ", ".join(entry.class_name for entry in fitting(calls))
    raise TypeError(f"sampler is {type(sampler).__name__}, which does not {does}; {advice}{names}.")


def _calls_of(sampler: Any) -> set[str]:
    """The kinds of calls that a sampler makes: what it declares, or what its class has in the registry, if anything."""
    declared = getattr(sampler, "calls", None)
    if declared is not None:
        return {declared} if isinstance(declared, str) else set(declared)
    for kind in type(sampler).__mro__:  # a sampler derived from another one calls as its nearest parent
        path = f"{kind.__module__}:{kind.__name__}"
        for entry in SAMPLERS if path.startswith(f"{_HERE}.") else all_samplers():
            if entry.path == path:
                return {entry.calls}
    return set()
