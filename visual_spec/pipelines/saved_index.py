"""How saved pipelines are loaded: model_index.json, and what it says of every component, is checked before all else.

Only configurations and the headers of weights are read. What diffusers and transformers would meet halfway, with an
error about something else or after minutes of work, is refused here by the name of its file.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, cast

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import deprecation_utils

import visual_spec.pipelines.components as components
from visual_spec.families import all_families, all_pipelines
from visual_spec.files.reading import shortened
from visual_spec.models.core.saved import SavedModel, check_folder, check_loaded, fetched, read_settings
from visual_spec.pipelines.components import annotated_types, resolved
from visual_spec.pipelines.embedded import (
    INDEX,
    SHARED,
    embedded_folder,
    embedded_models,
    local_folder,
    missing_models,
    part_folder,
    refuse_no_pipeline,
    shared_parts,
)
from visual_spec.samplers.core.law import TokenLaw

# How the diffusers that is installed calls the dtype of weights; one that knows the new name warns of the old one.
_DTYPE = "dtype" if hasattr(deprecation_utils, "_resolve_dtype") else "torch_dtype"

# A false alarm: diffusers 0.42 warns at each cast even when the list of float32 modules is empty.
logging.getLogger("diffusers.models.modeling_utils").addFilter(
    lambda record: "should be kept in float32: []" not in record.getMessage()
)

# Only what `save_pretrained` writes: a repository's pickles and scripts are never fetched.
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md"]

_LIBRARIES = ("diffusers", "transformers")
_TOKENIZER = "PreTrainedTokenizerBase"
# What an annotation of a setting allows; a number is finite.
_KINDS: dict[str, Callable[[object], bool]] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    ),
    "str": lambda value: isinstance(value, str),
    "list[str]": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "ScaleBudget": lambda value: isinstance(value, dict),
}


def read_index_file(folder: Path) -> dict[str, Any]:
    """Return what the model_index.json of a folder says.

    Raises:
        ValueError: it is no JSON object, or names no class of a pipeline; names the file.
    """
    path = folder / INDEX
    index = read_settings(path)
    saved_as = index.get("_class_name")
    if isinstance(saved_as, str) or isinstance(saved_as, list) and saved_as[:1] == ["pipeline"]:
        index = resolved(index)  # a pair has a pipeline.py beside it
    if not isinstance(index.get("_class_name"), str):
        raise ValueError(
            f"{path} says _class_name={shortened(index.get('_class_name'))}; it should name the class of a pipeline. "
            "Copy or download it again."
        )
    return index


def check_saved_pipeline(
    folder: Path, kind: type, *, passed: Mapping[str, object] | None = None, variant: str | None = None
) -> None:
    """Refuse a folder from which a pipeline cannot be built as its files say.

    Args:
        folder: with model_index.json.
        kind: the class of the pipeline.
        passed: components and settings that the caller passes; what the folder says of them does not matter.
        variant: as for `from_pretrained`.

    Raises:
        ValueError: a file is damaged, or its values are of wrong kinds or do not fit the weights; names the file.
    """
    index, parameters = read_index_file(folder), dict(inspect.signature(kind.__init__).parameters)
    del parameters["self"]
    _check_shared(folder / SHARED)
    passed = {name: value for name, value in (passed or {}).items() if name in parameters}
    sampler: dict[str, Any] = {}
    pipelines = {parent.__name__ for parent in kind.__mro__}
    families = [family for family in all_families() if pipelines & set(family.pipelines)]
    for name, parameter in parameters.items():
        if name in passed:
            continue
        kinds = _kinds(parameter.annotation)
        kinds += [
            family.saved[name] for family in families if name in family.saved and not _is_setting(kinds)
        ]
        if _is_setting(kinds):
            if name in index and not any(_KINDS[kind](index[name]) for kind in kinds):
                allowed = " or ".join("null" if one == "None" else one.partition("[")[0] for one in kinds)
                raise ValueError(
                    f"{folder / INDEX} says {name}={shortened(index[name])}; it should be {allowed}."
                )
            continue
        if name not in index and parameter.default is inspect.Parameter.empty:
            raise ValueError(f"{folder / INDEX} names no {name}; copy or download it again.")
        value = index.get(name, [None, None])
        if value == [None, None]:
            continue
        component = _class_of(folder / INDEX, name, value, kinds)
        if issubclass(component, SchedulerMixin):
            sampler = _check_sampler(part_folder(folder, name), component)
        else:
            _check_component(part_folder(folder, name), component, variant)
    _check_law(folder / INDEX, kind, {**index, **passed}, sampler)


def _check_shared(path: Path) -> None:
    """Refuse a list of components in other folders that names anything but folders beside this one."""
    if path.exists():
        for name, owner in read_settings(path).items():
            names = owner.split("/") if isinstance(owner, str) else []
            if len(names) not in (1, 2) or any(
                Path(part).name != part or part in ("", "..") for part in names
            ):
                raise ValueError(
                    f"{path} says {name}={shortened(owner)}; it should be the name of a folder beside it, or that and "
                    'the name of a component there, as "shapes/transformer".'
                )


def _kinds(annotation: object) -> list[str]:
    """The kinds that an annotation allows, classes without their modules."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = text.replace("typing.", "")
    parts = [part.strip() for part in text.split("|")]
    return [part if "[" in part else part.rpartition(".")[2] for part in parts]


