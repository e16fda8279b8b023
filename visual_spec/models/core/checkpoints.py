"""Official LlamaGen checkpoint files: read, recognise, check every key, build the model.

The released files hold nothing but weights in one of four containers; which architecture they are of is read off keys
and shapes. Files are read with `torch.load(weights_only=True)` only, memory-mapped where their format allows it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from visual_spec.models.next_token import llamagen, llamagen_vq
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel

IMAGE_SIZES = (256, 384, 512)
CAPTION_LENGTH, CAPTION_DIM, NUM_CLASSES = 120, 2048, 1000

# Where the weights are: DDP training writes "model", DeepSpeed "module", Lightning "state_dict", FSDP a bare dict, and
# Infinity's tokenizers are in "vae".
_CONTAINERS = ("model", "module", "state_dict", "vae")
# Computed from the grid; a usage counter of training.
_DROPPED = ("freqs_cis", "quantize.codebook_used")

# What the weights of other families are called, and what to do with them.
_FOREIGN = {
    ".self_attn.q_proj.": "a transformers language model, such as Janus, Chameleon or Emu3; load its folder with "
    "transformers' from_pretrained",
    "ada_lin": "VAR; load it with ScaleImagePipeline.from_official, or alone with load_var_checkpoint of "
    "visual_spec.models.next_scale.var, or make a folder of it by `visual-spec convert`",
    "diffloss.": "MAR; this reader takes LlamaGen only",
    "SelfAttention": "T5; pass its folder as text_encoder",
    "encoder.down.": "a VQGAN of taming-transformers; LlamaGen's tokenizers are vq_ds16_*.pt and vq_ds8_*.pt",
}


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds.

    Attributes:
        path: of the file.
        weights: tensors by official key.
        dropped: the tensors that no model of ours has, by key.
        arguments: those of the training run, where the file holds them.
    """

    path: Path
    weights: dict[str, Tensor]
    dropped: dict[str, Tensor] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


Source = str | os.PathLike | Checkpoint


@dataclass(frozen=True)
class Architecture:
    """One known architecture: `model(**config)`, but for the picture size, which no weight depends on.

    Attributes:
        name: as printed, e.g. "LlamaGen-XL, text-conditional".
        model: `LlamaGenTransformer` or `VQModel`.
        preset: its name in the table of the model's module.
        config: constructor arguments.
    """

    name: str
    model: type[LlamaGenTransformer] | type[VQModel]
    preset: str
    config: dict[str, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every key. Takes no memory: the model is built on the meta device, with one layer for all."""
        layers = self.config.get("num_layers", 1)
        with torch.device("meta"):
            model = self.model(**{**self.config, **({"num_layers": 1} if layers > 1 else {})})
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        first = {key: shape for key, shape in shapes.items() if key.startswith("layers.0.")}
        for layer in range(1, layers):
            shapes |= {key.replace(".0.", f".{layer}.", 1): shape for key, shape in first.items()}
        return shapes


@dataclass(frozen=True)
class Difference:
    """How the keys of a file differ from those of an architecture."""

    missing: list[str]
    unexpected: list[str]
    misshaped: list[str]
    similarity: tuple[float, float]

    @classmethod
    def between(cls, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Difference:
        shared = weights.keys() & shapes.keys()
        union = len(weights.keys() | shapes.keys())
        wrong = sorted(key for key in shared if tuple(weights[key].shape) != shapes[key])
        return cls(
            missing=sorted(shapes.keys() - weights.keys()),
            unexpected=sorted(weights.keys() - shapes.keys()),
            misshaped=[f"{k} {list(weights[k].shape)} instead of {list(shapes[k])}" for k in wrong],
            similarity=((len(shared) - len(wrong)) / union, len(shared) / union),
        )

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def __str__(self) -> str:
        groups = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.misshaped}
        return "; ".join(f"{len(keys)} {what}: {_some(keys)}" for what, keys in groups.items() if keys)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Read a file without running anything that is in it.

    Args:
        path: of a `torch.save` file (`.pt`, `.pth`, `.bin`) or a safetensors file, with official keys.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: another kind of file, a truncated one, one that needs pickle, or one that holds no weights; says
            what it is and what to do.
    """
    path = Path(path)
    return _unpack(path, read_content(path))


def read_content(path: Path, keep: str = "{'model': c['model']}", *, namespaces: bool = True) -> Any:
    """What a file holds, read without running anything that is in it.

    Args:
        keep: Python for the part of the content `c` that is to be saved anew, where reading the file would need pickle.
        namespaces: also read the argparse.Namespace of a training run, which is plain attributes.

    Raises:
        FileNotFoundError, IsADirectoryError, ValueError: as `read_checkpoint`, but that any content will do.
    """
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder; name the checkpoint file in it, or load a folder that save_pretrained wrote with "
            "from_pretrained."
        )
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder.")
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _load_safetensors(path)
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return _load_torch(path, start.startswith(b"PK"), keep, [argparse.Namespace] if namespaces else [])
    raise ValueError(
        f"{path} is no checkpoint: it begins with {start[:12]!r}, and neither torch.save nor safetensors writes "
        "that. Pass an official .pt or .pth file; if this one was downloaded, look at it: it may be a web page."
    )


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); copy or download it again.") from error


