"""Pictures of nothing in particular by MAGE (Li et al., CVPR 2023), which draws without a condition."""

from __future__ import annotations

from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.core.checkpoints import Checkpoint, Source, read_checkpoint
from visual_spec.models.masked.mage import MageTransformer, load_mage_checkpoint
from visual_spec.models.masked.mage_vq import MageVQModel, load_mage_tokenizer
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.labels import one_of
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.repaint import Pictures
from visual_spec.pipelines.steps import StepCallback, StepListener
from visual_spec.pipelines.token_image import TokenImagePipeline
from visual_spec.samplers.masked.presets import PRESETS


class MageImagePipeline(TokenImagePipeline):
    """Draws pictures by MAGE, whole or into a picture that is given.

    Args:
        transformer, vq_model: MAGE and its tokenizer.
        sampler: a `MaskedSampler`, or a `SpeculativeMaskedSampler` for the law of one token a call.
        default_top_k: what `__call__` takes where none is passed; saved with the pipeline.

    Raises:
        ValueError: tokenizer and transformer that do not fit.

    Example:
        >>> pipe = MageImagePipeline.from_official("mage-vitb-1600.pth")
        >>> pipe(num_images=4, generator=torch.Generator().manual_seed(0)).images[0].save("picture.png")
    """

    model_cpu_offload_seq = "transformer->vq_model"
    _each = "num_images"

    @registers
    def __init__(
        self,
        transformer: MageTransformer,
        vq_model: MageVQModel,
        sampler: SchedulerMixin,
        default_top_k: int = 0,
        default_guidance_scale: float = 1.0,
    ): ...

    @classmethod
    def from_official(
        cls,
        transformer: Source,
        vq_model: Source | None = None,
        *,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
        **options: Any,
    ) -> Self:
        """A pipeline around official files.

        Args:
            transformer: e.g. `mage-vitb-1600.pth`, which holds the tokenizer too.
            vq_model: a file of the tokenizer alone; None: it is read from `transformer`.
            dtype: of all weights; None keeps each file's own.
            sampler: default: `PRESETS["mage"]`, 20 calls.
            options: of `load_mage_checkpoint`, for models of no official size; `norm_groups` of the tokenizer.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is (`visual_spec.models.core.checkpoints`).
        """
        groups = {"norm_groups": options.pop("norm_groups")} if "norm_groups" in options else {}
        checkpoint = transformer if isinstance(transformer, Checkpoint) else read_checkpoint(transformer)
        model = load_mage_checkpoint(checkpoint, dtype=dtype, **options)
        tokenizer = load_mage_tokenizer(checkpoint if vq_model is None else vq_model, dtype=dtype, **groups)
        tokenizer.register_to_config(image_size=model.grid.width * tokenizer.patch_size)
        return cls(model, tokenizer, sampler or PRESETS["mage"].sampler())

    @torch.no_grad()
    def __call__(
        self,
        *,
        num_images: int | None = None,
        batch_size: int | None = None,
        image: Pictures | None = None,
        mask: Pictures | None = None,
        strength: float | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        output_logprobs: bool = False,
    ) -> ImagePipelineOutput:
        """Draw; all else is as in `MaskedImagePipeline.__call__`, but there is no guidance.

        Args:
            num_images, batch_size: how many pictures. Two names of one argument, ours and the one of diffusers'
                unconditional pipelines; default 1.

        Raises:
            ValueError, TypeError: names what was given, what is allowed, and what to do.
        """
        law = self.make_law(temperature=temperature, top_k=top_k, top_p=top_p)
        count = one_of(1, num_images=num_images, batch_size=batch_size)
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs([None], count, law, generator, output_type)
        self.check_repainting(image, mask, strength, 1)
        self.check_logprobs(output_logprobs)
        model = self.sized(height, width)
        with self.running():
            known = self.known_tokens(image, mask, strength, generator, 1, count)
            result = self.draw_tokens(model, None, count, law, generator, listener, known, output_logprobs)
            images = self.decode_tokens(result.tokens, output_type)
        return self.make_output(images, result, return_dict)