def _is_setting(kinds: list[str]) -> bool:
    return all(kind in _KINDS for kind in kinds)


def _class_of(path: Path, name: str, value: object, kinds: list[str]) -> type:
    """The class of a component."""
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)):
        raise ValueError(
            f"{path} says {name}={shortened(value)}; it should be a pair of a module and a class. Copy or download it "
            "again."
        )
    library, class_name = value
    home = components if library in ("visual_spec", components.__name__) else None
    if library in _LIBRARIES:
        home = __import__(library)
    elif home is None:
        home = sys.modules.get(library)  # the caller's own
    component = getattr(home, class_name, None) if class_name.rpartition(":")[2].isidentifier() else None
    if not isinstance(component, type):
        raise ValueError(
            f"{path} says {name}={shortened(value)}, which is no class of visual_spec, diffusers or transformers; "
            f"import {library} first if it is your own, or pass {name}=...."
        )
    fits = {parent.__name__ for parent in component.__mro__}
    if _TOKENIZER in kinds:
        fits |= {_TOKENIZER} if "Tokenizer" in class_name else set()
    if not fits & set(kinds):
        wanted = ", ".join(kind for kind in kinds if kind != "None")
        raise ValueError(f"{path} says that {name} is a {class_name}; it should be one of {wanted}.")
    return component


def _check_sampler(folder: Path, kind: Any) -> dict[str, Any]:
    """Refuse settings of which no sampler is made; returns them."""
    path = folder / "sampler_config.json"
    config = read_settings(path)
    try:
        kind.from_config(config)
    except Exception as error:  # constructors raise anything for values of a wrong kind
        raise ValueError(f"{path} makes no {kind.__name__}: {_reason(error)}") from error
    return config


def _check_component(folder: Path, kind: type, variant: str | None) -> None:
    if _TOKENIZER in {parent.__name__ for parent in kind.__mro__} or "Tokenizer" in kind.__name__:
        for path in sorted(folder.glob("*.json")):
            read_settings(path)
        return
    config = resolved(read_settings(folder / "config.json"))
    if issubclass(kind, SavedModel):
        saved_as = config.get("_class_name", kind.__name__)
        if saved_as not in (kind.__name__, *kind.reads):
            raise ValueError(
                f"{folder / 'config.json'} is of a {shortened(saved_as)}, where the pipeline has a {kind.__name__}; "
                "copy or download it again."
            )
    if issubclass(kind, ModelMixin) or hasattr(kind, "config_class"):
        check_folder(folder, kind, variant)