def _load_torch(path: Path, mapped: bool, keep: str, known: list[Any]) -> Any:
    try:
        # Training runs save their argparse.Namespace beside the weights: plain attributes, nothing that runs.
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        asked = re.search(r"(?:Unsupported global: GLOBAL|Unsupported class|GLOBAL) ([\w.]+)", reason)
        if asked or "Unsupported operand" in reason:
            what = f"the Python object {asked[1]}" if asked else "Python objects other than tensors"
            raise ValueError(
                f"{path} holds {what}, so reading it would need pickle, which can run any code; it is refused. If you "
                'trust where it comes from, save its tensors alone, and pass the new file: python -c "import torch; '
                f"c = torch.load({str(path)!r}, map_location='cpu', weights_only=False); "
                f"torch.save({keep}, 'weights.pt')\""
            ) from error
        shown = reason[:160].strip() or type(error).__name__
        raise ValueError(
            f"{path} is truncated or damaged, or no PyTorch checkpoint ({shown}); compare its size with that of the "
            "original, and copy or download it again."
        ) from error


def _unpack(path: Path, content: Any) -> Checkpoint:
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; pass a file with a dict of weights.")
    inner = next((content[name] for name in _CONTAINERS if isinstance(content.get(name), Mapping)), content)
    tensors = {key: value for key, value in inner.items() if isinstance(value, Tensor)}
    if not tensors or (inner is content and len(tensors) < len(inner)):
        raise ValueError(
            f"{path} holds no weights: neither a dict of tensors under {', '.join(map(repr, _CONTAINERS))}, nor one "
            f"by itself, but {_some(map(repr, content))}."
        )
    arguments = content.get("args") if inner is not content else None
    return Checkpoint(
        path=path,
        weights={key: value for key, value in tensors.items() if key not in _DROPPED},
        dropped={key: value for key, value in tensors.items() if key in _DROPPED},
        arguments=vars(arguments) if isinstance(arguments, argparse.Namespace) else {},
    )


# -- recognising ------------------------------------------------------------------------------------------------------


def known_architectures() -> list[Architecture]:
    """The official ones: every transformer preset for classes and for captions, and the tokenizers."""
    captions = dict(num_classes=None, caption_dim=CAPTION_DIM, prefix_length=CAPTION_LENGTH)
    found = []
    for preset in llamagen.PRESETS:
        found.append(transformer_architecture(preset, num_classes=NUM_CLASSES))
        found.append(transformer_architecture(preset, **captions))
    return found + [tokenizer_architecture(preset) for preset in llamagen_vq.PRESETS]


def transformer_architecture(preset: str, **changes: Any) -> Architecture:
    """A transformer preset, class-conditional unless `caption_dim` is set."""
    kind = "class-conditional" if changes.get("caption_dim") is None else "text-conditional"
    config = {**llamagen.PRESETS[preset], **changes}
    return Architecture(f"LlamaGen-{preset}, {kind}", LlamaGenTransformer, preset, config)


def tokenizer_architecture(preset: str, **changes: Any) -> Architecture:
    """A tokenizer preset."""
    config = {**llamagen_vq.PRESETS[preset], **changes}
    return Architecture(f"LlamaGen's tokenizer {preset}", VQModel, preset, config)


