"""Official LlamaGen, NAR, FlashAR, PAR and RandAR checkpoint files: recognise them, check every key, build the model.

The keys and shapes of a file determine its architecture. A NAR file (arXiv 2503.10696) has the keys of LlamaGen, blocks
of the lower head after the trunk's, and `medusa_norm` and `medusa_output`, the lower head itself. A FlashAR
file (2605.09430) has these and `hv_gate_mlp`, the gate between the heads; the arguments of its training say where the
lower head's blocks leave the trunk. A PAR file (2412.15119) has learned tokens,
`spe_tok_embeddings`, one for each region but the first. A RandAR file (2412.01827) has one embedding for its position
instructions, `pos_instruct_embeddings`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from visual_spec.models.core.checkpoints import Checkpoint, Source, fill, read_checkpoint, shapes_of
from visual_spec.models.core.layouts import count_parts
from visual_spec.models.core.orders import LEARNED_TOKENS
from visual_spec.models.core.protocol import ANY_ORDER, RASTER_ORDER
from visual_spec.models.core.saved import Difference, some
from visual_spec.models.next_token import llamagen, llamagen_vq
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel

IMAGE_SIZES = (256, 384, 512)
CAPTION_LENGTH, CAPTION_DIM, NUM_CLASSES = 120, 2048, 1000

# What the models of an order are called.
_NAMES = {
    RASTER_ORDER: "LlamaGen-{}",
    "nar": "NAR-{}",
    "flashar": "FlashAR-{}",
    "par4": "PAR-{}-4x",
    "par16": "PAR-{}-16x",
    ANY_ORDER: "RandAR-{}",
}

# A size that NAR has beside LlamaGen's.
_NAR_M = {"M": {"num_layers": 18, "num_heads": 16, "dim": 1024}}

# Keys that no model of ours has: computed from the grid, or a usage counter of training.
_DROPPED = ("freqs_cis", "quantize.codebook_used")

# FlashAR's files also hold a fixed share of the heads, which a gate supersedes. Without a gate it would count.
_GATE, _SUPERSEDED = "hv_gate_mlp.0.weight", "hv_mix_logit"

# Keys of other families' weights, and what to do with such files.
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
class Architecture:
    """One known architecture: `model(**config)`, except the picture size, on which no weight depends.

    Attributes:
        name: name for display, e.g. "LlamaGen-XL, text-conditional".
        model: `LlamaGenTransformer` or `VQModel`.
        preset: its name in the table of the model's module.
        config: constructor arguments.
    """

    name: str
    model: type[LlamaGenTransformer] | type[VQModel]
    preset: str
    config: dict[str, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every key. Uses no memory: the model is built on the meta device, with one layer for all."""
        layers = self.config.get("num_layers", 1) + self.config.get("branch_layers", 0)
        one = {"num_layers": 1, "branch_layers": 0} if "branch_layers" in self.config else {"num_layers": 1}
        with torch.device("meta"):
            model = self.model(**{**self.config, **(one if layers > 1 else {})})
        shapes = shapes_of(model)
        first = {key: shape for key, shape in shapes.items() if key.startswith("layers.0.")}
        for layer in range(1, layers):
            shapes |= {key.replace(".0.", f".{layer}.", 1): shape for key, shape in first.items()}
        return shapes


# -- recognising ------------------------------------------------------------------------------------------------------


def known_architectures() -> list[Architecture]:
    """Return the official architectures: every transformer preset for classes and captions, and the tokenizers."""
    captions = dict(num_classes=None, caption_dim=CAPTION_DIM, prefix_length=CAPTION_LENGTH)
    architectures = []
    for preset in llamagen.PRESETS:
        architectures.append(transformer_architecture(preset, num_classes=NUM_CLASSES))
        architectures.append(transformer_architecture(preset, **captions))
    return architectures + [tokenizer_architecture(preset) for preset in llamagen_vq.PRESETS]


def transformer_architecture(preset: str, **changes: Any) -> Architecture:
    """Return a transformer preset, class-conditional and of raster order unless `changes` say otherwise."""
    kind = "class-conditional" if changes.get("caption_dim") is None else "text-conditional"
    name = f"{_NAMES[changes.get('order', RASTER_ORDER)].format(preset)}, {kind}"
    sizes = {**llamagen.PRESETS, **(_NAR_M if "branch_layers" in changes else {})}
    return Architecture(name, LlamaGenTransformer, preset, {**sizes[preset], **changes})