def _check_law(path: Path, kind: Any, index: Mapping[str, object], sampler: Mapping[str, object]) -> None:
    """Refuse defaults of the law that are out of range."""
    try:
        TokenLaw(**kind.facts_of(index, sampler).default_settings)
    except Exception as error:  # whatever is wrong with a value
        raise ValueError(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class LoadsPipelines(DiffusionPipeline):
    """What pipelines share that are loaded by name, from folders, and from the Hub.

    diffusers loads pipelines defined outside of it, with exceptions that it does not document. Each cure here and in
    `base` names the one it is for; `tests/pipelines/test_loading.py` reproduces them all, so that a new diffusers
    release that changes one is noticed.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load an embedded model, a folder written by `save_pretrained`, or a Hub id; arguments as for diffusers.

        Raises:
            ValueError: a name that is none of these, a file, a folder without a pipeline, or a pipeline of another
                class; says what to do. A component whose weights are damaged or do not fit its configuration; names
                them.
        """
        refuse_no_pipeline(pretrained_model_name_or_path)
        cls._refuse_other_class(pretrained_model_name_or_path)
        new, old = kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None)
        if new is not None or old is not None:
            kwargs[_DTYPE] = old if new is None else new
        name = os.fspath(pretrained_model_name_or_path)
        folder = local_folder(name) or Path(name)
        if folder.exists():  # else on the Hub
            check_saved_pipeline(folder, cls, passed=kwargs, variant=kwargs.get("variant"))
        shared = [part for part in shared_parts(folder) if part not in kwargs]
        others = {part: cls._load_shared(folder, part, **kwargs) for part in shared}
        loaded: Any = super().from_pretrained(str(folder) if Path(name).exists() else name, **kwargs | others)
        pipe = loaded[0] if isinstance(loaded, tuple) else loaded
        for part, model in pipe.components.items():
            # Our own models check themselves; those that were passed come from elsewhere.
            if (
                part not in kwargs
                and isinstance(model, torch.nn.Module)
                and not isinstance(model, SavedModel)
            ):
                where = part_folder(folder, part)
                check_loaded(model, str(where) if where.is_dir() else f"{name}: {part}")
        return cast(Self, loaded)  # or a pair, with output_loading_info

    @classmethod
    def _load_shared(cls, folder: Path, part: str, **kwargs: Any) -> torch.nn.Module:
        """A component whose files are in the folder of another pipeline; see `part_folder`."""
        library, name = cls.load_config(folder)[part]
        dtype = kwargs.get(_DTYPE)
        if isinstance(dtype, Mapping):
            dtype = dtype.get(part, dtype.get("default", torch.float32))
        kind = getattr(importlib.import_module(library), name)
        named = "torch_dtype" if issubclass(kind, ModelMixin) else "dtype"
        return kind.from_pretrained(part_folder(folder, part), **{named: dtype or torch.float32}).eval()

    @classmethod
    def _refuse_other_class(cls, name: str | os.PathLike) -> None:
        """Refuse a pipeline on this disk that was saved as one of our other classes."""
        folder = local_folder(name)
        if folder is None:
            return  # of a Hub id diffusers says what it finds
        saved_as = read_index_file(folder)["_class_name"]
        if saved_as in all_pipelines() and saved_as not in {kind.__name__ for kind in cls.__mro__}:
            raise ValueError(
                f"{os.fspath(name)} holds a {saved_as}; load it with visual_spec.{saved_as}.from_pretrained."
            )

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As `DiffusionPipeline.load_config`, with our classes found where they live now."""
        loaded = super().load_config(*args, **kwargs)
        if isinstance(loaded, tuple):  # with what else was asked for
            return resolved(loaded[0]), *loaded[1:]
        return resolved(loaded)

    @classmethod
    def download(cls, pretrained_model_name: str | os.PathLike, **kwargs: Any) -> str:
        """Folder of an embedded model, or of a Hub repository after fetching its configuration and weights.

        diffusers' own method refuses repositories whose components are classes outside diffusers and transformers.

        Raises:
            ValueError: the name is neither an embedded model, nor a folder, nor a Hub id.
            OSError: nothing can be fetched under that id; names the embedded models.
        """
        name = os.fspath(pretrained_model_name)
        if name in embedded_models():
            return str(embedded_folder(name))
        refuse_no_pipeline(name)
        embedded = missing_models() or "embedded models are " + ", ".join(embedded_models())
        return fetched(name, _FILES, kwargs, f"; {embedded}")

    @classmethod
    def _get_signature_types(cls) -> dict[str, tuple[type, ...]]:
        written = [one.annotation for one in inspect.signature(cls.__init__).parameters.values()]
        if any(isinstance(one, str) for one in written):
            return annotated_types(cls)
        return super()._get_signature_types()
