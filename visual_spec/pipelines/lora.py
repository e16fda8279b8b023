"""LoRA adapters of a transformer: files of diffusers and of PEFT, read and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.utils.import_utils import is_peft_available
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn

LoraSource = str | os.PathLike | Mapping[str, Tensor]

# Files that diffusers and PEFT write, and how PEFT and diffusers begin the keys.
_FILES = (LORA_WEIGHT_NAME_SAFE, "adapter_model.safetensors")
_PREFIXES = ("base_model.model.", "transformer.")
_CONFIG = "adapter_config.json"
_SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_rslora", "lora_bias")


def load_adapter(
    model: nn.Module, source: LoraSource, adapter_name: str | None, weight_name: str | None
) -> None:
    """Add an adapter to a transformer, and make it the active one; see `VisualPipeline.load_lora_weights`."""
    if not is_peft_available():
        raise ImportError("adapters need PEFT; install it: pip install 'visual-spec[lora]'")
    if not isinstance(model, PeftAdapterMixin):
        raise ValueError(
            f"{type(model).__name__} takes no adapters here; merge them into it by PEFT before it is put into the "
            "pipeline."
        )
    weights, settings = _read(source, weight_name)
    _check(weights, model)
    # No prefix: the keys name the layers themselves.
    model.load_lora_adapter(weights, prefix=None, adapter_name=adapter_name, metadata=settings)  # pyright: ignore[reportArgumentType]


def _read(source: LoraSource, weight_name: str | None) -> tuple[dict[str, Tensor], Any]:
    """The tensors of an adapter, named by the layers of the model, and its settings, or None where it has none."""
    if isinstance(source, Mapping):
        return {_own_key(key): value for key, value in source.items()}, None
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
    with safe_open(path, "pt") as file:
        weights = {_own_key(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        noted = (file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
    beside = path.parent / _CONFIG
    settings = json.loads(noted) if noted else json.loads(beside.read_text()) if beside.is_file() else None
    if settings is not None:
        settings = {key.removeprefix("transformer."): value for key, value in settings.items()}
        settings = {key: settings[key] for key in _SETTINGS if settings.get(key) is not None}
    return weights, settings


def _own_key(key: str) -> str:
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    return key


def _check(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse an adapter that does not fit the layers of a model; names up to five keys."""
    layers = dict(model.named_modules())
    wrong = []
    for key, tensor in weights.items():
        name, _, part = key.rpartition(".lora_")
        layer = layers.get(name)
        layer = getattr(layer, "base_layer", layer)  # under an earlier adapter
        if part not in ("A.weight", "B.weight", "B.bias"):
            wrong.append(f"{key} (no LoRA weight of a linear layer or convolution)")
        elif not isinstance(layer, (nn.Linear, nn.Conv2d)):
            wrong.append(f"{key} (there is no such layer)")
        elif part != "B.bias":
            side = 1 if part == "A.weight" else 0
            if tensor.shape[side] != layer.weight.shape[side]:
                wrong.append(f"{key} {list(tensor.shape)} (the layer is {list(layer.weight.shape)})")
    if wrong or not weights:
        raise ValueError(
            f"the adapter does not fit {type(model).__name__}: {'; '.join(wrong[:5]) or 'it holds nothing'}"
            f"{f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. Pass one that was trained on this model."
        )
