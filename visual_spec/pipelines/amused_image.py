"""Text to image by aMUSEd (Patil et al. 2024), from the folders that diffusers' pipeline of that name reads."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from transformers import AutoTokenizer, CLIPTextModelWithProjection, PreTrainedTokenizerBase

from visual_spec.models.core.offload import at_hand
from visual_spec.models.masked.amused import (
    AmusedTransformer,
    AmusedVQModel,
    ClipCondition,
    clip_condition,
)
from visual_spec.pipelines.inputs import check_generator
from visual_spec.pipelines.masked_image import given_parts
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.repaint import Pictures, check_repainting
from visual_spec.pipelines.saved_index import read_index_file
from visual_spec.pipelines.steps import StepCallback
from visual_spec.pipelines.token_image import TokenImagePipeline
from visual_spec.samplers.core.masked_presets import PRESETS
from visual_spec.samplers.masked import MaskedSampler

DIFFUSERS_CLASS = "AmusedPipeline"


class AmusedImagePipeline(TokenImagePipeline):
    """Draws pictures from prompts by aMUSEd, whole or into a picture that is given.

    `from_pretrained` also takes a folder or Hub id of diffusers' `AmusedPipeline`, such as "amused/amused-256".

    Args:
        transformer, vq_model: the U-ViT and its tokenizer.
        text_encoder, tokenizer: CLIP with its projection.
        sampler: a `MaskedSampler`, or a `SpeculativeMaskedSampler` for the law of one token a call.
        default_guidance_scale, default_top_k: those of `__call__` where it is given none; saved with the pipeline.

    Raises:
        TypeError: a component that could not be saved.
        ValueError: tokenizer and transformer that do not fit.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vq_model"

    text_encoder: Any
    tokenizer: Any

    def __init__(
        self,
        transformer: AmusedTransformer,
        vq_model: AmusedVQModel,
        text_encoder: CLIPTextModelWithProjection,
        tokenizer: PreTrainedTokenizerBase,
        sampler: SchedulerMixin,
        default_guidance_scale: float = 10.0,
        default_top_k: int = 0,
    ):
        super().__init__()
        self.register_modules(
            transformer=transformer,
            vq_model=vq_model,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            sampler=sampler,
        )
        self._finish_init(default_guidance_scale=default_guidance_scale, default_top_k=default_top_k)

    def _check_fit(self) -> None:
        codes, own = self.transformer.vocab_size, self.vq_model.config["num_vq_embeddings"]
        if codes > own:
            raise ValueError(
                f"the transformer predicts {codes} codes, but the tokenizer has {own}; load both from the same model."
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load a folder or a Hub id: ours, or one of diffusers' `AmusedPipeline`.

        Args:
            kwargs: as for diffusers; of the latter `dtype` and `variant`.

        Raises:
            ValueError: as `VisualPipeline.from_pretrained`.
        """
        name = pretrained_model_name_or_path
        folder = Path(name if Path(name).is_dir() else cls.download(name, **kwargs))
        if read_index_file(folder)["_class_name"] != DIFFUSERS_CLASS:
            return super().from_pretrained(folder, **kwargs)
        new, old = kwargs.get("dtype"), kwargs.get("torch_dtype")
        dtype = (new or old) or torch.float32

        def load(kind: Any, part: str, named: str) -> Any:
            options = {named: dtype, "variant": kwargs.get("variant")}
            return kind.from_pretrained(folder, subfolder=part, **options).eval()

        return cls(
            load(AmusedTransformer, "transformer", "torch_dtype"),
            load(AmusedVQModel, "vqvae", "torch_dtype"),
            load(CLIPTextModelWithProjection, "text_encoder", "dtype"),
            AutoTokenizer.from_pretrained(folder, subfolder="tokenizer"),
            MaskedSampler(**PRESETS["amused"].settings),
        )

    @classmethod
    def _refuse_other_class(cls, name: str | os.PathLike) -> None:
        folder = Path(name)
        if (folder / "model_index.json").is_file() and read_index_file(folder)[
            "_class_name"
        ] == DIFFUSERS_CLASS:
            return
        super()._refuse_other_class(name)

    def check_inputs(
        self,
        prompt: str | list[str],
        *,
        negative_prompt: str = "",
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
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
            pictures_each=num_images_per_prompt,
            pictures_each_name="num_images_per_prompt",
            output_type=output_type,
            callback=callback_on_step_end,
            callback_tensors=callback_on_step_end_tensor_inputs,
        )
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, list) or not prompts or not all(isinstance(one, str) for one in prompts):
            raise TypeError(f"prompt={prompt!r}; pass a text or a list of texts.")
        if not isinstance(negative_prompt, str):
            raise TypeError(f"negative_prompt={negative_prompt!r}; pass one text, which all pictures avoid.")
        check_generator(generator, len(prompts) * num_images_per_prompt)

    def encode_prompt(
        self, prompt: str | list[str], *, negative_prompt: str = "", num_images_per_prompt: int = 1
    ) -> ClipCondition:
        """What CLIP says of the prompts, each repeated for its pictures. A text that is longer than it reads is cut."""
        prompts = [prompt] if isinstance(prompt, str) else prompt
        with at_hand(self.text_encoder):
            told = clip_condition(self.text_encoder, self.tokenizer, prompts, negative_prompt)
        pooled, states = (
            part.repeat_interleave(num_images_per_prompt, 0) for part in (told.pooled, told.states)
        )
        reader = self.text_encoder if self.transformer is None else self.transformer
        given: Any = (self._execution_device, reader.dtype)
        moved = ClipCondition(
            pooled=pooled.to(*given),
            states=states.to(*given),
            null_pooled=told.null_pooled.to(*given),
            null_states=told.null_states.to(*given),
        )
        return moved if self.vq_model is None else replace(moved, pixels_per_token=self.vq_model.patch_size)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        *,
        negative_prompt: str = "",
        image: Pictures | None = None,
        mask: Pictures | None = None,
        strength: float | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> ImagePipelineOutput:
        """Draw. Guidance leads away from `negative_prompt`; all else is as in `MaskedImagePipeline.__call__`."""
        law = self.make_law(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
        self.check_inputs(
            prompt,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            num_images_per_prompt=num_images_per_prompt,
            generator=generator,
            output_type=output_type,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
        )
        count, each = 1 if isinstance(prompt, str) else len(prompt), num_images_per_prompt
        check_repainting(self.image_size, image, mask, strength, count)
        condition = self.encode_prompt(prompt, negative_prompt=negative_prompt, num_images_per_prompt=each)
        given = given_parts(self, image, mask, strength, count=count, each=each, generator=generator)
        return self._draw(
            condition,
            count * each,
            law=law,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback=callback_on_step_end,
            callback_tensors=callback_on_step_end_tensor_inputs,
            **given,
        )
