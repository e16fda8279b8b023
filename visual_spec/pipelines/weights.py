"""New weights in place, for those who train: `VisualPipeline.update_weights`.

Numbers are copied to where the old ones are. So what reads them by address or by object stays as it is, and reads the
new ones: recorded CUDA graphs, compiled functions, joined and tied weights, hooks that offload. What was computed from
weights and is kept, is kept beside the state of these weights (`fingerprint.written`), and computed anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from visual_spec.models.core.adapters import has_adapters
from visual_spec.models.core.checkpoints import bare_key, bare_keys
from visual_spec.models.core.offload import diffusers_hooks
from visual_spec.models.core.projections import JoinedProjections
from visual_spec.models.core.saved import short_name, some, stored_parts

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass
class _Place:
    """Where a weight is kept.

    Attributes:
        layer, kind: whose it is, and what it is called there.
        keys: in a state dict; several of joined projections.
        rows: of each key.
        kept: the tensor to write.
    """

    layer: nn.Module
    kind: str
    keys: tuple[str, ...]
    rows: tuple[int, ...]
    kept: Tensor

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        rest = tuple(self.kept.shape)
        return [rest] if len(self.keys) == 1 else [(rows, *rest[1:]) for rows in self.rows]


def replace_weights(model: nn.Module, weights: Weights, name: str) -> None:
    """Write new numbers into the weights of a model; see `VisualPipeline.update_weights`.

    Args:
        name: of the component, for errors.
    """
    _check_model(model, name)
    places = _places(model, name)
    by_key = {key: place for place in places for key in place.keys}
    given = _collected(weights, by_key, name)
    _check(given, places, name)
    recipe = getattr(getattr(model, "config", None), "quantization_config", None)
    pairs: list[tuple[Tensor, Tensor]] = []
    tied: dict[int, Tensor] = {}
    for place in places:
        if any(key not in given for key in place.keys):  # tied to one that is there
            continue
        rows = [given[key] for key in place.keys]
        value = torch.cat(rows) if rows[1:] else rows[0]
        value = _stored(value, place, recipe, name)
        if tied.setdefault(id(place.kept), value) is value:
            pairs += zip(stored_parts(place.kept), stored_parts(value), strict=True)
        elif not all(map(torch.equal, stored_parts(tied[id(place.kept)]), stored_parts(value))):
            raise ValueError(
                f"{name}: {place.keys[0]} is tied to another key, and the two differ; pass equal numbers, or one."
            )
    _check_finite(places, pairs, name)
    for kept, value in pairs:
        # Weights that were made in inference mode can be written there only.
        with torch.inference_mode(kept.is_inference()), torch.no_grad():
            kept.copy_(value)


def _check_model(model: nn.Module, name: str) -> None:
    """Refuse a model whose numbers are also kept where they cannot be written, by ValueError."""
    groups = [getattr(hook, "group", None) for part in model.modules() for hook in diffusers_hooks(part)]
    if any(
        getattr(group, "offload_to_disk_path", None) or getattr(group, "stream", None) for group in groups
    ):
        raise ValueError(
            f"{name} is offloaded by groups, to disk or by a stream, where its weights cannot be written; update them "
            "before enable_group_offload."
        )
    merged = [path for path, part in model.named_modules() if getattr(part, "merged", False) is True]
    if has_adapters(model) and merged:
        raise ValueError(
            f"{name} holds fused adapters ({some(merged)}); unfuse_lora() first, update, and fuse_lora() again."
        )
    compiled = getattr(model, "_compiled_call_impl", None) is not None or "_orig_mod" in model._modules
    if compiled and "torch._inductor.config" in sys.modules:
        if sys.modules["torch._inductor.config"].freezing:
            raise ValueError(
                f"{name} was compiled with torch._inductor.config.freezing, which copies weights into the code; "
                "compile it without."
            )


def _places(model: nn.Module, name: str) -> list[_Place]:
    """All weights of a model that a state dict holds, those of adapters left out."""
    places: list[_Place] = []
    adapted: list[str] = []
    for path, layer in model.named_modules(remove_duplicate=False):
        if any(
            path.startswith(f"{one}.") and not f"{path}.".startswith(f"{one}.base_layer.") for one in adapted
        ):
            continue
        if hasattr(layer, "base_layer") and hasattr(layer, "lora_A"):
            adapted.append(path)
        plain = bare_key(".".join(part for part in path.split(".") if part != "base_layer"))
        holder, names, rows = plain.rpartition(".")[0], (plain.rpartition(".")[2],), (0,)
        if isinstance(layer, JoinedProjections):
            names, rows = layer.names, tuple(layer.sizes)
        own = {**layer._parameters, **layer._buffers}
        for kind, kept in own.items():
            if kept is None or kind in layer._non_persistent_buffers_set:
                continue
            keys = tuple(".".join(filter(None, (holder, one, kind))) for one in names)
            places.append(_Place(layer, kind, keys, rows, _at_rest(layer, kind, kept, name)))
    return places


def _at_rest(layer: nn.Module, kind: str, kept: Tensor, name: str) -> Tensor:
    """The tensor that keeps a weight between calls: accelerate keeps offloaded ones beside the layer."""
    if hasattr(kept, "full_tensor"):
        raise ValueError(
            f"{name} is sharded (DTensor); update a pipeline whose weights are whole on each process."
        )
    if not kept.is_meta:
        return kept
    hook = getattr(layer, "_hf_hook", None)
    maps = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", (hook,))]
    for one in filter(None, maps):
        whole = getattr(one, "dataset", one)
        whole = getattr(whole, "state_dict", whole)  # of an OffloadedWeightsLoader, what is no file
        key = f"{getattr(one, 'prefix', '')}{kind}"
        if isinstance(whole, dict) and key in whole:
            return whole[key]
    raise ValueError(
        f"{name} holds weights on the meta device or in files ({type(layer).__name__}.{kind}); update them before they "
        "are offloaded to disk."
    )


def _collected(weights: Weights, places: Mapping[str, _Place], name: str) -> dict[str, Tensor]:
    """The tensors by key, without what wrappers add to keys.

    Pairs are copied as they come: who sends them may use the same memory for the next ones. Of keys that the model does
    not have, only shape and type stay.
    """
    copied = not isinstance(weights, Mapping)
    pairs: Iterable[tuple[str, Tensor]] = weights if copied else weights.items()  # pyright: ignore
    given: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(
                f"weights of {name} hold {str(pair)[:60]!r}; pass a state dict, or pairs of a key and a tensor."
            )
        key, value = bare_key(pair[0]).replace(".base_layer.", "."), pair[1]
        if not isinstance(value, Tensor):
            raise TypeError(f"weights of {name}: {pair[0]} is a {type(value).__name__}; pass tensors.")
        if key in given:
            raise ValueError(f"weights of {name} hold {key} twice; pass one set of weights.")
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()  # pyright: ignore  # of a DTensor; all processes that hold a part take part
        value = value.detach()
        if copied and key in places and type(value) is Tensor:
            value = value.to(places[key].kept.device, copy=True)
        given[key] = value
    if given and not given.keys() & places.keys():  # such as `module.` of DDP in front of all
        given = bare_keys(given, f"weights of {name}")
    return given


def _check(given: Mapping[str, Tensor], places: list[_Place], name: str) -> None:
    """Refuse keys, shapes and types that are not the model's, all of them in one error."""
    expected = {
        key: (shape, place) for place in places for key, shape in zip(place.keys, place.shapes, strict=True)
    }
    there = {id(place.kept) for place in places if all(key in given for key in place.keys)}
    wrong: dict[str, list[str]] = {
        "missing": [
            key for key, (_, place) in expected.items() if key not in given and id(place.kept) not in there
        ],
        "unexpected": [key for key in given if key not in expected],
        "of another shape": [],
        "of another type": [],
    }
    for key in given.keys() & expected.keys():
        shape, place = expected[key]
        value = given[key]
        if tuple(value.shape) != shape:
            wrong["of another shape"].append(f"{key} {list(value.shape)} instead of {list(shape)}")
        same = value.dtype == place.kept.dtype
        floats = value.is_floating_point() and place.kept.is_floating_point() and value.dtype.itemsize > 1
        packed = is_traceable_wrapper_subclass(value) and type(value) is not type(place.kept.data)
        if not (same or floats) or packed or value.layout != torch.strided or value.is_meta:
            what = (
                "on the meta device"
                if value.is_meta
                else f"{type(value).__name__} of {short_name(value.dtype)}"
            )
            wrong["of another type"].append(f"{key} ({what} instead of {short_name(place.kept.dtype)})")
    if any(wrong.values()):
        told = "; ".join(f"{len(keys)} {what}: {some(sorted(keys))}" for what, keys in wrong.items() if keys)
        raise ValueError(
            f"these are not the weights of {name}, and nothing was changed: {told}. Pass the state dict of a model of "
            "the same configuration, whole."
        )


