"""How long a text may be for a call of many slots to give what calls of one slot give.

Parts of some decoders look at the length of the call: they compute another function of the same tokens once a text, or
a window past it, is longer than a limit of the configuration. Up to the limit nothing differs, beyond it other tokens
come out. So texts that are longer are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

# Settings that say how many places a query sees at most, chosen among all places of the call.
_CHOSEN = ("keep_window_size", "index_topk")
# Kinds of attention layers whose masks `CodeLanguageModel` makes.
_LAYERS = {"full_attention", "sliding_attention"}


def check_length(decoder: nn.Module, table: nn.Module, length: int, *, window: int, samples: int) -> None:
    """Refuse a text that is too long for a decoder.

    Args:
        table: the decoder's embedding of tokens.
        length: places of the prompt, padding included, and of the new tokens.
        window: slots that a call scores at most.
        samples: rows of the batch, without those of guidance.

    Raises:
        ValueError: the text is longer than a limit; names both.
    """
    limits = list(length_limits(decoder, table))
    if window > 1:
        limits += [
            (size - window, f"its masks have {size} places, and a window {window}")
            for size in _masks(decoder)
        ]
        local = local_window(decoder)
        if local is not None and samples > 1:  # rows then stand at different places
            limits.append(
                (local - window, f"its local layers, which see {local}, have all rows at one place")
            )
    for most, reason in limits:
        if length > most:
            raise ValueError(
                f"prompt and new tokens are {length} places, and {type(decoder).__name__} takes at most {max(most, 0)} "
                f"here: {reason}. Pass fewer new tokens, a shorter prompt, or use the model's own generate."
            )


def length_limits(decoder: nn.Module, table: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the limits of a decoder: the most places of a text, and why."""
    for config in _configs(decoder):
        places = getattr(config, "max_position_embeddings", None)
        if places is not None and any(size == places for size in _tables(decoder, table)):
            yield places, f"it has a table of {places} positions"
        for name in _CHOSEN:
            if (kept := getattr(config, name, None)) is not None:
                yield kept, f"beyond {name}={kept} a query sees a choice among all places of a call"
        for kind, settings in _rotary(decoder, config):
            most = places
            if kind == "longrope":
                named = (settings, vars(config))
                most = min(
                    filter(None, (one.get("original_max_position_embeddings") for one in named)),
                    default=places,
                )
            if most is not None:
                yield most, f"its rotary embedding ({kind}) changes for all places once a call reaches beyond"


def strange_layers(config: object) -> list[str]:
    """Return the kinds of attention layers whose masks are not known here."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return sorted(kind for kind in kinds - _LAYERS if kind.endswith("_attention"))


def handled_window(config: object) -> int | None:
    """The last places that layers of sliding attention see; None if there are no such layers."""
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)


def _tables(decoder: nn.Module, table: nn.Module) -> Iterator[int]:
    """Yield the sizes of what may be tables of positions."""
    for part in decoder.modules():
        ahead = getattr(part, "offset", 0)
        if isinstance(part, nn.Embedding) and part is not table:
            yield part.num_embeddings - ahead
        yield from (buffer.shape[0] - ahead for buffer in part.buffers(recurse=False) if buffer.ndim == 2)


def _masks(decoder: nn.Module) -> set[int]:
    """The sizes of causal masks [1, 1, places, places] that layers hold (GPT-Neo)."""
    shapes = {buffer.shape for buffer in decoder.buffers() if buffer.ndim == 4}
    return {shape[-1] for shape in shapes if shape[-1] == shape[-2] and shape[:2].numel() == 1}


def _configs(decoder: nn.Module) -> list[object]:
    """The configurations of a decoder and of its parts, each once."""
    found = {
        id(config): config
        for part in decoder.modules()
        if (config := getattr(part, "config", None)) is not None
    }
    return list(found.values())


def _rotary(decoder: nn.Module, config: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rotary embeddings of a configuration that depend on the length of a call: kind and settings.

    What a module says about itself counts before its configuration: HunYuan's "dynamic" is a fixed one.
    """
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(settings, dict):
        return
    nested = {name: value for name, value in settings.items() if isinstance(value, dict)} or {None: settings}
    said: list[Any] = [
        part.rope_type
        for part in decoder.modules()
        if isinstance(getattr(part, "rope_type", None), (str, dict))
        and getattr(part, "config", None) is config
    ]
    for layers, one in nested.items():
        kinds = {kind.get(layers, "") if isinstance(kind, dict) else kind for kind in said}
        kinds = kinds or {str(one.get("rope_type", one.get("type", "")))}
        for kind in kinds:
            if "dynamic" in kind or kind in ("longrope", "su"):
                yield "longrope" if kind == "su" else kind, one


def local_window(decoder: nn.Module) -> int | None:
    """The window of layers of local attention that take the slots of a call for the last places of the cache (GPT-Neo);
    None if there are no such layers."""
    kinds = getattr(decoder.config, "attention_layers", None) or ()
    return getattr(decoder.config, "window_size", None) if "local" in kinds else None
