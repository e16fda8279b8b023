"""Official files of LlamaGen, and of the models that share its layout: what their pipelines are made of."""

import os
from typing import Any

import torch

from visual_spec.families import FAMILIES, all_families
from visual_spec.models.core.checkpoints import Checkpoint, Source, read_checkpoint
from visual_spec.models.core.protocol import ANY_ORDER, RASTER_ORDER, trained_order
from visual_spec.models.next_token.llamagen_checkpoint import load_pair, load_tokenizer, official_defaults
from visual_spec.models.text.t5_features import T5Features
from visual_spec.pipelines.sampler_text import make_sampler


def own_sampler(model: Any) -> Any:
    """Return the sampler of a model that none is chosen for: the tokens, or the law, of its own order."""
    known = {RASTER_ORDER: "speculative-jacobi", ANY_ORDER: "speculative-any-order"}
    return make_sampler(known.get(trained_order(model), "ordered"))


def load_for_texts(
    transformer: Source, vq_model: Source, *, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, Any, dict[str, Any]]:
    """Transformer, tokenizer and the pipeline's defaults, of LlamaGen's files or those of a family like ControlAR.

    Raises:
        ValueError, OSError: as `load_official`.
    """
    checkpoint = transformer if isinstance(transformer, Checkpoint) else read_checkpoint(transformer)
    layouts = (family.layout for family in all_families() if family.layout and family not in FAMILIES)
    kinds = (kind for layout in layouts for kind in layout.files if kind.pipeline == "ImagePipeline")
    kind = next((kind for kind in kinds if kind.fits(checkpoint.weights)), None)
    if kind is None:
        return load_official(checkpoint, vq_model, image_size=image_size, dtype=dtype, text=True)
    model = kind.function(kind.load)(checkpoint, image_size=image_size, dtype=dtype)
    tokenizer = load_tokenizer(vq_model, image_size=model.control_size[0], dtype=dtype)
    return model, tokenizer, dict(model.official_defaults)


def load_official(
    transformer: Source,
    vq_model: Source,
    *,
    image_size: int | None,
    dtype: torch.dtype | None,
    text: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    """Transformer, tokenizer and the pipeline's defaults from two official LlamaGen files.

    Args:
        text: whether the pipeline draws from captions (else from class labels).

    Raises:
        ValueError, OSError: as `load_pair`; a transformer of the other kind.
    """
    model, tokenizer = load_pair(transformer, vq_model, image_size=image_size, dtype=dtype)
    if (model.config["caption_dim"] is not None) != text:
        kind, other = ("class labels", "ClassImagePipeline") if text else ("captions", "ImagePipeline")
        path = transformer.path if isinstance(transformer, Checkpoint) else os.fspath(transformer)
        raise ValueError(f"{path} draws from {kind}; load it with {other}.from_official.")
    return model, tokenizer, official_defaults(model)


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
