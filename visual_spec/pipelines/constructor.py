"""Constructors of pipelines: their arguments become components and saved settings."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from visual_spec.families import component_homes


def registers(init: Callable[..., None]) -> Callable[..., None]:
    """Keep the arguments of a pipeline's `__init__`, and then run it, to check what it was given.

    As diffusers reads a constructor, arguments without a default and those named in `_optional_components` are
    components; the others are settings, which are saved with the pipeline.

    Raises of the constructor:
        TypeError: a component that could not be saved.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        components, settings = {}, {}
        for name, value in list(bound.arguments.items())[1:]:
            required = signature.parameters[name].default is inspect.Parameter.empty
            kept = components if required or name in self._optional_components else settings
            kept[name] = list(value) if isinstance(value, tuple) and kept is settings else value
        self.register_modules(**components)
        self.register_to_config(**settings)
        init(self, *args, **kwargs)

    return made


def annotated_types(kind: Any) -> dict[str, tuple[Any, ...]]:
    """The classes that each component of a pipeline may be of, as diffusers' `_get_signature_types`; none of settings.

    A class of ours counts once its module is loaded, which it is as soon as there is an instance of it. So loading a
    pipeline does not import all models that its annotations name.
    """
    init: Any = kind.__init__
    names, homes = vars(sys.modules[init.__module__]), component_homes()
    types: dict[str, tuple[Any, ...]] = {}
    for name, parameter in list(inspect.signature(init).parameters.items())[1:]:
        component = parameter.default is inspect.Parameter.empty or name in kind._optional_components
        written = parameter.annotation if component and isinstance(parameter.annotation, str) else ""
        parts = [part.strip() for part in written.split("|")]
        found = [
            getattr(sys.modules.get(homes[part]), part, None) if part in homes else names.get(part)
            for part in parts
        ]
        classes = tuple(kin for one in found if isinstance(one, type) for kin in _with_subclasses(one))
        types[name] = (*classes, type(None)) if classes else (inspect.Signature.empty,)
    return types


def _with_subclasses(kind: type) -> list[type]:
    """A class and those derived from it that are loaded: diffusers compares classes, and knows no subclasses."""
    return [kind, *(kin for below in kind.__subclasses__() for kin in _with_subclasses(below))]
