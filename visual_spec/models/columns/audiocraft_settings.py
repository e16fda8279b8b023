"""The settings of a training run that audiocraft stores beside the weights (`xp.cfg`): YAML of OmegaConf."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from visual_spec.models.core.settings import DeclaredSetting, Within

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class TrainingSettings:
    """The settings of a training run in a file, by dotted names."""

    def __init__(self, path: Path, tree: Mapping[str, object]) -> None:
        self.path, self.tree = path, tree

    def __call__(self, name: str, default: object = None) -> Any:
        """Return a setting; follows references to other settings, "${other.name}"."""
        return self._look_up(name, default, 0)

    def of_kind(self, kind: type, name: str, default: object, within: Within = Within()) -> Any:  # noqa: B008
        """Return a setting as a bool, int, float or str, or as a list of integers (`list`).

        Raises:
            ValueError: the setting is of another kind.
        """
        value, kinds = self(name, default), (Sequence if kind is list else kind,)
        try:
            return kind(DeclaredSetting(name, kinds, within, None, default).read(value))
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"{self.path} was trained with {name}={shown(value)}, which is no such setting of audiocraft; pass "
                "the file as it was exported."
            ) from error

    def refuse_others(self, allowed: Mapping[str, Iterable[object]]) -> None:
        """Refuse settings that change the meaning of the weights. Missing settings have their usual values."""
        nothing = object()
        stated = {name: self(name, nothing) for name in allowed}
        wrong = [
            f"{name}={shown(value)} instead of {next(iter(allowed[name]))!r}"
            for name, value in stated.items()
            if value is not nothing and value not in allowed[name]
        ]
        if wrong:
            raise ValueError(
                f"{self.path} was trained with {', '.join(wrong)}, which transformers' modules do not compute; "
                "official checkpoints do without."
            )

    def _look_up(self, name: str, default: object, depth: int) -> object:
        if depth > 20:
            raise ValueError(
                f"{self.path} has settings (xp.cfg) that refer to each other in a circle, at {name}."
            )
        value: object = self.tree
        for part in name.split("."):
            if isinstance(value, str) and (other := _REFERENCE.fullmatch(value)):
                value = self._look_up(other[1], {}, depth + 1)
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        if isinstance(value, str) and (other := _REFERENCE.fullmatch(value)):
            return self._look_up(other[1], default, depth + 1)
        return value


def shown(value: object) -> str:
    """Return a setting for an error message, cut off if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class _NoAliases(yaml.SafeLoader):
    """Refuses aliases: with them a few lines can stand for an endless tree, and audiocraft writes none."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias (*name)")
        return super().compose_node(parent, index)


def read_settings(path: Path, held: object) -> TrainingSettings:
    """Return the settings of a training run, from YAML or a mapping.

    Args:
        path: path of the file, for errors.
        held: the stored settings.

    Raises:
        ValueError: the settings are not plain YAML, or not a mapping.
    """
    try:
        if isinstance(held, str):
            held = yaml.load(held, _NoAliases)  # noqa: S506, a safe loader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"{path} has settings (xp.cfg) that are no plain YAML: {reason}; pass the file as audiocraft exported it."
        ) from error
    if held is not None and not isinstance(held, Mapping):
        raise ValueError(f"{path} has settings (xp.cfg) that are no mapping, but a {type(held).__name__}.")
    return TrainingSettings(path, held or {})
