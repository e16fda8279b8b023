"""Class to image by next-token models: label -> tokens -> picture."""

from typing import Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.core.checkpoints import Source
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.drafters.mulo import MultiscaleDrafter
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.pipelines.inputs import check_generator
from visual_spec.pipelines.labels import DrawsClasses, Labels, one_of
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.steps import StepCallback
from visual_spec.pipelines.token_image import TokenImagePipeline, load_official, own_sampler


class ClassImagePipeline(DrawsClasses, TokenImagePipeline):
    """Draws pictures of classes, such as the 1000 of ImageNet.

    Args:
        transformer: a class-conditional next-token model over the image tokens.
        vq_model: turns tokens into pictures; its codebook is the transformer's vocabulary.
        sampler: how tokens are decoded; swap it freely (`pipe.sampler = ...`).
        id2label: the name of every class, in order, several names of one class separated by commas; with it, labels
            may be given by name.
        drafter: what proposes tokens to samplers that ask for one; set it freely (`pipe.drafter = ...`).
        default_guidance_scale, default_top_k: those of `__call__` where it is given none; saved with the pipeline.

    Raises:
        TypeError: a component that could not be saved.
        ValueError: tokenizer and transformer that do not fit, a transformer that draws from captions, or a number of
            names other than that of classes.

    Example:
        >>> pipe = ClassImagePipeline.from_official("c2i_XL_384.pt", "vq_ds16_c2i.pt")
        >>> pipe([207, 360], generator=torch.Generator().manual_seed(0)).images[0].save("retriever.png")
    """

    model_cpu_offload_seq = "drafter->transformer->vq_model"
    _optional_components = ["drafter"]

    # `from_pipe` hands a model on only if it is of exactly one of the annotated classes.
    def __init__(
        self,
        transformer: LlamaGenTransformer,
        vq_model: VQModel,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 2.0,
        default_top_k: int = 0,
        drafter: EagleDrafter | LlamaGenTransformer | MultiscaleDrafter | None = None,
    ):
        super().__init__()
        self.register_modules(transformer=transformer, vq_model=vq_model, sampler=sampler, drafter=drafter)
        self.register_to_config(id2label=None if id2label is None else list(id2label))
        self._finish_init(default_guidance_scale=default_guidance_scale, default_top_k=default_top_k)
        self.check_names("ImagePipeline")

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
        """A pipeline around official class-conditional LlamaGen files, with the guidance of their published FID.

        Args:
            transformer: an official file (or what `read_checkpoint` made of it), e.g. `c2i_XL_384.pt`.
            vq_model: e.g. `vq_ds16_c2i.pt`.
            image_size: side of the pictures in pixels; None: what the file or its name says.
            dtype: of all weights; None keeps that of each file.
            sampler: default `SpeculativeJacobiSampler()`: the tokens of plain sampling, in fewer calls; for a NAR file
                `OrderedSampler()`, for a RandAR file `SpeculativeAnyOrderSampler()`.
            id2label: see the class.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is (`visual_spec.models.core.checkpoints`).
        """
        model, tokenizer, defaults = load_official(
            transformer, vq_model, image_size=image_size, dtype=dtype, text=False
        )
        return cls(model, tokenizer, sampler or own_sampler(model), id2label, **defaults)

    def check_inputs(
        self,
        labels: Labels,
        *,
        height: int | None = None,
        width: int | None = None,
        num_images_per_label: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> None:
        """Refuse what cannot be drawn, before any computation. Arguments as in `__call__`.

        Raises:
            ValueError, TypeError: names what was given, what is allowed, and what to do.
        """
        self._check_drawing(
            height=height,
            width=width,
            pictures_each=num_images_per_label,
            pictures_each_name="num_images_per_label",
            output_type=output_type,
            callback=callback_on_step_end,
            callback_tensors=callback_on_step_end_tensor_inputs,
        )
        check_generator(generator, len(self.label_ids(labels)) * num_images_per_label)

    def encode_prompt(self, labels: Labels, *, num_images_per_prompt: int = 1) -> torch.Tensor:
        """The condition of labels: class numbers, long [labels * num_images_per_prompt], on the pipeline's device."""
        ids = torch.tensor(self.label_ids(labels), device=self._execution_device)
        return ids.repeat_interleave(num_images_per_prompt)

    @torch.no_grad()
    def __call__(
        self,
        labels: Labels | None = None,
        *,
        class_labels: Labels | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_until: int | None = None,
        num_images_per_label: int | None = None,
        num_images_per_prompt: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> ImagePipelineOutput:
        """Draw.

        Args:
            labels, class_labels: a class number, its name where the pipeline has `id2label`, or a list of them. Two
                names of one argument.
            num_images_per_label, num_images_per_prompt: pictures of each class; those of one class follow each other.
                Two names of one argument; default 1.

        All other arguments, and the errors, are those of `ImagePipeline.__call__`.
        """
        asked: Labels = one_of(labels=labels, class_labels=class_labels)
        if num_images_per_label is None and num_images_per_prompt is None:
            num_images_per_label = 1
        each = one_of(num_images_per_label=num_images_per_label, num_images_per_prompt=num_images_per_prompt)
        law = self.make_law(
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            guidance_until=guidance_until,
        )
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
        condition = self.encode_prompt(asked, num_images_per_prompt=each)
        return self._draw(
            condition,
            len(condition),
            law=law,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback=callback_on_step_end,
            callback_tensors=callback_on_step_end_tensor_inputs,
        )
