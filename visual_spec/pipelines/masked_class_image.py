"""Class to image by masked models: label -> tokens, many at a time -> picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.components import registers

if TYPE_CHECKING:
    from visual_spec.models.core.checkpoints import Source
    from visual_spec.models.masked.maskgit import MaskedImageTransformer
    from visual_spec.models.next_token.llamagen_vq import VQModel

# Guidance scale of each official size's published FID: 1 + w of their table, by tokens a side and width of the model.
PUBLISHED_GUIDANCE = {
    (16, 384): 2.5,  # tiny
    (16, 512): 2.0,  # small
    (16, 768): 1.7,  # base
    (24, 512): 2.0,
    (24, 768): 1.7,
    (24, 1024): 1.5,  # large
}


class MaskedClassImagePipeline(ClassImagePipeline):
    """Draws pictures of classes by a masked model, whole or into a picture that is given.

    Args:
        transformer: a class-conditional masked model over the image tokens.
        vq_model: turns tokens into pictures and back; its codebook is the transformer's vocabulary.
        sampler: a `MaskedSampler`, or a `SpeculativeMaskedSampler` for the law of one token a call.
        id2label, default_guidance_scale, default_top_k: as for `ClassImagePipeline`.

    Raises:
        ValueError: tokenizer and transformer that do not fit, a transformer that draws from captions, or a number of
            names that is not the number of classes.

    Example:
        >>> pipe = MaskedClassImagePipeline.from_official("ImageNet_256_base.pth", "vq_ds16_c2i.pt")
        >>> pipe([207, 360], generator=torch.Generator().manual_seed(0)).images[0].save("retriever.png")
    """

    model_cpu_offload_seq = "transformer->vq_model"
    _optional_components = []

    _of_texts = "MaskedImagePipeline"

    @registers
    def __init__(
        self,
        transformer: MaskedImageTransformer,
        vq_model: VQModel,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 1.7,
        default_top_k: int = 0,
    ): ...

    @classmethod
    def from_official(
        cls,
        transformer: Source,
        vq_model: Source,
        *,
        image_size: int | None = None,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
        id2label: list[str] | None = None,
        num_heads: int | None = None,
    ) -> Self:
        """A pipeline around official files of the Halton sampler's authors.

        The guidance gave the published FID of each size (`PUBLISHED_GUIDANCE`); 1.7 for sizes without one.

        Args:
            transformer: e.g. `ImageNet_256_base.pth` or `ImageNet_384_large.pth`, or what `read_checkpoint` made of it.
            vq_model: LlamaGen's `vq_ds16_c2i.pt`.
            image_size: side of the pictures in pixels; None: what the file says. Another one is refused.
            dtype: of all weights; None keeps each file's own.
            sampler: default: `PRESETS["halton"]`, 32 calls.
            id2label: see the class.
            num_heads: of a model of no official size.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is (`visual_spec.models.core.checkpoints`).
        """
        from visual_spec.models.masked.maskgit_checkpoint import load_maskgit_checkpoint
        from visual_spec.models.next_token.llamagen_checkpoint import load_tokenizer
        from visual_spec.samplers.masked.presets import PRESETS

        model = load_maskgit_checkpoint(transformer, num_heads=num_heads, dtype=dtype)
        tokenizer = load_tokenizer(vq_model, dtype=dtype)
        side = model.grid.width * tokenizer.patch_size
        if image_size not in (None, side):
            raise ValueError(f"image_size={image_size}, but these weights draw {side} pixels; leave it out.")
        tokenizer.register_to_config(image_size=side)
        scale = PUBLISHED_GUIDANCE.get((model.grid.width, model.config["dim"]), 1.7)
        sampler = sampler or PRESETS["halton"].sampler()
        return cls(model, tokenizer, sampler, id2label, default_guidance_scale=scale)
