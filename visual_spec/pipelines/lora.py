"""LoRA adapters of a transformer: files of diffusers and of PEFT, read and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.utils.import_utils import is_peft_available
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn

from visual_spec.models.core.checkpoints import bare_key
from visual_spec.models.core.saved import read_settings

LoraSource = str | os.PathLike | Mapping[str, Tensor]

# Files that diffusers and PEFT write, and how PEFT and diffusers begin the keys.
_FILES = (LORA_WEIGHT_NAME_SAFE, "adapter_model.safetensors")
_PREFIXES = ("base_model.model.", "transformer.")
_CONFIG = "adapter_config.json"
_SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_rslora", "lora_bias")


def load_adapter(
    model: nn.Module, source: LoraSource, adapter_name: str | None, weight_name: str | None
) -> None:
    """Add an adapter to a transformer, and make it the active one; see `VisualPipeline.load_lora_weights`.

    An error leaves the transformer as it was.
    """
    if not is_peft_available():
        raise ImportError("adapters need PEFT; install it: pip install '.[lora]' in a checkout")
    if not isinstance(model, PeftAdapterMixin):
        raise ValueError(
            f"{type(model).__name__} takes no adapters here; merge them into it by PEFT before it is put into the "
            "pipeline."
        )
    weights, settings, name = _read(source, weight_name)
    _check(weights, model, name)
    with _all_or_nothing(model):
        try:
            # No prefix: the keys name the layers themselves.
            model.load_lora_adapter(weights, prefix=None, adapter_name=adapter_name, metadata=settings)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # PEFT and diffusers raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"{name} cannot be added to {type(model).__name__} ({reason}); pass another one, or another "
                "adapter_name."
            ) from error


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Within, layers may be wrapped; after an error a model has those of before, with what they held.

    diffusers leaves them wrapped, and takes adapters of similar names out of them.
    """
    copied = (dict, list, set)
    before = {
        module: {
            name: copy(value) if isinstance(value, copied) else value for name, value in vars(module).items()
        }
        for module in model.modules()
    }
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield
    except BaseException:
        for module, held in before.items():
            vars(module).clear()
            vars(module).update(held)
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)
        raise


def _read(source: LoraSource, weight_name: str | None) -> tuple[dict[str, Tensor], Any, str]:
    """The tensors of an adapter, named by the layers of the model, its settings, or None where it has none, its name.

    Raises:
        ValueError, FileNotFoundError: there is no file, more than one, or a damaged one; names it.
    """
    if isinstance(source, Mapping):
        return {_own_key(key): value for key, value in source.items()}, None, "the adapter"
    path = Path(source)
    if not path.exists() and os.fspath(source).count("/") == 1:
        path = Path(snapshot_download(os.fspath(source), allow_patterns=["*.safetensors", _CONFIG]))
    if path.is_dir():
        files = sorted(file.name for file in path.glob("*.safetensors"))
        names = [weight_name] if weight_name else [name for name in _FILES if name in files] or files
        if len(names) != 1:
            raise ValueError(f"{path} holds {', '.join(files) or 'no .safetensors file'}; pass weight_name.")
        path = path / names[0]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; pass a .safetensors file of LoRA weights.")
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is no .safetensors file; adapters of other formats are not read.")
    try:
        with safe_open(path, "pt") as file:
            weights = {_own_key(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            noted = (file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
        settings = dict(json.loads(noted)) if noted else None
    except Exception as error:  # a damaged header can raise any error
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{path} is truncated or damaged ({reason}); copy or download it again.") from error
    beside = path.parent / _CONFIG
    if settings is None and beside.is_file():
        settings = read_settings(beside)
    if settings is not None:
        settings = {key.removeprefix("transformer."): value for key, value in settings.items()}
        settings = {key: settings[key] for key in _SETTINGS if settings.get(key) is not None}
    return weights, settings, str(path)


def _own_key(key: str) -> str:
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    return bare_key(key)


def _check(weights: Mapping[str, Tensor], model: nn.Module, source: str) -> None:
    """Refuse an adapter that does not fit the layers of a model; names up to five keys."""
    layers = dict(model.named_modules())
    wrong = []
    for key, tensor in weights.items():
        name, _, part = key.rpartition(".lora_")
        layer = layers.get(name)
        layer = getattr(layer, "base_layer", layer)  # under an earlier adapter
        other = weights.get(f"{name}.lora_{'B' if part == 'A.weight' else 'A'}.weight")
        if part not in ("A.weight", "B.weight", "B.bias"):
            wrong.append(f"{key} (no LoRA weight of a linear layer or convolution)")
        elif not isinstance(layer, (nn.Linear, nn.Conv2d)):
            wrong.append(f"{key} (there is no such layer)")
        elif other is None:
            wrong.append(f"{key} (its lora_{'B' if part == 'A.weight' else 'A'}.weight is missing)")
        elif not tensor.is_floating_point() or not tensor.isfinite().all():
            wrong.append(f"{key} (not all finite numbers, of {tensor.dtype})")
        elif part != "B.bias":
            side = 1 if part == "A.weight" else 0
            if tensor.ndim != layer.weight.ndim or tensor.shape[side] != layer.weight.shape[side]:
                wrong.append(f"{key} {list(tensor.shape)} (the layer is {list(layer.weight.shape)})")
            elif tensor.shape[1 - side] != other.shape[side]:
                wrong.append(f"{key} {list(tensor.shape)} (of another rank than {list(other.shape)})")
    if wrong or not weights:
        raise ValueError(
            f"{source} does not fit {type(model).__name__}: {'; '.join(wrong[:5]) or 'it holds nothing'}"
            f"{f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. Pass one that was trained on this model."
        )
