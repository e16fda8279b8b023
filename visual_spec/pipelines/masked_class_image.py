"""Class to image by masked models: label -> tokens, many at a time -> picture."""

from collections.abc import Callable
from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.core.checkpoints import Source
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.masked.maskgit_checkpoint import load_maskgit_checkpoint
from visual_spec.models.next_token.llamagen_checkpoint import load_tokenizer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.labels import Labels, one_of
from visual_spec.pipelines.masked_image import default_sampler, given_parts
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.repaint import Pictures, check_repainting

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
        TypeError: a component that could not be saved.
        ValueError: tokenizer and transformer that do not fit, a transformer that draws from captions, or a number of
            names other than that of classes.

    Example:
        >>> pipe = MaskedClassImagePipeline.from_official("ImageNet_256_base.pth", "vq_ds16_c2i.pt")
        >>> pipe([207, 360], generator=torch.Generator().manual_seed(0)).images[0].save("retriever.png")
    """

    model_cpu_offload_seq = "transformer->vq_model"
    _optional_components = []

    def __init__(
        self,
        transformer: MaskedImageTransformer,
        vq_model: VQModel,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 1.7,
        default_top_k: int = 0,
    ):
        VisualPipeline.__init__(self)
        self.register_modules(transformer=transformer, vq_model=vq_model, sampler=sampler)
        self.register_to_config(id2label=None if id2label is None else list(id2label))
        self._finish_init(default_guidance_scale=default_guidance_scale, default_top_k=default_top_k)
        self.check_names("MaskedImagePipeline")

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

        The guidance is that of the published FID of each size (`PUBLISHED_GUIDANCE`); 1.7 for sizes without one.

        Args:
            transformer: e.g. `ImageNet_256_base.pth` or `ImageNet_384_large.pth`, or what `read_checkpoint` made of it.
            vq_model: LlamaGen's `vq_ds16_c2i.pt`.
            image_size: side of the pictures in pixels; None: what the file says. Another one is refused.
            dtype: of all weights; None keeps that of each file.
            sampler: default: `PRESETS["halton"]`, 32 calls.
            id2label: see the class.
            num_heads: of a model of no official size.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is (`visual_spec.models.core.checkpoints`).
        """
        model = load_maskgit_checkpoint(transformer, num_heads=num_heads, dtype=dtype)
        tokenizer = load_tokenizer(vq_model, dtype=dtype)
        side = model.grid.width * tokenizer.patch_size
        if image_size not in (None, side):
            raise ValueError(f"image_size={image_size}, but these weights draw {side} pixels; leave it out.")
        tokenizer.register_to_config(image_size=side)
        scale = PUBLISHED_GUIDANCE.get((model.grid.width, model.config["dim"]), 1.7)
        return cls(model, tokenizer, sampler or default_sampler(), id2label, default_guidance_scale=scale)

    @torch.no_grad()
    def __call__(
        self,
        labels: Labels | None = None,
        *,
        class_labels: Labels | None = None,
        image: Pictures | None = None,
        mask: Pictures | None = None,
        strength: float | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        num_images_per_label: int | None = None,
        num_images_per_prompt: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict], Any] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> ImagePipelineOutput:
        """Draw. Labels are those of `ClassImagePipeline.__call__`, all else is as in `MaskedImagePipeline.__call__`."""
        asked: Labels = one_of(labels=labels, class_labels=class_labels)
        if num_images_per_label is None and num_images_per_prompt is None:
            num_images_per_label = 1
        each = one_of(num_images_per_label=num_images_per_label, num_images_per_prompt=num_images_per_prompt)
        law = self.make_law(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
        self.check_inputs(
            asked,
            height=height,
            width=width,
            num_images_per_label=each,
            generator=generator,
            output_type=output_type,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
        )
        count = len(self.label_ids(asked))
        check_repainting(self.image_size, image, mask, strength, count)
        condition = self.encode_prompt(asked, num_images_per_prompt=each)
        given = given_parts(self, image, mask, strength, count=count, each=each, generator=generator)
        return self._draw(
            condition,
            len(condition),
            law=law,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback=callback_on_step_end,
            callback_tensors=callback_on_step_end_tensor_inputs,
            **given,
        )
