"""Samplers as text: `name` or `name:setting=value,...`, read, made and written. A name may be "module:class"."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from visual_spec.models.core.settings import of_settings, settings_of
from visual_spec.records import AsSaved
from visual_spec.samplers.core.trace import IDENTICAL
from visual_spec.samplers.registry import by_name, class_for, class_saved, meant, names, sampler_class

if TYPE_CHECKING:
    from visual_spec.samplers.core.base import Sampler

_MODELS = ("drafter", "refiner")  # settings that name a model, and are taken as they stand


def parse_sampler(text: str) -> tuple[str, dict[str, Any]]:
    """Read `name` or `name:setting=value,...`, such as `speculative-jacobi:window=32,acceptance=identical`.

    Values are whole numbers, decimal numbers, `true`, `false`, `none`, words, or several of these divided by `/`
    (`4/2/2`; a list of one: `4/`). What names a model, `drafter` and `refiner`, is taken as it stands.

    Returns:
        The name and the settings. Neither is looked at: `make_sampler` does that.

    Raises:
        ValueError: text of another form, or a setting twice.
    """
    name, colon, rest = text.strip().partition(":")
    kind, again, more = rest.partition(":")
    if kind.strip().isidentifier() and name.strip() not in names():  # module:class, registered by nobody
        name, colon, rest = f"{name}:{kind}", again, more
    settings: dict[str, Any] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f"{part!r} in sampler {text!r}; write name:setting=value,setting=value")
        if key in settings:
            raise ValueError(f"sampler {text!r} sets {key} twice")
        settings[key] = value if key in _MODELS else _value(value)
    return name.strip(), settings


def write_sampler(name: str, settings: Mapping[str, object]) -> str:
    """The text that `parse_sampler` reads as this name and these settings; a mapping is written setting by setting."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        flat |= value if isinstance(value, Mapping) else {key: value}
    pairs = ",".join(f"{key}={_text(value)}" for key, value in flat.items())
    return f"{name}:{pairs}" if pairs else name


def saved_sampler(name: str, config: Mapping[str, object]) -> str:
    """The text of a sampler with a saved configuration: what differs from the defaults of its class."""
    kind, _ = class_saved(sampler_class(by_name(name)), config)
    usual = kind().config
    changed = {
        key: config[key]
        for key, value in usual.items()
        if not key.startswith("_") and config.get(key, value) != value
    }
    return write_sampler(name, changed)


def as_saved(sampler: str | AsSaved, config: Mapping[str, object]) -> str:
    """The text of a family's sampler.

    Args:
        config: the configuration of the sampler that a pipeline has, as it is saved.
    """
    if isinstance(sampler, str):
        return sampler
    own = by_name(sampler.name).class_name
    if sampler.whole and config.get("_class_name", own) == own:
        return saved_sampler(sampler.name, config)
    kept = {name: config[name] for name in sampler.keeps}
    return saved_sampler(sampler.name, {**kept, **sampler.others})


def plain_beside(text: str, own: Any) -> Sampler:
    """The sampler of a text of plain decoding, with the other settings of `own` where that is a sampler of its class.

    Models differ in how their guidance grows, or in how many steps a chain has. A sampler that never decodes plainly,
    such as one that draws several tokens in a call, gives none.
    """
    name, settings = parse_sampler(text)
    sampler = make_sampler(name, **settings)
    if type(own) is not type(sampler) or (sampler.keeps == IDENTICAL and own.keeps != IDENTICAL):
        return sampler
    changed = {key: value for key, value in settings.items() if own.config.get(key, value) != value}
    return type(own).from_config(own.config, **changed) if changed else own


def read_sampler(text: str) -> Sampler:
    """The sampler of a text: `name` or `name:setting=value,...`.

    Raises:
        ValueError: as `parse_sampler` and `make_sampler`.
    """
    name, settings = parse_sampler(text)
    return make_sampler(name, **settings)


def make_sampler(name: str, **settings: Any) -> Sampler:
    """The sampler of a name, as the command line calls it.

    Raises:
        ValueError: an unknown name, a setting that this sampler does not have, or a value it refuses.
    """
    kind = class_for(sampler_class(by_name(name)), settings)
    known = {key for key in kind().config if not key.startswith("_")}.union(*_flat_settings(kind).values())
    unknown = sorted(set(settings) - known)
    if unknown:
        limits = declared_limits(kind)
        allowed = f"it takes {'; '.join(f'{key}: {limits[key]}' if key in limits else key for key in sorted(known))}"
        raise ValueError(
            f"the {name} sampler has no setting {', '.join(unknown)}; {allowed if known else 'it has none'}."
            + meant(unknown[0], known)
        )
    return of_settings(kind, **_gathered(kind, settings))


def _gathered(kind: type, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings as the class takes them: those that it takes in one mapping, `_flat_settings`, in that mapping."""
    others = dict(settings)
    for name, flat in _flat_settings(kind).items():
        values = {key: others.pop(key) for key in flat if key in others}
        former = others.get(name) or {}
        if values:
            others[name] = {**(former if isinstance(former, Mapping) else {"preset": former}), **values}
    return others


def _flat_settings(kind: type) -> dict[str, Sequence[str]]:
    """The settings that a class takes as one mapping, with the names in it, which are written like other settings."""
    relaxed = {}
    if "relaxation" in inspect.signature(kind).parameters:
        from visual_spec.samplers.core.acceptance import Relaxation

        relaxed["relaxation"] = Relaxation.names()
    return {**relaxed, **getattr(kind, "flat_settings", {})}


def declared_limits(kind: type) -> dict[str, str]:
    """What the settings of a sampler's class may be, in words, by name, with their defaults."""
    declared = settings_of(inspect.unwrap(kind.__init__))
    return {name: f"{one.allowed} (default: {_text(one.default)})" for name, one in declared.items()}


def _value(text: str) -> object:
    if "/" in text:
        return [_value(part) for part in text.split("/") if part]
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        # A list of one ends in the stroke that divides longer ones.
        return "/".join(map(_text, value)) + ("/" if len(value) == 1 else "")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
