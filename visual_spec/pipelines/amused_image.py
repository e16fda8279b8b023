"""Text to image by aMUSEd (Patil et al. 2024), from the folders that diffusers' pipeline of that name reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from transformers import AutoTokenizer, CLIPTextModelWithProjection, PreTrainedTokenizerBase

from visual_spec.models.core.offload import at_hand
from visual_spec.models.masked.amused import AmusedTransformer, AmusedVQModel, ClipCondition, clip_condition
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.decoders import AmusedDecoder
from visual_spec.pipelines.embedded import local_folder
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.repaint import Pictures
from visual_spec.pipelines.saved_index import read_index_file
from visual_spec.pipelines.steps import StepCallback, StepListener, listed
from visual_spec.pipelines.token_image import TokenImagePipeline
from visual_spec.samplers.masked.presets import PRESETS

DIFFUSERS_CLASS = "AmusedPipeline"


class AmusedImagePipeline(TokenImagePipeline):
    """Draws pictures from prompts by aMUSEd, whole or into a picture that is given.

    `from_pretrained` also takes a folder or Hub id of diffusers' `AmusedPipeline`, such as "amused/amused-256".

    Args:
        transformer, vq_model: the U-ViT and its tokenizer.
        text_encoder, tokenizer: CLIP with its projection.
        sampler: a `MaskedSampler`, or a `SpeculativeMaskedSampler` for the law of one token a call.
        default_guidance_scale, default_top_k: what `__call__` takes where none is passed; saved with the pipeline.

    Raises:
        ValueError: tokenizer and transformer that do not fit.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vq_model"
    _decoder = AmusedDecoder

    text_encoder: Any
    tokenizer: Any

    @registers
    def __init__(
        self,
        transformer: AmusedTransformer,
        vq_model: AmusedVQModel,
        text_encoder: CLIPTextModelWithProjection,
        tokenizer: PreTrainedTokenizerBase,
        sampler: SchedulerMixin,
        default_guidance_scale: float = 10.0,
        default_top_k: int = 0,
    ): ...

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load a folder or a Hub id: ours, or one of diffusers' `AmusedPipeline`.

        Args:
            kwargs: as for diffusers; of the latter `dtype` and `variant`.

        Raises:
            ValueError: as `VisualPipeline.from_pretrained`.
        """
        name = pretrained_model_name_or_path
        folder = local_folder(name) or Path(cls.download(name, **kwargs))
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
            PRESETS["amused"].sampler(),
        )

    def _count(self, prompt: object, negative_prompt: object, features: Mapping[str, Any]) -> int:
        """The number of prompts of a call, which are checked."""
        if not isinstance(negative_prompt, str | None):
            raise TypeError(f"negative_prompt={negative_prompt!r}; pass one text, which all pictures avoid.")
        if prompt is None and all(isinstance(part, torch.Tensor) for part in features.values()):
            return len(features["prompt_embeds"])
        prompts = listed(prompt)
        if not prompts or not all(isinstance(one, str) for one in prompts):
            raise TypeError(
                f"prompt={prompt!r}; pass a text, a list of texts, or all of {', '.join(features)}."
            )
        if any(part is not None for part in features.values()):
            raise ValueError(f"prompt={prompt!r} given beside {', '.join(features)}; pass one or the others.")
        self.check_complete("text_encoder", "tokenizer")
        return len(prompts)

    def make_condition(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_encoder_hidden_states: torch.Tensor | None = None,
    ) -> ClipCondition:
        """What CLIP says of the prompts, each repeated for its pictures. A text that is longer than it reads is cut."""
        if prompt is None:
            encoded = ClipCondition(
                prompt_embeds,  # pyright: ignore[reportArgumentType]
                encoder_hidden_states,  # pyright: ignore[reportArgumentType]
                negative_prompt_embeds,  # pyright: ignore[reportArgumentType]
                negative_encoder_hidden_states,  # pyright: ignore[reportArgumentType]
            )
        else:
            prompts = listed(prompt)
            with at_hand(self.text_encoder):
                encoded = clip_condition(self.text_encoder, self.tokenizer, prompts, negative_prompt or "")
        reader = self.text_encoder if self.transformer is None else self.transformer
        given = (self._execution_device, reader.dtype)
        moved = ClipCondition(
            pooled=encoded.pooled.to(*given).repeat_interleave(num_images_per_prompt, 0),
            states=encoded.states.to(*given).repeat_interleave(num_images_per_prompt, 0),
            null_pooled=encoded.null_pooled.to(*given),
            null_states=encoded.null_states.to(*given),
        )
        return moved if self.vq_model is None else replace(moved, pixels_per_token=self.vq_model.patch_size)

    def encode_prompt(self, prompt: str | list[str], **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Features that a call takes in place of prompts; arguments as of `make_condition`.

        Returns:
            prompt_embeds [pictures, C], encoder_hidden_states [pictures, T, D], and both of the negative prompt, in one
            row: negative_prompt_embeds and negative_encoder_hidden_states.
        """
        encoded = self.make_condition(prompt, **kwargs)
        prompt_embeds, encoder_hidden_states = encoded.pooled, encoded.states
        negative_prompt_embeds, negative_encoder_hidden_states = encoded.null_pooled, encoded.null_states
        return prompt_embeds, encoder_hidden_states, negative_prompt_embeds, negative_encoder_hidden_states

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | None = None,
        image: Pictures | None = None,
        mask: Pictures | None = None,
        strength: float | None = None,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_encoder_hidden_states: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        output_logprobs: bool = False,
    ) -> ImagePipelineOutput:
        """Draw. All but these is as in `MaskedImagePipeline.__call__`.

        Args:
            negative_prompt: what guidance leads away from, one text for all pictures; None: the empty text.
            prompt_embeds, encoder_hidden_states, negative_prompt_embeds, negative_encoder_hidden_states: in place of
                both texts, as `encode_prompt` gives them.
        """
        law = self.make_law(guidance_scale, temperature, top_k, top_p)
        features = dict(
            prompt_embeds=prompt_embeds,
            encoder_hidden_states=encoder_hidden_states,
            negative_prompt_embeds=negative_prompt_embeds,
            negative_encoder_hidden_states=negative_encoder_hidden_states,
        )
        prompts = self._count(prompt, negative_prompt, features)
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs(range(prompts), num_images_per_prompt, law, generator, output_type)
        self.check_repainting(image, mask, strength, prompts)
        self.check_logprobs(output_logprobs)
        model = self.sized(height, width)
        with self.running():
            condition = self.make_condition(
                prompt,
                negative_prompt=negative_prompt,
                num_images_per_prompt=num_images_per_prompt,
                **features,
            )
            known = self.known_tokens(image, mask, strength, generator, prompts, num_images_per_prompt)
            count = prompts * num_images_per_prompt
            result = self.draw_tokens(
                model, condition, count, law, generator, listener, known, output_logprobs
            )
            images = self.decode_tokens(result.tokens, output_type)
        return self.make_output(images, result, return_dict)