def recognise(checkpoint: Checkpoint) -> Architecture:
    """The architecture whose keys and shapes the file has, all of them and no other.

    Raises:
        ValueError: there is none; names the closest one and lists the missing, unexpected and mis-shaped keys.
    """
    guesses = list(_guesses(checkpoint.weights))
    for guess in guesses:
        if not Difference.between(checkpoint.weights, guess.shapes()):
            return guess
    # Guesses first: where several are as close, the one that was made for the file says more.
    rated = [(Difference.between(checkpoint.weights, a.shapes()), a) for a in guesses + known_architectures()]
    difference, closest = max(rated, key=lambda pair: pair[0].similarity)
    if any(key.startswith("quantize.quant_resi.") for key in checkpoint.weights):
        raise ValueError(
            f"{checkpoint.path} is VAR's multi-scale tokenizer; load it together with its transformer by "
            "ScaleImagePipeline.from_official, or alone with load_var_vq_checkpoint of "
            "visual_spec.models.next_scale.var_vq."
        )
    if difference.similarity[1] == 0:
        about = next((text for mark, text in _FOREIGN.items() if mark in " ".join(checkpoint.weights)), None)
        raise ValueError(
            f"{checkpoint.path} holds another architecture{f' (it looks like {about})' if about else ''}: none of its "
            f"{len(checkpoint.weights)} keys ({_some(checkpoint.weights)}) is one of LlamaGen's or its tokenizers'."
        )
    hint = ""
    if closest.model is LlamaGenTransformer and not guesses:
        hint = (
            " If the sizes are your own, build LlamaGenTransformer(...) and load the weights into it: "
            "the number of heads cannot be read off them."
        )
    raise ValueError(
        f"{checkpoint.path} is of no known architecture; the closest is {closest.name}, with {difference}.{hint}"
    )


def _guesses(weights: Mapping[str, Tensor]) -> Iterable[Architecture]:
    """Presets of the file's size, with the vocabulary, classes and captions that it has."""
    tokens, codes = weights.get("tok_embeddings.weight"), weights.get("quantize.embedding.weight")
    if tokens is not None and tokens.ndim == 2:
        vocab_size, dim = tokens.shape
        layers = len({key.split(".")[1] for key in weights if key.startswith("layers.")})
        classes = weights.get("cls_embedding.embedding_table.weight")
        captions = weights.get("cls_embedding.uncond_embedding")
        changes: dict[str, Any] = dict(vocab_size=vocab_size)
        if captions is not None and captions.ndim == 2:
            changes |= dict(num_classes=None, prefix_length=captions.shape[0], caption_dim=captions.shape[1])
        elif classes is not None:
            changes |= dict(num_classes=max(1, classes.shape[0] - 1))
        for preset, size in llamagen.PRESETS.items():
            if (size["num_layers"], size["dim"]) == (layers, dim):
                yield transformer_architecture(preset, **changes)
    elif codes is not None and codes.ndim == 2:
        for preset in llamagen_vq.PRESETS:
            yield tokenizer_architecture(preset, codebook_size=codes.shape[0], codebook_dim=codes.shape[1])


def find_image_size(checkpoint: Checkpoint, patch_size: int, image_size: int | None = None) -> int:
    """Side of the pictures in pixels: as asked, else from the rotary table, the training run, or the file's name.

    Args:
        checkpoint: of a transformer.
        patch_size: pixels per token side of its tokenizer.
        image_size: as asked.

    Raises:
        ValueError: no size is given or found, one that is no multiple of the patch, or one that the file contradicts.
    """
    table, given = checkpoint.dropped.get("freqs_cis"), checkpoint.arguments
    sizes = "|".join(map(str, IMAGE_SIZES))
    in_name = re.search(rf"(?<!\d)({sizes})(?!\d)", checkpoint.path.stem)
    held = None
    if table is not None:
        prefix = checkpoint.weights.get("cls_embedding.uncond_embedding")
        held = round((len(table) - (1 if prefix is None else len(prefix))) ** 0.5) * patch_size
    elif "image_size" in given:
        held = int(given["image_size"]) // int(given.get("downsample_size", 16)) * patch_size
    if held is not None and image_size not in (None, held):
        raise ValueError(
            f"image_size={image_size} given, but {checkpoint.path} was trained for {held} pixels; pass {held}, or "
            "leave image_size out."
        )
    size = image_size or held or (int(in_name[1]) if in_name else None)
    if size is None:
        raise ValueError(
            f"{checkpoint.path} does not tell the size of its pictures; pass image_size "
            f"({', '.join(map(str, IMAGE_SIZES))} for the official files, which have it in their names)."
        )
    if size < patch_size or size % patch_size:
        raise ValueError(f"image_size={size}; pass a multiple of {patch_size}, the pixels per token side.")
    return size


