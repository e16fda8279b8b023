"""Layouts of official files as data: which weights tell a file, which keys fall away, what the others become.

A loader reads the weights of its `KeyLayout`, reads sizes off them (`count_parts`, `known_heads`), and `loaded` builds
the model. Each key of a file ends in exactly one place: dropped by a pattern, or a weight of the model under its new
name. What is missing, unexpected, mis-shaped or there twice is refused, and listed.

Every loader takes `source`, the file, the result of `read_checkpoint`, or as `Given` also a state dict with official
keys, and `dtype`, to cast the weights to; None keeps the file's. It raises ValueError or OSError as `read_checkpoint`,
`KeyLayout.read` and `loaded` do: a file that is missing, damaged, another model's or would need pickle, or weights that
do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from visual_spec.models.core.checkpoints import (
    Checkpoint,
    Source,
    fill,
    plain_weights,
    read_by,
    unpack_checkpoint,
)
from visual_spec.models.core.saved import some

M = TypeVar("M", bound=nn.Module)
Weights = dict[str, Tensor]
Given = Source | Mapping[str, Tensor]


@dataclass(frozen=True)
class KeyLayout:
    """An official layout.

    Attributes:
        model: what its model is called in errors, with its article: "no MAR" is said of other files.
        file: what to pass in place of another file, for errors.
        needed: weights that every file of the layout holds, under our names, and their numbers of axes (0: any).
        dropped: patterns of whole keys that nothing of ours reads.
        renamed: patterns of parts of a key and what stands there in our models, one after the other, as `re.sub`.
        container: the key under which a file that holds several sets of weights has the right one; a dict of tensors
            alone is accepted, too.
        unpack, keep: in its place, as for `read_by`.
    """

    model: str
    file: str
    needed: Mapping[str, int] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    renamed: Mapping[str, str | Callable[[re.Match[str]], str]] = field(default_factory=dict)
    container: str = ""
    unpack: Callable[[Path, object], Checkpoint | None] | None = None
    keep: str = '{"model": c["model"]}'

    def read(self, source: Given) -> tuple[Weights, str]:
        """Return the weights of a file under our names, and what to call the file in errors.

        Args:
            source: the file, the result of `read_checkpoint`, or a state dict with official keys.

        Raises:
            ValueError, OSError: as in `read_checkpoint`; or a needed weight is missing.
        """
        if isinstance(source, Mapping):
            weights, name = plain_weights(source, "the state dict"), "the state dict"
        else:
            keep = f'{{"{self.container}": c["{self.container}"]}}' if self.container else self.keep
            checkpoint = read_by(source, self.unpack or self.contained, keep)
            weights, name = checkpoint.weights, str(checkpoint.path)
        return self.translated(weights, name), name

    def contained(self, path: Path, content: object) -> Checkpoint | None:
        """Return the weights under the layout's container, or the content itself; None without a container.

        Raises:
            ValueError: neither is a dict of weights.
        """
        if not self.container or not isinstance(content, Mapping):
            return None
        weights = content.get(self.container, content)
        if not isinstance(weights, Mapping) or not all(
            isinstance(value, Tensor) for value in weights.values()
        ):
            raise ValueError(
                f"{path} holds no dict of weights, neither under {self.container!r} nor by itself, but "
                f"{some(content)}; keep the key {self.container!r} of the official file."
            )
        return unpack_checkpoint(path, {"model": weights})

    def translated(self, official: Mapping[str, Tensor], name: str) -> Weights:
        """Return weights with official keys under our names; arguments and errors as `read`."""
        weights: Weights = {}
        for key, value in official.items():
            if any(re.fullmatch(pattern, key) for pattern in self.dropped):
                continue
            ours = self.key(key)
            # If a name occurs twice, one weight keeps its official name and is listed as unexpected.
            weights[key if ours != key and (ours in official or ours in weights) else ours] = value
        absent = [
            key
            for key, axes in self.needed.items()
            if key not in weights or axes not in (0, weights[key].ndim)
        ]
        if absent:
            raise ValueError(
                f"{name} is no {self.model}: it lacks {', '.join(absent)}, or has them in other shapes; pass "
                f"{self.file}."
            )
        return weights

    def key(self, key: str) -> str:
        """Return our name of an official key."""
        for pattern, ours in self.renamed.items():
            key = re.sub(pattern, ours, key)
        return key


def count_parts(weights: Mapping[str, object], start: str) -> int:
    """Return how many parts are numbered after a prefix, such as "blocks."."""
    return len({key[len(start) :].split(".")[0] for key in weights if key.startswith(start)})


def vqgan_sizes(weights: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Return the sizes of the convolutional networks of a VQGAN, whose layout needs "encoder.conv_in.weight".

    Args:
        name: what to call the file in errors.

    Raises:
        ValueError: a level of the encoder has no first convolution.
    """
    base = weights["encoder.conv_in.weight"].shape[0]
    multipliers = []
    for level in range(count_parts(weights, "encoder.down.")):
        key = f"encoder.down.{level}.block.0.conv1.weight"
        if key not in weights or weights[key].ndim != 4:
            raise ValueError(f"{name} lacks {key}, or has it in another shape; pass the official file.")
        multipliers.append(weights[key].shape[0] // base)
    return {
        "base_channels": base,
        "channel_multipliers": tuple(multipliers),
        "blocks_per_level": count_parts(weights, "encoder.down.0.block."),
    }


def known_heads(
    presets: Mapping[str, Mapping[str, Any]], dim: int, layers: int, asked: int | None, name: str
) -> int:
    """Return the number of attention heads, which no weight tells: as asked, else the preset's of this size.

    Args:
        name: what to call the file in errors.

    Raises:
        ValueError: the size is none of the presets, and no number was asked for.
    """
    if asked is not None:
        return asked
    for preset in presets.values():
        if (preset["dim"], preset["num_layers"]) == (dim, layers):
            return preset["num_heads"]
    raise ValueError(
        f"{name} has width {dim} and {layers} layers, and is none of the sizes {', '.join(presets)}; pass num_heads, "
        "which cannot be read off the weights."
    )


def loaded(
    kind: type[M],
    config: Mapping[str, object],
    weights: Mapping[str, Tensor],
    name: str,
    *,
    what: str,
    constants: Callable[[M], Mapping[str, Tensor]] | None = None,
    dtype: torch.dtype | None = None,
) -> M:
    """Return a model of a configuration with these weights, see `fill`.

    Args:
        what: what the model is called in errors; its configuration is added.
        constants: the buffers of official files that the model computes itself.

    Raises:
        ValueError: as in `fill`; or the configuration, read off the weights, makes no model.
    """
    try:
        with torch.device("meta"):
            model = kind(**config)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{name} makes no {what} of {dict(config)}: {error}") from error
    fixed = {} if constants is None else constants(model)
    return fill(model, weights, name, what=f"{what} of {dict(config)}", constants=fixed, dtype=dtype)
