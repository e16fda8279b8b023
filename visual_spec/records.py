"""What is known of media, pipelines, families and their files: the records that the table of families is made of.

Plain data, without PyTorch. The paths in a record are below its `home`, so another package's records name its own.
"""

import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PipelineFacts:
    """What those who draw, measure or compare need to know of a pipeline, loaded or saved.

    Attributes:
        medium: "image", "video" or "audio".
        unit: what a call commits, in the plural, as printed: "tokens", "columns" or "scales".
        calls: the kinds of calls that its model answers (`visual_spec.samplers.registry`).
        plain_sampler: its plain decoding, as on the command line.
        fast_sampler: what `visual_spec.accelerate` sets when no sampler is named; the plain one where no other has been
            faster by the clock.
        shorter_sampler: where the fast sampler is the plain one, one that takes less time and has a law of its own.
        default_settings: the law's settings where none are given.
        comparable: whether an accelerated decoding is compared with the plain one. Masked models and Infinity have one
            way to decode.
        stored_as: what keeps a sample: its token "ids", or the finished "canvas" where ids do not tell the picture.
    """

    medium: str
    unit: str
    calls: tuple[str, ...]
    plain_sampler: str
    fast_sampler: str
    default_settings: Mapping[str, Any]
    comparable: bool = True
    stored_as: str = "ids"
    shorter_sampler: str | None = None


@dataclass(frozen=True)
class MediumWords:
    """What the samples of a medium are called.

    Attributes:
        samples: in the plural.
        truth: true samples, in the plural.
        key: the list of them in a document.
        nameless: the file of one whose prompt has no letters.
        ending: of the file that keeps one exactly, but for the 16 bits of sound.
    """

    samples: str
    truth: str
    key: str
    nameless: str
    ending: str


MEDIA = {
    "image": MediumWords("pictures", "scenes", "images", "picture", "png"),
    "video": MediumWords("clips", "clips", "videos", "clip", "npy"),
    "audio": MediumWords("clips", "clips", "clips", "tune", "wav"),
}


@dataclass(frozen=True)
class PipelineEntry:
    """One pipeline class.

    Attributes:
        path: "module:class".
        medium: a key of `MEDIA`.
        condition: what its models read: "text", "label", or "" for nothing.
        hub_tag: the task under which the Hub lists it.
        home: the package that `path` is below.
    """

    path: str
    medium: str
    condition: str
    hub_tag: str
    home: str = "visual_spec.pipelines"

    @property
    def class_name(self) -> str:
        """The class name."""
        return self.path.partition(":")[2]

    @property
    def module(self) -> str:
        """The name of the class's module."""
        return f"{self.home}.{self.path.partition(':')[0]}"


@dataclass(frozen=True)
class KnownModel:
    """One size of a family, with the figures of the official weights; tests recompute them on the meta device.

    Attributes:
        name: name for display.
        weights: the official files or repository; "" if none are released.
        pixels: side of the pictures; 0 for an audio model.
        tokens: slots of a picture, or columns of a clip.
        prefix: positions before the first token (for a prompt of usual length if it is not fixed).
        parameters: number of weights of the token model, without tokenizers and text encoders.
        cached: numbers that the cache holds for one position of one row: keys and values of all layers.
        uncached: slots that nothing reads and that are not cached: the last scale of a next-scale model.
        load: the function that loads it; "": the family's.
        published: the sampler and the guidance scale of the published figures, where `from_official` sets them by size.
        verified: a key of `VERIFIED`; "": the family's.
        calls: the kinds of calls it answers; (): the family's.
        rows: of the cache, for one sample: 2 with guidance.
    """

    name: str
    weights: str
    pixels: int
    tokens: int
    prefix: int
    parameters: int
    cached: int
    uncached: int = 0
    load: str = ""
    published: tuple[str, float] | None = None
    verified: str = ""
    calls: tuple[str, ...] = ()
    rows: int = 2

    def memory(self, bytes_each: int, *, batch_size: int = 1, guided: bool = True) -> int:
        """Return the bytes of weights and cache while `batch_size` pictures are drawn.

        Args:
            bytes_each: bytes of a number: 4 for float32, 2 for bfloat16.
        """
        rows = batch_size * (self.rows if guided else 1)
        held = self.prefix + self.tokens - self.uncached
        return (self.parameters + rows * held * self.cached) * bytes_each


@dataclass(frozen=True)
class OfficialFile:
    """A kind of official files. Functions are "module:function".

    Attributes:
        role: the argument of the pipeline's `from_official` that takes it.
        name: for display; or a function of the file, as `read_checkpoint` reads it, that says it.
        recognise: (weights) -> whether a file is of this kind; or keys that its weights have, `*` in them for anything.
        load: makes a model of the file alone; takes it, and a dtype.
        size: the argument of `load` that takes the side of the pictures, or what `sizes` makes of it; "": the file
            says it.
        sizes: (side or None, file) -> what `load` takes.
        pipeline: of a transformer, the class that draws with it.
        own: whether it is of this family alone; others share it.
        folder: whether it may be a folder of shards.
        holds: (weights) -> whether a file of the transformer holds the tokenizer too.
        lacks: keys that its weights do not have, likewise.
        unpack: (path, content of a file) -> the weights to take where a file of this kind holds several, as a
            `Checkpoint`; None of other files.
        home: the package that the functions are below.
    """

    role: str
    name: str
    recognise: str | tuple[str, ...]
    load: str
    size: str = ""
    sizes: str = ""
    pipeline: str = ""
    own: bool = True
    folder: bool = False
    holds: str = ""
    lacks: tuple[str, ...] = ()
    unpack: str = ""
    home: str = "visual_spec.models"

    def function(self, path: str) -> Callable[..., Any]:
        """The function of one of these fields. Imports its module."""
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(f"{self.home}.{module}"), name)

    def fits(self, weights: Mapping[str, object]) -> bool:
        """Whether weights are of this kind, as `recognise` and `lacks` say."""
        if isinstance(self.recognise, str):
            return self.function(self.recognise)(weights)
        has = [bool(fnmatch.filter(weights, key)) for key in self.recognise]
        return all(has) and not any(fnmatch.filter(weights, key) for key in self.lacks)