# -- building ---------------------------------------------------------------------------------------------------------


def build(
    checkpoint: Checkpoint, architecture: Architecture, *, dtype: torch.dtype | None = None, **changes: Any
) -> Any:
    """The model of a recognised file. Its weights stay mapped to the file unless `dtype` has them converted.

    Args:
        dtype: of the weights; None keeps that of the file.
        changes: constructor arguments beside the architecture's: grid_size or image_size.
    """
    with torch.device("meta"):
        model: Any = architecture.model(**architecture.config, **changes)
    model.load_state_dict(checkpoint.weights, assign=True)
    assert not any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))
    if dtype is not None:
        nn.Module.to(model, dtype)  # diffusers' own would warn of an empty list of modules
    return model.eval()


def load_transformer(
    source: Source,
    *,
    image_size: int | None = None,
    patch_size: int = 16,
    dtype: torch.dtype | None = None,
) -> LlamaGenTransformer:
    """The transformer of an official file, e.g. `c2i_XL_384.pt` or `t2i_XL_stage2_512.pt`.

    Args:
        source: the file, or what `read_checkpoint` made of it.
        image_size: side of the pictures in pixels; None: see `find_image_size`.
        patch_size: pixels per token side: 16, or 8 for a model over VQ-8 tokens.
        dtype: of the weights; None keeps that of the file.

    Raises:
        ValueError, OSError: as `read_checkpoint`, `recognise` and `find_image_size`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    architecture = _of_kind(checkpoint, LlamaGenTransformer)
    side = find_image_size(checkpoint, patch_size, image_size) // patch_size
    return build(checkpoint, architecture, dtype=dtype, grid_size=side)


def load_tokenizer(source: Source, *, image_size: int = 256, dtype: torch.dtype | None = None) -> VQModel:
    """The tokenizer of an official file, e.g. `vq_ds16_c2i.pt`.

    Args:
        source: the file, or what `read_checkpoint` made of it.
        image_size: side of the pictures that `decode_tokens` makes; no weight depends on it.
        dtype: of the weights; None keeps that of the file.

    Raises:
        ValueError, OSError: as `read_checkpoint` and `recognise`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    return build(checkpoint, _of_kind(checkpoint, VQModel), dtype=dtype, image_size=image_size)


def load_pair(
    transformer: Source,
    vq_model: Source,
    *,
    image_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[LlamaGenTransformer, VQModel]:
    """Transformer and tokenizer of two official files, for pictures of one size. See `load_transformer`."""
    tokenizer = load_tokenizer(vq_model, dtype=dtype)
    patch = tokenizer.patch_size
    model = load_transformer(transformer, image_size=image_size, patch_size=patch, dtype=dtype)
    tokenizer.register_to_config(image_size=model.grid.width * patch)
    return model, tokenizer


def _of_kind(checkpoint: Checkpoint, model: type[ModelMixin]) -> Architecture:
    architecture = recognise(checkpoint)
    if architecture.model is not model:
        wanted = "an image tokenizer" if model is VQModel else "a transformer"
        raise ValueError(f"{checkpoint.path} is {architecture.name}; pass the file of {wanted} here.")
    return architecture


def official_defaults(model: LlamaGenTransformer) -> dict[str, Any]:
    """The guidance scale and top-k that the official code draws with.

    Text: scale 7.5 and top-k 1000. Classes: no top-k, and the scale of the published FID (README of LlamaGen): 2.0 for
    B and L, 1.75 for XL and XXL, 1.65 for 3B; sizes without a published one take that of the next smaller.
    """
    if model.config["caption_dim"] is not None:
        return {"default_guidance_scale": 7.5, "default_top_k": 1000}
    dim = model.config["dim"]
    scale = 2.0 if dim < 1280 else 1.75 if dim < 3200 else 1.65
    return {"default_guidance_scale": scale, "default_top_k": 0}


def _some(names: Iterable[str], count: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
