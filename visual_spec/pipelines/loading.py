"""Load a saved pipeline, or a drafter, without knowing its class."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import visual_spec.pipelines.components as components
from visual_spec.families import all_families, all_pipelines, family_of
from visual_spec.models.core.saved import read_settings
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.components import resolved
from visual_spec.pipelines.embedded import (
    INDEX,
    embedded_drafters,
    embedded_folder,
    embedded_models,
    embedded_refiners,
    local_folder,
    missing_models,
    part_folder,
    refuse_no_pipeline,
)
from visual_spec.pipelines.saved_index import read_index_file
from visual_spec.records import Family, PipelineFacts
from visual_spec.samplers.registry import DRAFTER, all_samplers


def load_pipeline(name: str | os.PathLike, **kwargs: Any) -> VisualPipeline:
    """The pipeline of an embedded model, a folder written by `save_pretrained`, or a Hub id, of the class saved there.

    Args:
        kwargs: for `from_pretrained`.

    Raises:
        ValueError: there is no pipeline, or one of a class that is not ours; names those that are.
    """
    index = read_index(name, **kwargs)
    return _pipeline_class(name, index).from_pretrained(_folder(name, **kwargs), **kwargs)


def _pipeline_class(name: str | os.PathLike, index: Mapping[str, Any]) -> type[VisualPipeline]:
    of_diffusers = {
        family.of_diffusers: family.pipelines[0] for family in all_families() if family.of_diffusers
    }
    saved_as = of_diffusers.get(index["_class_name"], index["_class_name"])
    if saved_as not in all_pipelines():
        raise ValueError(f"{name} holds a {saved_as}; pass one of {', '.join(all_pipelines())}.")
    return getattr(components, saved_as)


def read_index(name: str | os.PathLike, **kwargs: Any) -> dict[str, Any]:
    """What model_index.json of a pipeline says, without loading it: its class, its components and its settings.

    Args:
        name, kwargs: as for `load_pipeline`.

    Raises:
        ValueError: there is no pipeline.
    """
    refuse_no_pipeline(name)
    return read_index_file(_folder(name, **kwargs))


def read_facts(name: str | os.PathLike, **kwargs: Any) -> PipelineFacts:
    """What a saved pipeline says about itself (its medium, its plain decoding, ...), without loading it.

    Args:
        name, kwargs: as for `load_pipeline`.

    Raises:
        ValueError: as `load_pipeline`.
    """
    index = read_index(name, **kwargs)
    try:
        return _pipeline_class(name, index).facts_of(index, _read_sampler(name, **kwargs))
    except (TypeError, AttributeError, KeyError) as error:  # values of a wrong kind
        raise ValueError(
            f"{_folder(name, **kwargs) / INDEX} does not describe a pipeline: {error}"
        ) from error


def read_family(name: str | os.PathLike, **kwargs: Any) -> Family:
    """The family of a saved pipeline, without loading it; arguments and errors as of `read_facts`."""
    index = read_index(name, **kwargs)
    return family_of(_pipeline_class(name, index).__name__, index, _read_sampler(name, **kwargs))


def _read_sampler(name: str | os.PathLike, **kwargs: Any) -> dict[str, Any]:
    sampler = _folder(name, **kwargs) / "sampler" / "sampler_config.json"
    return resolved(read_settings(sampler)) if sampler.is_file() else {}


def read_config(name: str | os.PathLike, component: str, **kwargs: Any) -> dict[str, Any]:
    """The saved configuration of a component of a pipeline, without loading it.

    Args:
        name, kwargs: as for `load_pipeline`.

    Raises:
        ValueError, FileNotFoundError: there is no pipeline, or no such component.
    """
    refuse_no_pipeline(name)
    return read_settings(part_folder(_folder(name, **kwargs), component) / "config.json")


def _folder(name: str | os.PathLike, **kwargs: Any) -> Path:
    return local_folder(name) or Path(VisualPipeline.download(name, **kwargs))


def load_drafter(name: str | os.PathLike, **kwargs: Any) -> Any:
    """An embedded drafter, or one in a folder written by `save_pretrained`, of the class saved there.

    The name of an embedded pipeline stands for its transformer.

    Args:
        kwargs: for `from_pretrained`.

    Raises:
        ValueError: there is no drafter of this name, or the folder holds something else; says what is there.
    """
    if os.fspath(name) in embedded_models():
        name = part_folder(embedded_folder(os.fspath(name)), "transformer")
    classes = {name for family in all_families() for name in family.drafters}
    brought = (part for entry in all_samplers() if entry.needs == DRAFTER for part in entry.parts)
    classes |= {part.partition(":")[2] for part in brought}
    return _load_part(name, "drafter", embedded_drafters(), sorted(classes), **kwargs)


def load_refiner(name: str | os.PathLike, **kwargs: Any) -> Any:
    """An embedded refiner, or a next-scale model in a folder written by `save_pretrained`.

    Args:
        kwargs: for `from_pretrained`.

    Raises:
        ValueError: there is no refiner of this name, or the folder holds something else; says what is there.
    """
    classes = sorted({name for family in all_families() for name in family.refiners})
    return _load_part(name, "refiner", embedded_refiners(), classes, **kwargs)


_REFINER_FACTS = ("refiner_budget", "refiner_guidance_scale", "refiner_first_scale")


@contextmanager
def refined(pipe: Any, name: str | None) -> Iterator[None]:
    """Within, the refiner of this name or folder draws, any scale and with the guidance of the others.

    Afterwards, and with no name, the pipeline has its own.

    Raises:
        ValueError: as `load_refiner`, or a pipeline without refiners.
    """
    if name is None:
        yield
        return
    if not set(_REFINER_FACTS) <= set(pipe.config):
        raise ValueError(
            f"refiner={name} given, which a {type(pipe).__name__} does not take; pass a ScaleImagePipeline, such as "
            "shapes_var."
        )
    before, facts = pipe.refiner, {key: pipe.config[key] for key in _REFINER_FACTS}
    try:
        pipe.refiner = _refiner(name, pipe.device, pipe.transformer.dtype)
        pipe.register_to_config(**dict.fromkeys(_REFINER_FACTS))
        yield
    finally:
        pipe.refiner = before
        pipe.register_to_config(**facts)


@lru_cache(maxsize=8)
def _refiner(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return load_refiner(name).to(device, dtype)


def _is_one(saved_as: Any, classes: list[str]) -> bool:
    """Return whether a class by its name is a subclass of one of these, as a near-to-far LlamaGen is."""
    if saved_as not in components.component_homes():
        return False
    return issubclass(getattr(components, saved_as), tuple(getattr(components, name) for name in classes))


def _load_part(
    name: str | os.PathLike, kind: str, embedded: list[str], classes: list[str], **kwargs: Any
) -> Any:
    folder = embedded_folder(os.fspath(name)) if os.fspath(name) in embedded else Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"no {kind} {os.fspath(name)!r}; pass a folder written by save_pretrained, or an embedded one: "
            f"{', '.join(embedded) or missing_models() or '(none)'}."
        )
    settings = read_settings(folder / "config.json")
    saved_as: Any = resolved(settings).get("_class_name")
    if saved_as is None:  # a format of others, which names no class of ours
        known = ((name, getattr(getattr(components, name), "wrote", None)) for name in classes)
        saved_as = next((name for name, wrote in known if wrote and wrote(settings)), None)
    if saved_as not in classes and not _is_one(saved_as, classes):
        raise ValueError(f"{name} holds a {saved_as}; a {kind} is one of {', '.join(classes)}.")
    return getattr(components, saved_as).from_pretrained(folder, **kwargs).eval()