@dataclass(frozen=True)
class FileLayout:
    """The official files of a family, for `visual-spec convert`: one of each kind, or some of them.

    Attributes:
        files: the kinds.
        second: the argument of `from_official` that takes a second, smaller transformer.
        size: the one that takes the side of the pictures; "": the weights say it.
        tokenizer: the official name of its file.
        assemble: in place of all these, "module:function" below `visual_spec`: (files and folders, dtype or None) ->
            the pipeline or model to save, and what each file is: {path: name}.
        recognise: likewise (file or path of a folder) -> whether it is of this layout.
    """

    files: tuple[OfficialFile, ...] = ()
    second: str = ""
    size: str = ""
    tokenizer: str = ""
    assemble: str = ""
    recognise: str = ""


@dataclass(frozen=True)
class AsSaved:
    """A sampler with the settings of the one that a pipeline was saved with, which belong to its law.

    Attributes:
        name: as on the command line.
        keeps: the settings that it takes over where the saved sampler is of another class.
        others: settings that it has then beside them.
        whole: whether it takes over all settings where the saved sampler is of its class.
    """

    name: str
    keeps: tuple[str, ...] = ()
    others: Mapping[str, object] = field(default_factory=dict)
    whole: bool = True


@dataclass(frozen=True)
class Saved:
    """A setting of the saved sampler, or `otherwise` where it has none."""

    otherwise: object


@dataclass(frozen=True)
class Measured:
    """Settings that `bench` and `eval` measure: a sampler, and the values of each setting, in every combination.

    Attributes:
        sampler: its name, as on the command line.
        settings: {name: values}; a value may be a `Saved`.
        part: the component of the pipelines that they are for; "": all.
    """

    sampler: str
    settings: Mapping[str, Sequence[object]] = field(default_factory=dict)
    part: str = ""


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        name: name for display, once in the table.
        calls: the kinds of calls its models answer (`visual_spec.samplers.registry`).
        pipelines: classes of the pipelines that draw with it; none: models of other libraries (`accelerate`).
        parts: "module:class" of the classes that a saved folder may name.
        saved: settings in model_index.json, or class names of components, that tell a saved folder of this family from
            others of the same pipeline; nothing: it is the usual one.
        samplers: class names of samplers, likewise.
        unit: what a call commits, in the plural.
        plain: its plain decoding, as on the command line, or with settings of the saved sampler.
        fast: what `visual_spec.accelerate` sets when no sampler is named, likewise; "": the plain one.
        shorter: one that takes less time and has a law of its own, where the fast one is the plain one.
        comparable: whether an accelerated decoding is compared with the plain one.
        stored_as: what keeps a sample: its token "ids", or the finished "canvas".
        measured: what `bench` and `eval` measure if no settings are named; or "module:function" below `visual_spec`,
            which chooses them; "": they do not measure it.
        drafters: classes among `parts` that `load_drafter` takes.
        refiners: classes among `parts` that `load_refiner` takes.
        of_diffusers: class of diffusers' pipeline whose folders its pipeline loads.
        of_transformers: classes of transformers whose pictures `accelerate` draws: {class: what draws with its objects,
            "module:class" below `visual_spec.models`}.
        layout: its official files, which `visual-spec convert` asks for in the order of the table.
        sizes: the official weights.
        load, verified: see `KnownModel`.
        home: the package that the modules of `parts` are below.
    """

    name: str
    calls: tuple[str, ...]
    pipelines: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    saved: Mapping[str, Any] = field(default_factory=dict)
    samplers: tuple[str, ...] = ()
    unit: str = "tokens"
    plain: str | AsSaved = ""
    fast: str | AsSaved = ""
    shorter: str | None = None
    comparable: bool = True
    stored_as: str = "ids"
    measured: str | tuple[Measured, ...] = "eval.defaults:settings_for"
    drafters: tuple[str, ...] = ()
    refiners: tuple[str, ...] = ()
    of_diffusers: str = ""
    of_transformers: Mapping[str, str] = field(default_factory=dict)
    layout: FileLayout | None = None
    sizes: tuple[KnownModel, ...] = ()
    load: str = ""
    verified: str = "official layout"
    home: str = "visual_spec.models"

    def fits(self, pipeline: str, settings: Mapping[str, Any], sampler: Mapping[str, object]) -> bool:
        """Whether a saved pipeline is of this family; arguments as for `family_of`."""
        held = {name: settings.get(name) for name in self.saved}  # of a component: its module and class
        same = all(
            (held[name] or [None])[-1] == value if isinstance(value, str) else held[name] == value
            for name, value in self.saved.items()
        )
        drawn = not self.samplers or sampler.get("_class_name") in self.samplers
        return pipeline in self.pipelines and same and drawn
