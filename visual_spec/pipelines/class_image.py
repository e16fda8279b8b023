"""Class to image by next-token models: label -> tokens -> picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.pipelines.components import registers
from visual_spec.pipelines.labels import DrawsClasses, Labels, one_of
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.steps import StepCallback, StepListener
from visual_spec.pipelines.token_image import TokenImagePipeline

if TYPE_CHECKING:
    from visual_spec.models.core.checkpoints import Source
    from visual_spec.models.next_token.arpg import ARPGTransformer
    from visual_spec.models.next_token.llamagen import LlamaGenTransformer
    from visual_spec.models.next_token.llamagen_vq import VQModel
    from visual_spec.models.next_token.lpd import LPDTransformer
    from visual_spec.pipelines.repaint import Pictures


class ClassImagePipeline(DrawsClasses, TokenImagePipeline):
    """Draws pictures of classes, such as the 1000 of ImageNet.

    Args:
        transformer: a class-conditional next-token model over the image tokens.
        vq_model: turns tokens into pictures; its codebook is the transformer's vocabulary.
        sampler: how tokens are decoded; swap it freely (`pipe.sampler = ...`).
        id2label: the name of every class, in order, several names of one class separated by commas; with it, labels
            may be given by name.
        drafter: what proposes tokens to samplers that ask for one; set it freely (`pipe.drafter = ...`).
        default_guidance_scale, default_top_k: what `__call__` takes where none is passed; saved with the pipeline.

    Raises:
        ValueError: tokenizer and transformer that do not fit, a transformer that draws from captions, or a number of
            names that is not the number of classes.

    Example:
        >>> pipe = ClassImagePipeline.from_official("c2i_XL_384.pt", "vq_ds16_c2i.pt")
        >>> pipe([207, 360], generator=torch.Generator().manual_seed(0)).images[0].save("retriever.png")
    """

    model_cpu_offload_seq = "drafter->transformer->vq_model"
    _optional_components = ["drafter"]

    _of_texts = "ImagePipeline"

    @registers
    def __init__(
        self,
        transformer: LlamaGenTransformer | ARPGTransformer | LPDTransformer,
        vq_model: VQModel,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 2.0,
        default_top_k: int = 0,
        drafter: ModelMixin | None = None,
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
    ) -> Self:
        """A pipeline around official class-conditional files of LlamaGen or a family that shares its tokenizer.

        The guidance is that of their published FID.

        Args:
            transformer: an official file (or what `read_checkpoint` made of it), e.g. `c2i_XL_384.pt`.
            vq_model: e.g. `vq_ds16_c2i.pt`.
            image_size: side of the pictures in pixels; None: what the file or its name says.
            dtype: of all weights; None keeps each file's own.
            sampler: default `SpeculativeJacobiSampler()`: the tokens of plain sampling, in fewer calls; for a NAR file
                `OrderedSampler()`, for a RandAR file `SpeculativeAnyOrderSampler()`, for an ARPG or LPD file
                `AnyOrderSampler` with the order, calls and ramp of the public code.
            id2label: see the class.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is (`visual_spec.models.core.checkpoints`).
        """
        from visual_spec.pipelines.families.llamagen import load_official, own_sampler

        model, tokenizer, defaults = load_official(
            transformer, vq_model, image_size=image_size, dtype=dtype, text=False
        )
        return cls(model, tokenizer, sampler or own_sampler(model), id2label, **defaults)

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
        num_images_per_label: int | None = None,
        num_images_per_prompt: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_until: int | None = None,
        output_logprobs: bool = False,
    ) -> ImagePipelineOutput:
        """Draw.

        Args:
            labels, class_labels: a class number, its name where the pipeline has `id2label`, or a list of them. Two
                names of one argument.
            num_images_per_label, num_images_per_prompt: pictures of each class, one class after the other.
                Two names of one argument; default 1.

        All other arguments, and the errors, as in `ImagePipeline.__call__`.
        """
        law = self.make_law(guidance_scale, temperature, top_k, top_p, guidance_until)
        ids = self.label_ids(one_of(labels=labels, class_labels=class_labels))
        each = one_of(
            1, num_images_per_label=num_images_per_label, num_images_per_prompt=num_images_per_prompt
        )
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs(ids, each, law, generator, output_type)
        self.check_repainting(image, mask, strength, len(ids))
        self.check_logprobs(output_logprobs)
        model = self.sized(height, width)
        with self.running():
            condition = torch.tensor(ids, device=self._execution_device).repeat_interleave(each)
            known = self.known_tokens(image, mask, strength, generator, len(ids), each)
            result = self.draw_tokens(
                model, condition, len(condition), law, generator, listener, known, output_logprobs
            )
            images = self.decode_tokens(result.tokens, output_type, (model.grid.height, model.grid.width))
        return self.make_output(images, result, return_dict)
