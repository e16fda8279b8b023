"""The classes that a saved pipeline names, by name. No PyTorch until one is asked for.

diffusers finds the class of a saved component in the module that model_index.json records, if that module was imported
before and also holds the component's base class. So a pipeline would have to import everything that any saved pipeline
may name, and a folder could not be loaded once a module moves. `resolved` therefore sends diffusers to this module,
whose attributes are our classes by name, each imported when it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from visual_spec.families import FORMER, all_families, all_pipelines, component_homes

# By these diffusers tells how a component is loaded.
_BASES = {
    "ModelMixin": "diffusers.models.modeling_utils",
    "SchedulerMixin": "diffusers.schedulers.scheduling_utils",
}


def resolved(index: Mapping[str, object]) -> dict[str, Any]:
    """What model_index.json or a component's configuration says, with our classes by their names of today.

    They are found whatever module they lived in when it was saved. The class of the pipeline is its name alone;
    diffusers reads the pair ["pipeline", name].
    """
    named = {name: _place(value) for name, value in index.items()}
    kind = index.get("_class_name")
    kind = kind[-1] if isinstance(kind, list | tuple) and kind else kind
    return named | ({"_class_name": FORMER.get(kind, kind)} if isinstance(kind, str) else {})


def _place(value: Any) -> object:
    """Where diffusers finds the class of a pair of a module and a class: here; other values as they are."""
    pair = (
        isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )
    if not pair:
        return value
    library, name = value[0], FORMER.get(value[1]) or value[1]
    home = component_homes().get(name)
    # Of another package's class diffusers records the name of the package, or of the module.
    if home is not None and library.partition(".")[0] in ("visual_spec", home.partition(".")[0]):
        return [__name__, name]
    # A class of the caller's that nobody registers; its module is not imported for it.
    own = library.partition(".")[0] not in ("diffusers", "transformers") and library in sys.modules
    return [__name__, f"{library}:{name}"] if own and library != __name__ else value


Init = TypeVar("Init", bound=Callable[..., None])


def registers(init: Init) -> Init:
    """Keep the arguments of a pipeline's `__init__`, run it, and check that the components fit each other.

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
        self._check_parts()

    return cast(Init, made)


def annotated_types(kind: Any) -> dict[str, tuple[type, ...]]:
    """The classes that each component of a pipeline may be of, as diffusers' `_get_signature_types`; none of settings.

    A class of ours counts once its module is loaded, which it is as soon as there is an instance of it. So loading a
    pipeline does not import all models that its annotations name.
    """
    init = kind.__init__
    names, homes = vars(sys.modules[init.__module__]), component_homes()
    families = [family for family in all_families() if kind.__name__ in family.pipelines]
    types: dict[str, tuple[type, ...]] = {}
    for name, parameter in list(inspect.signature(init).parameters.items())[1:]:
        component = parameter.default is inspect.Parameter.empty or name in kind._optional_components
        written = parameter.annotation if component and isinstance(parameter.annotation, str) else ""
        parts = [part.strip() for part in written.split("|")]
        parts += [family.saved[name] for family in families if component and name in family.saved]
        kinds = [
            getattr(sys.modules.get(homes[part]), part, None) if part in homes else names.get(part)
            for part in parts
        ]
        classes = tuple(kin for one in kinds if isinstance(one, type) for kin in _with_subclasses(one))
        types[name] = (*classes, type(None)) if classes else (inspect.Signature.empty,)
    return types


def _with_subclasses(kind: type) -> list[type]:
    """A class and those derived from it that are loaded: diffusers compares classes, and knows no subclasses."""
    return [kind, *(kin for below in kind.__subclasses__() for kin in _with_subclasses(below))]


def __getattr__(name: str) -> Any:
    library, colon, own = name.partition(":")
    if colon:  # of the caller's, see `_place`
        return getattr(sys.modules[library], own)
    pipelines = {kind: entry.module for kind, entry in all_pipelines().items()}
    homes, name = component_homes() | pipelines | _BASES, FORMER.get(name, name)
    if name not in homes:
        raise AttributeError(
            f"{name!r} is no class that a saved pipeline names; those are {', '.join(homes)}"
        )
    return getattr(importlib.import_module(homes[name]), name)