def tokenizer_architecture(preset: str, **changes: Any) -> Architecture:
    """Return a tokenizer preset."""
    config = {**llamagen_vq.PRESETS[preset], **changes}
    return Architecture(f"LlamaGen's tokenizer {preset}", VQModel, preset, config)


def recognise(checkpoint: Checkpoint) -> Architecture:
    """Return the architecture with exactly the keys and shapes of the file.

    Raises:
        ValueError: there is none; names the closest one and lists the missing, unexpected and mis-shaped keys.
    """
    weights = _used(checkpoint)
    guesses = list(_guesses(weights))
    for guess in guesses:
        if not Difference.between(weights, guess.shapes()):
            return guess
    # Guesses first: if several are equally close, the guess made from the file says more.
    rated = [(Difference.between(weights, a.shapes()), a) for a in guesses + known_architectures()]
    difference, closest = max(rated, key=lambda pair: pair[0].similarity)
    if any(key.startswith("quantize.quant_resi.") for key in weights):
        raise ValueError(
            f"{checkpoint.path} is VAR's multi-scale tokenizer; load it together with its transformer by "
            "ScaleImagePipeline.from_official, or alone with load_var_vq_checkpoint of "
            "visual_spec.models.next_scale.var_vq."
        )
    if difference.similarity[1] == 0:
        about = next((text for mark, text in _FOREIGN.items() if mark in " ".join(weights)), None)
        raise ValueError(
            f"{checkpoint.path} holds another architecture{f' (it looks like {about})' if about else ''}: none of its "
            f"{len(weights)} keys ({some(weights)}) is one of LlamaGen's or its tokenizers'."
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


def name_of(checkpoint: Checkpoint) -> str:
    """Return what a file is called; errors as of `recognise`."""
    return recognise(checkpoint).name


def _used(checkpoint: Checkpoint) -> dict[str, Tensor]:
    dropped = (*_DROPPED, _SUPERSEDED) if _GATE in checkpoint.weights else _DROPPED
    return {key: value for key, value in checkpoint.weights.items() if key not in dropped}


def _guesses(weights: Mapping[str, Tensor]) -> Iterable[Architecture]:
    """Return presets of the file's size, with the file's vocabulary, classes and captions."""
    tokens, codes = weights.get("tok_embeddings.weight"), weights.get("quantize.embedding.weight")
    if tokens is not None and tokens.ndim == 2:
        vocab_size, dim = tokens.shape
        layers = count_parts(weights, "layers.")
        classes = weights.get("cls_embedding.embedding_table.weight")
        captions = weights.get("cls_embedding.uncond_embedding")
        changes: dict[str, Any] = dict(vocab_size=vocab_size)
        if captions is not None and captions.ndim == 2:
            changes |= dict(num_classes=None, prefix_length=captions.shape[0], caption_dim=captions.shape[1])
        elif classes is not None:
            changes |= dict(num_classes=max(1, classes.shape[0] - 1))
        if "medusa_output.weight" in weights:
            # Deepest first: the lower head has few blocks of its own, and the file does not say how many.
            order = "flashar" if _GATE in weights else "nar"
            sizes = {**llamagen.PRESETS, **_NAR_M}.items()
            for preset, size in sorted(sizes, key=lambda item: -item[1]["num_layers"]):
                if size["dim"] == dim and size["num_layers"] < layers:
                    own = dict(order=order, branch_layers=layers - size["num_layers"])
                    yield transformer_architecture(preset, **changes, **own)
            return
        learned = weights.get("spe_tok_embeddings.special_embeddings.weight")
        orders = {count: order for order, count in LEARNED_TOKENS.items()}
        for preset, size in llamagen.PRESETS.items():
            if (size["num_layers"], size["dim"]) == (layers, dim):
                if learned is not None and len(learned) in orders:
                    yield transformer_architecture(preset, **changes, order=orders[len(learned)])
                if "pos_instruct_embeddings" in weights:
                    yield transformer_architecture(preset, **changes, order=ANY_ORDER)
                yield transformer_architecture(preset, **changes)
    elif codes is not None and codes.ndim == 2:
        for preset in llamagen_vq.PRESETS:
            yield tokenizer_architecture(preset, codebook_size=codes.shape[0], codebook_dim=codes.shape[1])


def find_image_size(checkpoint: Checkpoint, patch_size: int, image_size: int | None = None) -> int:
    """The picture side in pixels: as requested, else from the rotary table, the training run, or the file's name.

    Args:
        checkpoint: of a transformer.
        patch_size: pixels per token side of its tokenizer.
        image_size: the requested side.

    Raises:
        ValueError: no size is given or found, it is not a multiple of the patch, or the file contradicts it.
    """
    table, arguments = checkpoint.weights.get("freqs_cis"), checkpoint.arguments
    sizes = "|".join(map(str, IMAGE_SIZES))
    in_name = re.search(rf"(?<!\d)({sizes})(?!\d)", checkpoint.path.stem)
    held = None
    if table is not None:
        prefix = checkpoint.weights.get("cls_embedding.uncond_embedding")
        held = round((len(table) - (1 if prefix is None else len(prefix))) ** 0.5) * patch_size
    elif "image_size" in arguments:
        held = int(arguments["image_size"]) // int(arguments.get("downsample_size", 16)) * patch_size
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
    """Return the model of a recognised file. Its weights stay mapped to the file unless `dtype` converts them.

    Args:
        dtype: dtype of the weights; None keeps the file's.
        changes: further constructor arguments: grid_size or image_size.
    """
    with torch.device("meta"):
        model = architecture.model(**architecture.config, **changes)
    return fill(model, _used(checkpoint), str(checkpoint.path), dtype=dtype)


def load_transformer(
    source: Source, *, image_size: int | None = None, patch_size: int = 16, dtype: torch.dtype | None = None
) -> LlamaGenTransformer:
    """Return the transformer of an official file, e.g. `c2i_XL_384.pt` or `t2i_XL_stage2_512.pt`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        image_size: side of the pictures in pixels; None: see `find_image_size`.
        patch_size: pixels per token side: 16, or 8 for a model over VQ-8 tokens.

    Raises:
        ValueError: also as in `recognise` and `find_image_size`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    architecture = _of_kind(checkpoint, LlamaGenTransformer)
    side = find_image_size(checkpoint, patch_size, image_size) // patch_size
    return build(checkpoint, architecture, dtype=dtype, grid_size=side, **_branch(checkpoint, architecture))


def _branch(checkpoint: Checkpoint, architecture: Architecture) -> dict[str, int]:
    """`branch_start` of a model with a lower head, where its training moved the start of it (FlashAR)."""
    arguments, config = checkpoint.arguments, architecture.config
    if "branch_layers" not in config:
        return {}
    own, trained = config["branch_layers"], arguments.get("medusa_attention_num", -1)
    if trained >= 0 and trained != own:
        raise ValueError(
            f"{checkpoint.path} was trained with medusa_attention_num={trained}, but has {own} blocks after the "
            f"{config['num_layers']} of {architecture.name}; pass the file as its training wrote it."
        )
    start = arguments.get("vertical_start_layer", -1)
    if arguments.get("vertical_start_last_minus_depth"):
        start = config["num_layers"] - own
    return {"branch_start": min(start, config["num_layers"])} if start >= 0 else {}


def load_tokenizer(source: Source, *, image_size: int = 256, dtype: torch.dtype | None = None) -> VQModel:
    """Return the tokenizer of an official file, e.g. `vq_ds16_c2i.pt`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        image_size: side of the pictures that `decode_tokens` makes; no weight depends on it.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    return build(checkpoint, _of_kind(checkpoint, VQModel), dtype=dtype, image_size=image_size)


def load_pair(
    transformer: Source, vq_model: Source, *, image_size: int | None = None, dtype: torch.dtype | None = None
) -> tuple[LlamaGenTransformer, VQModel]:
    """Return transformer and tokenizer of two official files, for pictures of one size. See `load_transformer`."""
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
    """Return the guidance scale and top-k of the official sampling code.

    NAR: scale 7.5 for text and 2.0 for classes, no top-k. PAR, FlashAR and RandAR: LlamaGen's.

    Text: scale 7.5 and top-k 1000. Classes: no top-k, and the scale of the published FID (README of LlamaGen): 2.0 for
    B and L, 1.75 for XL and XXL, 1.65 for 3B; sizes without a published scale take the scale of the next smaller size.
    """
    text = model.config["caption_dim"] is not None
    if model.trained_order == "nar":
        return {"default_guidance_scale": 7.5 if text else 2.0, "default_top_k": 0}
    if text:
        return {"default_guidance_scale": 7.5, "default_top_k": 1000}
    dim = model.config["dim"]
    scale = 2.0 if dim < 1280 else 1.75 if dim < 3200 else 1.65
    return {"default_guidance_scale": scale, "default_top_k": 0}
