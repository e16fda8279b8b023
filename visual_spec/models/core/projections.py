"""Projections of one input as one matrix product: query, key and value, and the gate and value of gated layers.

Decoding reads every weight once a call. Three products with narrow matrices are three launches, each too small to fill
a GPU; one matrix of all their rows is one launch. `fuse_projections` joins them in place, in LlamaGen and in the
decoders of transformers models (Janus, Chameleon, Emu3, GLM-Image). The layers' own code does not change: it still
calls every projection by its name. The first one called computes all of them, and the others return their parts.

With `kernel=True` LlamaGen computes its linear layers by `kernels.project`, norms before and gates and sums after them
included, so that a token has the same bits whatever the tokens beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from visual_spec.kernels.project import BYTES, project

# By the name of the layer that holds them, so that cross-attention is not touched. In the order in which the layers
# call them, which is also the order of their rows.
_GROUPS = {
    "self_attn": ("q_proj", "k_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj"),
    "gen_mlp": ("gate_proj", "up_proj"),  # of MammothModa2
    "feed_forward": ("w1", "w3"),
}


def fuse_projections(model: nn.Module, *, kernel: bool = False) -> None:
    """Join the projections of self-attention, and of gated layers, in place.

    Outputs are the same up to the rounding of a matrix product. No weight is stored twice. State dicts keep the keys of
    separate projections: files are written and read as before. Parameters are new ones, so an optimizer made earlier no
    longer updates them.

    Args:
        model: a `LlamaGenTransformer`, a transformers model, or any module around such layers. Supports biases, keys
            and values narrower than the queries, and norms after the projections. Quantise it afterwards, not before.
        kernel: also compute the linear layers and the head of LlamaGen by a kernel whose sums have one order, on a GPU
            and without gradients. In 16 bits, too, a call of a window then has the bits of calls of one token, which
            acceptance "identical" asks for; calls with a mask, as of trees, attend as PyTorch does. Weights may be
            quantised by torchao afterwards, in int8 or e4m3 with a scale a row; the quantised model is then what is
            decoded. Not measured yet. A model that is joined already is taken, too.

    Raises:
        ValueError: there is nothing to join, or with `kernel` nothing of LlamaGen; or the projections are not plain
            linear layers of one dtype and device, all with a bias or all without. Then nothing is changed.
    """
    groups: list[tuple[nn.Module, tuple[str, ...]]] = []
    for path, layer in model.named_modules():
        names = _GROUPS.get(path.rpartition(".")[2], ())
        parts = [getattr(layer, name, None) for name in names]
        if not names or None in parts or isinstance(parts[0], JoinedProjections):
            continue
        _check(path, names, parts)
        groups.append((layer, names))
    ordered: list[Any] = [one for one in model.modules() if kernel and hasattr(type(one), "one_order")]
    if kernel and not ordered:
        raise ValueError(
            f"kernel=True is for LlamaGen, and {type(model).__name__} holds none of its layers; leave it out."
        )
    if not groups and not ordered:
        raise ValueError(
            f"{type(model).__name__} holds no layer with projections to join ("
            + "; ".join(f"{layer}: {', '.join(names)}" for layer, names in _GROUPS.items())
            + "); pass a model that does, and only once."
        )
    for layer, names in groups:
        joined = JoinedProjections([getattr(layer, name) for name in names], names)
        setattr(layer, names[0], joined)
        for index, name in enumerate(names[1:], 1):
            setattr(layer, name, Part(joined, index))
        joined.register_state_dict_post_hook(_write_separately)
        # A hook of the layer: on loading, the projections themselves only see their own keys.
        layer.register_load_state_dict_pre_hook(_read_separately)
    for layer in ordered:
        layer.one_order = True


def in_one_order(layer: Any, x: Tensor, **around: Any) -> Tensor:
    """Return the output of a linear layer, or of joined ones together, by `project`, which is told what is `around` it.

    Raises:
        ValueError: the layer is no plain one, or its weights are quantised in a way that the kernel does not read.
    """
    weight = layer.weight
    scale = getattr(weight, "scale", None)
    plain = type(layer) in (nn.Linear, JoinedProjections) and not hasattr(layer, "_hf_hook")
    if scale is not None:  # of torchao's, which round activations, too, if asked to
        plain &= type(weight).__name__ in ("Int8Tensor", "Float8Tensor") and weight.act_quant_kwargs is None
        plain &= scale.shape == (len(weight), 1)
        weight, scale = weight.qdata, scale[:, 0].float()
    plain &= (scale is not None) == (weight.dtype in BYTES)
    plain &= not is_traceable_wrapper_subclass(weight)
    if not plain:
        raise ValueError(
            f"a {type(layer).__name__} of {type(layer.weight).__name__} has no kernel of one order of sums; with "
            "fuse_projections(kernel=True) pass plain linear layers: without adapters or offloading, and quantised, if "
            "at all, by Int8WeightOnlyConfig or Float8WeightOnlyConfig with a scale a row."
        )
    return project(x, weight, scale=scale, bias=layer.bias, **around)


class JoinedProjections(nn.Linear):
    """Several projections as one matrix, one below the other. Calling it returns the first of them; see `Part`.

    Args:
        layers: the projections, already checked.
        names: their names in the layer that holds them.
    """

    def __init__(self, layers: list[nn.Linear], names: tuple[str, ...]) -> None:
        first = layers[0]
        sizes = [layer.out_features for layer in layers]
        super().__init__(first.in_features, sum(sizes), first.bias is not None, device="meta")
        self.names, self.sizes = names, sizes
        for kind in ("weight", "bias") if first.bias is not None else ("weight",):
            rows = [getattr(layer, kind) for layer in layers]
            joined = torch.cat([part.detach() for part in rows])
            setattr(self, kind, nn.Parameter(joined, requires_grad=rows[0].requires_grad))
        self.train(first.training)
        self._held: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def part(self, x: Tensor, index: int) -> Tensor:
        """Return one projection of `x [..., in]`, as a view of all of them."""
        held = self._held
        # If called in another order, or with another input, it computes again: slow but correct.
        if held is None or held[0] is not x:
            held = self._held = x, super().forward(x).split(self.sizes, -1)
        if index == len(self.sizes) - 1:
            self._held = None  # hold nothing after the layer's call
        return held[1][index]

    def forward(self, input: Tensor) -> Tensor:
        return self.part(input, 0)


class Part(nn.Module):
    """One of the other projections of a `JoinedProjections`."""

    def __init__(self, joined: JoinedProjections, index: int) -> None:
        super().__init__()
        self._joined = (joined,)  # in a tuple, so that its parameters are registered once
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self._joined[0].part(x, self.index)


def _check(path: str, names: tuple[str, ...], parts: list[Any]) -> None:
    for name, part in zip(names, parts, strict=True):
        plain = type(part) is nn.Linear and type(part.weight) is nn.Parameter
        hooked = plain and (part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook"))
        if not plain or hooked:
            what = f"{type(part).__name__} of {type(part.weight).__name__}" if hasattr(part, "weight") else ""
            raise ValueError(
                f"{path}.{name} is a {what or type(part).__name__}{' with hooks' if hooked else ''}; only plain linear "
                "layers can be joined: do so before they are quantised, adapted or offloaded."
            )
    for what, values in (
        ("input widths", [part.in_features for part in parts]),
        ("dtypes", [part.weight.dtype for part in parts]),
        ("devices", [part.weight.device for part in parts]),
        ("biases", [part.bias is not None for part in parts]),
        ("trainable weights", [part.weight.requires_grad for part in parts]),
    ):
        if len(set(values)) > 1:
            raise ValueError(
                f"{path}.{', '.join(names)} differ in their {what}: {', '.join(map(str, values))}; they cannot be one "
                "matrix."
            )


def _write_separately(
    joined: JoinedProjections, state: dict[str, Tensor], prefix: str, metadata: object
) -> None:
    """Hook of a matrix's state dict: store the rows of each projection under its own key, as views."""
    layer = prefix.removesuffix(f"{joined.names[0]}.")
    whole = {kind: state.pop(f"{prefix}{kind}", None) for kind in ("weight", "bias")}
    start = 0
    for name, size in zip(joined.names, joined.sizes, strict=True):
        for kind, rows in whole.items():
            if rows is not None:
                # No split: quantised weights support slices only.
                state[f"{layer}{name}.{kind}"] = rows[start : start + size]
        start += size


def _read_separately(layer: nn.Module, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
    """Hook before a layer loads: join the rows of each projection to one matrix, if all are there."""
    for joined in (child for child in layer.children() if isinstance(child, JoinedProjections)):
        for kind in ("weight", "bias"):
            keys = [f"{prefix}{name}.{kind}" for name in joined.names]
            if all(key in state for key in keys):
                rows = [state.pop(key) for key in keys]
                state[keys[0]] = torch.cat(rows)