def _stored(value: Tensor, place: _Place, recipe: object, name: str) -> Tensor:
    """A new weight as it is kept: in the type of the old one, or quantised as that was."""
    kept = place.kept
    if not is_traceable_wrapper_subclass(kept):
        return value.to(kept.dtype)
    if not is_traceable_wrapper_subclass(value):
        value = _quantised(value.to(kept.dtype), place, recipe, name)
    pairs = list(zip(stored_parts(kept), stored_parts(value), strict=False))
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in pairs):
        raise ValueError(
            f"{name}: {place.keys[0]} is quantised in another way; quantise both by one configuration."
        )
    return value


def _quantised(value: Tensor, place: _Place, recipe: object, name: str) -> Tensor:
    how = getattr(recipe, "quant_type", None)
    if how is None or type(how).__name__ == "FqnToConfig" or not isinstance(place.layer, nn.Linear):
        raise ValueError(
            f"{name}: {place.keys[0]} is quantised ({type(place.kept.data).__name__}), and it is not known how; pass "
            "the state dict of a model that was quantised in the same way, or load the pipeline with "
            "quantization_config."
        )
    from torchao.quantization import quantize_  # of the extra `quant`

    rows, columns = value.shape
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(value.to(place.kept.device), requires_grad=False)
    quantize_(layer, how)
    return layer.weight.detach()


def _check_finite(places: list[_Place], pairs: list[tuple[Tensor, Tensor]], name: str) -> None:
    """Refuse numbers that are not finite, or are not as they will be kept, as in 16 bits."""
    keys = {id(part): place.keys[0] for place in places for part in stored_parts(place.kept)}
    bad = [
        f"{keys[id(kept)]} ({short_name(kept.dtype)})"
        for kept, value in pairs
        if value.is_floating_point() and not (value if value.itemsize > 1 else value.float()).isfinite().all()
    ]
    if bad:
        raise ValueError(f"weights of {name} are nan or infinite: {some(bad)}; nothing was changed.")
