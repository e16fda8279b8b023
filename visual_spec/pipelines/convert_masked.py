"""Official files of masked models, for `visual-spec convert`: Halton-MaskGIT, MAGE and MaskGCT."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.masked.mage import load_mage_checkpoint
from visual_spec.models.masked.mage_vq import is_mage_tokenizer, load_mage_tokenizer
from visual_spec.models.masked.maskgct_checkpoint import (
    kind_of,
    load_acoustic_codec,
    load_acoustic_network,
    load_semantic_codec,
    load_semantic_network,
)
from visual_spec.models.masked.maskgit_checkpoint import load_maskgit_checkpoint
from visual_spec.models.next_token.llamagen_checkpoint import recognise
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.pipelines.mage_image import MageImagePipeline
from visual_spec.pipelines.masked_class_image import MaskedClassImagePipeline
from visual_spec.pipelines.maskgct import MaskgctPipeline, published_samplers

_MAGE = "token_emb.word_embeddings.weight"
_MASKGIT = ("cls_emb.weight", "tok_emb.weight", "pos_emb.weight")


def is_masked(checkpoint: Path | Checkpoint) -> bool:
    """Whether a file is of one of these families; LlamaGen's tokenizer, which Halton-MaskGIT shares, is of its own."""
    if isinstance(checkpoint, Path):
        return False
    known = _is_mage(checkpoint) or _is_maskgit(checkpoint) or is_mage_tokenizer(checkpoint.weights)
    return known or kind_of(checkpoint) is not None


def assemble_masked(
    sources: Sequence[Path | Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline or model of the files, and what each of them is.

    Args:
        sources: at least one of them `is_masked`.

    Raises:
        ValueError: files of two families or two of one kind, or a text encoder, which none of these models reads.
    """
    checkpoints = [source for source in sources if isinstance(source, Checkpoint)]
    if any(kind_of(one) for one in checkpoints):
        return _maskgct(checkpoints, text_encoder, image_size, dtype)
    if text_encoder is not None:
        raise ValueError("Halton-MaskGIT and MAGE read no text; leave the text encoder out.")
    models = [one for one in checkpoints if _is_mage(one) or _is_maskgit(one)]
    tokenizers = [one for one in checkpoints if one not in models]
    for several in (models, tokenizers):
        if len(several) > 1:
            raise ValueError(
                f"{several[0].path} and {several[1].path} are both of one kind; pass one transformer, one tokenizer, "
                "or one of each."
            )
    tokenizer = tokenizers[0] if tokenizers else None
    if not models:
        assert tokenizer is not None
        size = {} if image_size is None else {"image_size": image_size}
        return load_mage_tokenizer(tokenizer, dtype=dtype, **size), {str(tokenizer.path): "MAGE's tokenizer"}
    (model,) = models
    if _is_mage(model):
        return _mage(model, tokenizer, image_size, dtype)
    return _maskgit(model, tokenizer, image_size, dtype)


def _mage(
    model: Checkpoint, tokenizer: Checkpoint | None, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    names = {str(model.path): "MAGE"}
    if tokenizer is not None and not is_mage_tokenizer(tokenizer.weights):
        raise ValueError(
            f"{tokenizer.path} is no tokenizer of MAGE; leave it out if {model.path} holds one, else pass "
            "vqgan_jax_strongaug.ckpt."
        )
    if tokenizer is None and not is_mage_tokenizer(model.weights):
        return load_mage_checkpoint(model, dtype=dtype), names
    if tokenizer is not None:
        names[str(tokenizer.path)] = "MAGE's tokenizer"
    pipe = MageImagePipeline.from_official(model, tokenizer, dtype=dtype)
    if image_size not in (None, pipe.image_size[0]):
        raise ValueError(
            f"image_size={image_size}, but these weights draw {pipe.image_size[0]} pixels; leave it out."
        )
    return pipe, names


def _maskgit(
    model: Checkpoint, tokenizer: Checkpoint | None, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    names = {str(model.path): "Halton-MaskGIT"}
    if tokenizer is None:
        return load_maskgit_checkpoint(model, dtype=dtype), names
    found = recognise(tokenizer)
    if found.model is not VQModel:
        raise ValueError(
            f"{tokenizer.path} is {found.name}, and {model.path} is Halton-MaskGIT; pass LlamaGen's vq_ds16_c2i.pt."
        )
    names[str(tokenizer.path)] = found.name
    pipe = MaskedClassImagePipeline.from_official(model, tokenizer, image_size=image_size, dtype=dtype)
    return pipe, names


_NEEDED = (
    "semantic network",
    "first acoustic network",
    "acoustic network",
    "acoustic encoder",
    "acoustic decoder",
)


def _maskgct(
    checkpoints: Sequence[Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    if text_encoder is not None or image_size is not None:
        raise ValueError(
            "MaskGCT reads phones, and draws nothing; leave the text encoder and image_size out."
        )
    found: dict[str, Checkpoint] = {}
    for one in checkpoints:
        kind = kind_of(one)
        if kind is None:
            raise ValueError(f"{one.path} is not of MaskGCT, and other files are; pass files of one family.")
        if kind == "acoustic network" and len(one.weights["layer_emb.weight"]) == 1:
            kind = "first acoustic network"
        if kind in found:
            raise ValueError(
                f"{found[kind].path} and {one.path} are both MaskGCT's {kind}; pass one of them."
            )
        found[kind] = one
    names = {str(one.path): f"MaskGCT's {kind}" for kind, one in found.items()}
    kinds = set(found)
    loaded: dict[str, Any] = {}
    if "semantic network" in kinds:
        loaded["semantic"] = load_semantic_network(found["semantic network"], dtype=dtype)
    for name, kind in {
        "acoustic_first": "first acoustic network",
        "acoustic_rest": "acoustic network",
    }.items():
        if kind in kinds:
            loaded[name] = load_acoustic_network(found[kind], dtype=dtype)
    pairs = {
        "codec": (("acoustic encoder", "acoustic decoder"), load_acoustic_codec),
        "semantic_codec": (("semantic codec", "statistics"), load_semantic_codec),
    }
    for name, (both, load) in pairs.items():
        if kinds & {*both}:
            if not {*both} <= kinds:
                raise ValueError(
                    f"one of MaskGCT's {both[0]} and {both[1]} given; pass both, which make one model."
                )
            loaded[name] = load(found[both[0]], found[both[1]], dtype=dtype)
    if set(_NEEDED) <= kinds:
        return MaskgctPipeline(**loaded, **published_samplers()), names
    if len(loaded) == 1:
        return loaded.popitem()[1], names
    missing = [kind for kind in _NEEDED if kind not in kinds]
    raise ValueError(
        f"these files of MaskGCT lack its {', '.join(missing)}; pass all, or those of one model."
    )


def _is_mage(checkpoint: Checkpoint) -> bool:
    return _MAGE in checkpoint.weights


def _is_maskgit(checkpoint: Checkpoint) -> bool:
    return all(key in checkpoint.weights for key in _MASKGIT)
