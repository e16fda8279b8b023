"""Text to image by next-token models: caption -> features -> tokens -> picture."""

import math
import os
from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.files.pictures import unit_pixels
from visual_spec.models.core.checkpoints import Checkpoint, Source, read_checkpoint
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.drafters.mulo import MultiscaleDrafter
from visual_spec.models.next_token.controlar import (
    ControlARTransformer,
    ControlledCondition,
    is_controlar,
    load_controlar_checkpoint,
)
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_checkpoint import load_tokenizer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.models.text.t5_features import T5Features
from visual_spec.pipelines.inputs import check_generator, check_own_words
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.repaint import Pictures, listed
from visual_spec.pipelines.steps import StepCallback
from visual_spec.pipelines.texts import Texts, warn_unknown
from visual_spec.pipelines.token_image import TokenImagePipeline, load_official, own_sampler


class ImagePipeline(TokenImagePipeline):
    """Draws pictures from prompts.

    Args:
        transformer: a next-token model over the image tokens (`visual_spec.models.core.protocol.NextTokenModel`). None
            here, for the tokenizer or for the sampler: the pipeline only encodes prompts (`encode_prompt`). A
            `ControlARTransformer` draws along a control picture.
        vq_model: turns tokens into pictures; its codebook is the transformer's vocabulary.
        text_encoder: turns prompts into the features that the transformer reads. None: pass `prompt_embeds`.
        sampler: how tokens are decoded, e.g. `SpeculativeJacobiSampler`; swap it freely (`pipe.sampler = ...`).
        drafter: what proposes tokens to samplers that ask for one (`DraftedSampler`, `TreeSampler`,
            `MultiscaleSampler`); set it freely (`pipe.drafter = ...`).
        default_guidance_scale, default_top_k, default_temperature, default_top_p: used where a call names none; saved
            with the pipeline.

    Raises:
        TypeError: a component that could not be saved.
        ValueError: tokenizer and transformer that do not fit.

    Example:
        >>> pipe = ImagePipeline.from_pretrained("shapes")
        >>> pipe("a large red circle on a plain sky background").images[0].save("circle.png")
    """

    model_cpu_offload_seq = "text_encoder->drafter->transformer->vq_model"
    _optional_components = ["text_encoder", "drafter"]

    text_encoder: Any

    # `from_pipe` hands a model on only if it is of exactly one of the annotated classes.
    def __init__(
        self,
        transformer: LlamaGenTransformer | ControlARTransformer | None,
        vq_model: VQModel | None,
        text_encoder: CaptionEncoder | T5Features | None,
        sampler: SchedulerMixin | None,
        default_guidance_scale: float = 3.0,
        default_top_k: int = 0,
        drafter: EagleDrafter | LlamaGenTransformer | MultiscaleDrafter | None = None,
        default_temperature: float = 1.0,
        default_top_p: float = 1.0,
    ):
        super().__init__()
        self.register_modules(
            transformer=transformer,
            vq_model=vq_model,
            text_encoder=text_encoder,
            sampler=sampler,
            drafter=drafter,
        )
        self._finish_init(
            default_guidance_scale=default_guidance_scale,
            default_temperature=default_temperature,
            default_top_k=default_top_k,
            default_top_p=default_top_p,
        )
        if self.transformer is not None and self.transformer.config.get("num_classes") is not None:
            raise ValueError("the transformer draws from class labels; use ClassImagePipeline.")

    @classmethod
    def from_official(
        cls,
        transformer: Source,
        vq_model: Source,
        text_encoder: str | os.PathLike | T5Features | None = None,
        *,
        image_size: int | None = None,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
        feature_cache: str | os.PathLike | None = None,
    ) -> Self:
        """A pipeline around official text-conditional LlamaGen files, with their guidance 7.5 and top-k 1000.

        ControlAR has guidance 4 and top-k 2000, as in its sampling programs.

        Args:
            transformer: an official file (or what `read_checkpoint` made of it), e.g. `t2i_XL_stage2_512.pt`, or a
                ControlAR, e.g. `canny_MR.safetensors`.
            vq_model: e.g. `vq_ds16_t2i.pt`.
            text_encoder: folder or Hub id of flan-t5-xl, or loaded `T5Features`. None: pass `prompt_embeds` to draw.
            image_size: side of the pictures in pixels, where a call names no other; None: what the file or its name
                says. A ControlAR draws pictures of the size of their control.
            dtype: of all weights; None keeps that of each file (float32 for the text encoder).
            sampler: default `SpeculativeJacobiSampler()`: the tokens of plain sampling, in fewer calls; for a NAR file
                `OrderedSampler()`.
            feature_cache: folder that keeps the features of every caption, see `T5Features`.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is (`visual_spec.models.core.checkpoints`).
        """
        checkpoint = transformer if isinstance(transformer, Checkpoint) else read_checkpoint(transformer)
        if is_controlar(checkpoint.weights):
            model: Any = load_controlar_checkpoint(checkpoint, image_size=image_size, dtype=dtype)
            tokenizer = load_tokenizer(vq_model, image_size=model.control_size[0], dtype=dtype)
            defaults = {"default_guidance_scale": 4.0, "default_top_k": 2000}
        else:
            model, tokenizer, defaults = load_official(
                checkpoint, vq_model, image_size=image_size, dtype=dtype, text=True
            )
        if isinstance(text_encoder, (str, os.PathLike)):
            text_encoder = T5Features.from_pretrained(
                text_encoder,
                torch_dtype=dtype,
                max_words=model.prefix_length,
                cache_folder=feature_cache,
            )
        return cls(model, tokenizer, text_encoder, sampler or own_sampler(model), **defaults)

    def check_inputs(
        self,
        prompt: str | list[str] | None,
        *,
        control: Pictures | None = None,
        control_strength: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        **texts: Any,
    ) -> None:
        """Refuse what cannot be drawn, before any computation. Arguments as in `__call__`; `texts`: of `Texts`.

        Raises:
            ValueError, TypeError: names what was given, what is allowed, and what to do.
        """
        told = Texts(prompt, **texts)
        height, width = self._check_control(control, control_strength, told.count, height, width)
        self._check_drawing(
            height=height,
            width=width,
            pictures_each=num_images_per_prompt,
            pictures_each_name="num_images_per_prompt",
            output_type=output_type,
            callback=callback_on_step_end,
            callback_tensors=callback_on_step_end_tensor_inputs,
        )
        check_own_words(self.text_encoder, told.prompts + told.negatives)
        check_generator(generator, told.count * num_images_per_prompt)

    def _check_control(
        self, control: Pictures | None, strength: float, count: int, height: int | None, width: int | None
    ) -> tuple[int | None, int | None]:
        """Refuse control pictures that do not fit, or for a model that reads none. Arguments as in `__call__`.

        Returns:
            Height and width of the pictures that are drawn: of the control, where there is one.
        """
        if not isinstance(self.transformer, ControlARTransformer):
            if control is not None or strength != 1.0:
                raise ValueError(
                    "control or control_strength given, but this model reads no control picture; leave them out, or "
                    "load a ControlAR."
                )
            return height, width
        if control is None:
            raise ValueError("this model draws along a control picture; pass control.")
        if not math.isfinite(strength):
            raise ValueError(f"control_strength={strength}; pass a finite number, 1 for the trained one.")
        pictures = listed(control)
        if len(pictures) not in (1, count):
            raise ValueError(f"{len(pictures)} control pictures for {count} prompts; pass 1 or {count}.")
        sizes = {tuple(unit_pixels(picture, "control").shape[-2:]) for picture in pictures}
        if len(sizes) > 1:
            raise ValueError(f"control pictures of several sizes, {sorted(sizes)}; resize them to one.")
        (own,) = sizes
        if height not in (None, own[0]) or width not in (None, own[1]):
            raise ValueError(
                f"control of {own[0]} x {own[1]} pixels for a picture of height={height}, width={width}; resize it, or "
                "leave height and width out."
            )
        return own[0], own[1]

    def _controlled(
        self, condition: TextCondition, control: Pictures, strength: float
    ) -> ControlledCondition:
        """The condition with the control pictures of its rows."""
        pictures = torch.stack([unit_pixels(picture, "control") for picture in listed(control)])
        rows = len(condition.features)
        each = rows if len(pictures) == 1 else rows // len(pictures)
        return ControlledCondition(
            condition.features,
            condition.mask,
            negative=condition.negative,
            control=(2 * pictures - 1).repeat_interleave(each, 0).to(condition.features.device),
            strength=strength,
        )

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        *,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
    ) -> TextCondition:
        """Features of the prompts, each repeated for its pictures.

        Words the text encoder was not trained on are named in a warning, and stand for nothing in the picture. So is
        the end of a prompt that is longer than the encoder reads.

        Returns:
            TextCondition with features [prompts * num_images_per_prompt, T, C] on the pipeline's device; `negative` of
            it, of as many rows, where there is a negative prompt.
        """
        reader = self.text_encoder if self.transformer is None else self.transformer

        def encode(prompts: list[str]) -> TextCondition:
            warn_unknown(self.text_encoder, prompts, "the picture will not show it")
            return self.text_encoder(prompts)

        texts = Texts(
            prompt,
            prompt_embeds,
            prompt_attention_mask,
            negative_prompt,
            negative_prompt_embeds,
            negative_prompt_attention_mask,
        )
        return texts.condition(encode, num_images_per_prompt, self._execution_device, reader.dtype)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | list[str] | None = None,
        control: Pictures | None = None,
        control_strength: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_until: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> ImagePipelineOutput:
        """Draw.

        Args:
            prompt: one prompt or a list.
            negative_prompt: what guidance leads away from, in place of no caption; one for all prompts, or one for
                each.
            control: for a ControlAR, the picture to draw along (edges, depth, ...), of the size of the picture; one
                for all prompts, or one for each: PIL, numpy [H, W, 3] (uint8, or floats in [0, 1]), or a tensor
                [3, H, W] in [0, 1].
            control_strength: how strongly; 0 is not at all, 1 as trained.
            height, width: pixels; the model draws one size only, and others are refused. A ControlAR draws pictures of
                the size of their control: any multiples of 16 with at most the tokens of its training.
            guidance_scale: `s` of `unconditional + s * (conditional - unconditional)`; above 1 each target call runs
                the unconditional rows too, at 1 or below none. None: the model's own, `default_guidance_scale`.
            temperature, top_k, top_p: the law of a token (`visual_spec.samplers.core.law.TokenLaw`). None: the model's
                own, such as `default_top_k`.
            guidance_until: tokens from this one on are drawn without guidance; LlamaGen's `cfg_interval` plus 2.
            num_images_per_prompt: pictures of each prompt; those of one prompt follow each other.
            generator: one `torch.Generator` for the batch, or a list of one per picture; of any device. With a list,
                a picture depends on its own generator only, not on the batch it is drawn in.
            prompt_embeds, prompt_attention_mask: features [prompts, T, C] and their mask [prompts, T] (true at words,
                left-padded), in place of `prompt`, as `encode_prompt` gives them.
            negative_prompt_embeds, negative_prompt_attention_mask: the same in place of `negative_prompt`.
            output_type: "pil", "np", "pt", or "latent" for the token grid [B, h, w].
            return_dict: False returns the tuple (images, tokens, trace).
            callback_on_step_end: called as (pipe, step, timestep, kwargs) after every target call: `step` is the
                index of the call (0: the prefill), `timestep` the number of tokens that the slowest picture has.
                It returns None, or `kwargs` as they are: tokens that are committed cannot be changed. After
                `pipe._interrupt = True` the call ends, and returns pictures of the tokens so far, with id 0 or a guess
                in place of the others (`trace.commit_call` is -1 there).
            callback_on_step_end_tensor_inputs: which tensors `kwargs` holds: "lengths", tokens committed [B].

        Raises:
            ValueError, TypeError: bad input, before any computation.
            FloatingPointError: the model gave non-finite logits; names the slot.
        """
        law = self.make_law(
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            guidance_until=guidance_until,
        )
        texts: dict[str, Any] = dict(
            prompt_embeds=prompt_embeds,
            prompt_attention_mask=prompt_attention_mask,
            negative_prompt=negative_prompt,
            negative_prompt_embeds=negative_prompt_embeds,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
        )
        Texts(prompt, **texts).check_guided(law.guided, law.guidance_scale)
        self.check_inputs(
            prompt,
            control=control,
            control_strength=control_strength,
            height=height,
            width=width,
            num_images_per_prompt=num_images_per_prompt,
            generator=generator,
            output_type=output_type,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            **texts,
        )
        condition = self.encode_prompt(prompt, num_images_per_prompt=num_images_per_prompt, **texts)
        if control is not None:
            condition = self._controlled(condition, control, control_strength)
            height, width = condition.control.shape[-2:]
        return self._draw(
            condition,
            condition.features.shape[0],
            law=law,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback=callback_on_step_end,
            callback_tensors=callback_on_step_end_tensor_inputs,
            model=self.sized(height, width),
        )
