"""Checks of a saved pipeline before anything of it is built: model_index.json, and what it says of every component.

Only configurations and the headers of weights are read. What diffusers and transformers would meet halfway, with an
error about something else or after minutes of work, is refused here by the name of its file.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.families import all_families
from visual_spec.files.reading import shortened
from visual_spec.models.core.saved import SavedModel, check_folder, read_settings
from visual_spec.pipelines import components
from visual_spec.pipelines.components import resolved
from visual_spec.pipelines.embedded import SHARED, local_folder, part_folder
from visual_spec.samplers.core.law import TokenLaw

INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_TOKENIZER = "PreTrainedTokenizerBase"
# What an annotation of a setting allows; a number is finite.
_KINDS: dict[str, Callable[[Any], bool]] = {
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


def refuse_no_pipeline(name: str | os.PathLike) -> None:
    """Refuse a name that no embedded model and no Hub id can have, and a path without a saved pipeline.

    Raises:
        ValueError: an empty name, a path at which there is nothing, a file, or a folder without model_index.json;
            says what to do.
    """
    path, text = local_folder(name) or Path(name), os.fspath(name)
    if path.is_dir() and not (path / INDEX).exists():
        from visual_spec.files.whole import sweep

        sweep(path)  # a save that was killed between two renames
    if not text.strip():
        raise ValueError(
            "an empty model name given; pass an embedded model, a folder written by save_pretrained, or a Hub id "
            "'owner/name'."
        )
    if not path.exists() and (path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1):
        raise ValueError(f"there is no folder {text}; pass one written by save_pretrained.")
    convert = f"visual-spec convert {'FILE...' if path.is_dir() else path} --out DIR"
    if path.is_file():
        raise ValueError(
            f"{path} is a file. An official checkpoint is loaded together with its tokenizer's file by from_official, "
            f"or made into a folder by `{convert}`."
        )
    if path.is_dir() and not (path / "model_index.json").exists():
        files = sorted(file.name for file in path.iterdir())
        raise ValueError(
            f"{path} has no model_index.json, so it is no pipeline (it holds {', '.join(files[:5]) or 'nothing'}"
            f"{' ...' if len(files) > 5 else ''}). Pass a folder written by save_pretrained; one is made of official "
            f"checkpoint files by `{convert}`."
        )


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
    folder: Path, kind: type, *, passed: Mapping[str, Any] | None = None, variant: str | None = None
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


def _kinds(annotation: Any) -> list[str]:
    """The kinds that an annotation allows, classes without their modules."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = text.replace("typing.", "")
    parts = [part.strip() for part in text.split("|")]
    return [part if "[" in part else part.rpartition(".")[2] for part in parts]


def _is_setting(kinds: list[str]) -> bool:
    return all(kind in _KINDS for kind in kinds)


def _class_of(path: Path, name: str, value: Any, kinds: list[str]) -> Any:
    """The class of a component."""
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)):
        raise ValueError(
            f"{path} says {name}={shortened(value)}; it should be a pair of a module and a class. Copy or download it "
            "again."
        )
    library, class_name = value
    home: Any = components if library in ("visual_spec", components.__name__) else None
    if library in _LIBRARIES:
        home = __import__(library)
    elif home is None:
        home = sys.modules.get(library)  # the caller's own
    component = getattr(home, class_name, None) if class_name.isidentifier() else None
    if not isinstance(component, type):
        raise ValueError(
            f"{path} says {name}={shortened(value)}, which is no class of visual_spec, diffusers or transformers; pass "
            f"{name}=... if it is your own."
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


def _check_law(path: Path, kind: Any, index: Mapping[str, Any], sampler: Mapping[str, Any]) -> None:
    """Refuse defaults of the law that are out of range."""
    try:
        TokenLaw(**kind.facts_of(index, sampler).default_settings)
    except Exception as error:  # whatever is wrong with a value
        raise ValueError(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
