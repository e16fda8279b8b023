"""Official files of LlamaGen, and of the models that share its layout: what their pipelines are made of."""

import os
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin

from visual_spec.families import all_families
from visual_spec.models.core.checkpoints import Checkpoint, Source, read_checkpoint
from visual_spec.models.core.protocol import ANY_ORDER, RASTER_ORDER, trained_order
from visual_spec.models.next_token.llamagen_checkpoint import load_pair, load_tokenizer, official_defaults
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.t5_features import T5Features
from visual_spec.pipelines.sampler_text import read_sampler
from visual_spec.samplers.core.base import Sampler


def own_sampler(model: ModelMixin) -> Sampler:
    """Return the sampler of a model that none is chosen for: its public code's, or the law of its own order."""
    if hasattr(model, "official_sampler"):
        return read_sampler(model.official_sampler)
    known = {RASTER_ORDER: "speculative-jacobi", ANY_ORDER: "speculative-any-order"}
    return read_sampler(known.get(trained_order(model), "ordered"))


def load_official(
    transformer: Source, vq_model: Source, *, image_size: int | None, dtype: torch.dtype | None, text: bool
) -> tuple[Any, VQModel, dict[str, Any]]:
    """Transformer, tokenizer and the pipeline's defaults, of LlamaGen's files or those of a family that shares them.

    Args:
        text: whether the pipeline draws from captions (else from class labels).

    Raises:
        ValueError, OSError: as `load_pair`; a transformer of the other kind.
    """
    checkpoint = transformer if isinstance(transformer, Checkpoint) else read_checkpoint(transformer)
    other, name = ("ClassImagePipeline", "ImagePipeline")[:: 1 if text else -1]
    layouts = (family.layout for family in all_families() if family.layout and family.name != "LlamaGen")
    files = (kind for layout in layouts for kind in layout.files if kind.role == "transformer")
    kinds = [kind for kind in files if kind.pipeline in (name, other) and kind.fits(checkpoint.weights)]
    if not kinds:
        model, tokenizer = load_pair(checkpoint, vq_model, image_size=image_size, dtype=dtype)
        defaults = official_defaults(model)
        draws = name if (model.config["caption_dim"] is not None) == text else other
    else:
        model = kinds[0].function(kinds[0].load)(checkpoint, image_size=image_size, dtype=dtype)
        tokenizer = load_tokenizer(vq_model, dtype=dtype)
        sides = getattr(model, "control_size", None) or [model.grid.width * tokenizer.patch_size]
        tokenizer.register_to_config(image_size=sides[0])
        defaults, draws = dict(model.official_defaults), kinds[0].pipeline
    if draws == other:
        reads = "class labels" if text else "captions"
        raise ValueError(f"{checkpoint.path} draws from {reads}; load it with {other}.from_official.")
    return model, tokenizer, defaults


def load_t5(
    source: str | os.PathLike | T5Features | None,
    *,
    dtype: torch.dtype | None,
    max_words: int,
    cache_folder: str | os.PathLike | None,
    **settings: Any,
) -> T5Features | None:
    """A text encoder by folder or Hub id; one that is loaded, or None, as it is."""
    if not isinstance(source, (str, os.PathLike)):
        return source
    return T5Features.from_pretrained(
        source, torch_dtype=dtype, max_words=max_words, cache_folder=cache_folder, **settings
    )
