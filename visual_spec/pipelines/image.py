"""Text to image by next-token models: caption -> features -> tokens -> picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.pipelines.components import registers
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.steps import StepCallback, StepListener
from visual_spec.pipelines.texts import ReadsText, Texts, as_condition
from visual_spec.pipelines.token_image import TokenImagePipeline

if TYPE_CHECKING:
    from visual_spec.models.core.checkpoints import Source
    from visual_spec.models.next_token.llamagen import LlamaGenTransformer
    from visual_spec.models.next_token.llamagen_vq import VQModel
    from visual_spec.models.text.caption_encoder import CaptionEncoder
    from visual_spec.models.text.t5_features import T5Features
    from visual_spec.pipelines.repaint import Pictures


class ImagePipeline(ReadsText, TokenImagePipeline):
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
        ValueError: tokenizer and transformer that do not fit.

    Example:
        >>> pipe = ImagePipeline.from_pretrained("shapes")
        >>> pipe("a large red circle on a plain sky background").images[0].save("circle.png")
    """

    model_cpu_offload_seq = "text_encoder->drafter->transformer->vq_model"
    _optional_components = ["text_encoder", "drafter"]

    # `from_pipe` hands a model on only if it is of one of the annotated classes, or of one derived from them.
    @registers
    def __init__(
        self,
        transformer: LlamaGenTransformer | None,
        vq_model: VQModel | None,
        text_encoder: CaptionEncoder | T5Features | None,
        sampler: SchedulerMixin | None,
        default_guidance_scale: float = 3.0,
        default_top_k: int = 0,
        drafter: ModelMixin | None = None,
        default_temperature: float = 1.0,
        default_top_p: float = 1.0,
    ): ...

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
            dtype: of all weights; None keeps each file's own (float32 for the text encoder).
            sampler: default `SpeculativeJacobiSampler()`: the tokens of plain sampling, in fewer calls; for a NAR file
                `OrderedSampler()`.
            feature_cache: folder that keeps the features of every caption, see `T5Features`.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is (`visual_spec.models.core.checkpoints`).
        """
        from visual_spec.pipelines.families import llamagen

        model, tokenizer, defaults = llamagen.load_official(
            transformer, vq_model, image_size=image_size, dtype=dtype, text=True
        )
        encoder = llamagen.load_t5(
            text_encoder, dtype=dtype, max_words=model.prefix_length, cache_folder=feature_cache
        )
        return cls(model, tokenizer, encoder, sampler or llamagen.own_sampler(model), **defaults)

    def _drawn_size(
        self, height: int | None, width: int | None, control: object, control_strength: float, count: int
    ) -> tuple[int | None, int | None]:
        """The size that a call asks for: with a ControlAR that of the control pictures, which are checked."""
        if hasattr(self.transformer, "control_size"):
            return self.transformer.check_control(control, control_strength, count, height, width)
        if control is not None or control_strength != 1.0:
            raise ValueError(
                "control or control_strength given, but this model reads no control picture; leave them out, or load a "
                "ControlAR."
            )
        return height, width

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | list[str] | None = None,
        control: Pictures | None = None,
        control_strength: float = 1.0,
        image: Pictures | None = None,
        mask: Pictures | None = None,
        strength: float | None = None,
        height: int | None = None,
        width: int | None = None,
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
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_until: int | None = None,
        output_logprobs: bool = False,
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
            image: for a masked or an any-order model, a picture to draw into, or one for each prompt: PIL, numpy
                [H, W, 3] or a tensor [3, H, W] in [0, 1], of the size that the model draws. Tokens that are not drawn
                anew stay, bit for bit; pixels beside them may change, as the tokenizer's decoder looks around.
            mask: white (1, True) where the picture is painted anew: inpainting. For outpainting, place the picture on a
                canvas, and mask the rest of it. PIL, numpy or a tensor [H, W]. A token is drawn anew if the mask
                touches its patch.
            strength: share of the tokens (of those under the mask) that are drawn anew, chosen at random: a variation
                of the picture. None: all of them.
            height, width: pixels; the model draws one size only, and others are refused. A ControlAR draws pictures of
                the size of their control: any multiples of 16 with at most the tokens of its training.
            guidance_scale: `s` of `unconditional + s * (conditional - unconditional)`; above 1 each target call runs
                the unconditional rows too, at 1 or below none. None: the model's own, `default_guidance_scale`.
            temperature, top_k, top_p: the law of a token (`visual_spec.samplers.core.law.TokenLaw`). None: the model's
                own, such as `default_top_k`.
            guidance_until: tokens from this one on are drawn without guidance; LlamaGen's `cfg_interval` plus 2.
            num_images_per_prompt: pictures of each prompt, one prompt after the other.
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
            output_logprobs: keep the log-probability of each token, `trace.logprobs` and `trace.model_logprobs` (see
                `DecodeTrace`). No call is added.
            callback_on_step_end_tensor_inputs: which tensors `kwargs` holds: "lengths", how many tokens are committed
                [B] (default), and "tokens" [B, L], with 0 where none is; `pipe.decode_tokens` makes pictures of them.

        Raises:
            ValueError, TypeError: bad input, before any computation.
            FloatingPointError: the model gave non-finite logits; names the slot.
        """
        law = self.make_law(guidance_scale, temperature, top_k, top_p, guidance_until)
        negative = negative_prompt, negative_prompt_embeds, negative_prompt_attention_mask
        texts = Texts(prompt, prompt_embeds, prompt_attention_mask, *negative)
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs(texts, num_images_per_prompt, law, generator, output_type)
        size = self._drawn_size(height, width, control, control_strength, len(texts))
        model = self.sized(*size) if control is None else self.sized(*size, "resize the control picture")
        self.check_repainting(image, mask, strength, len(texts), model)
        self.check_logprobs(output_logprobs)
        count = len(texts) * num_images_per_prompt
        with self.running():
            condition = as_condition(*self.encode_prompt(texts, num_images_per_prompt=num_images_per_prompt))
            if hasattr(self.transformer, "controlled"):
                condition = self.transformer.controlled(condition, control, control_strength)
            known = self.known_tokens(
                image, mask, strength, generator, len(texts), num_images_per_prompt, model
            )
            result = self.draw_tokens(
                model, condition, count, law, generator, listener, known, output_logprobs
            )
            images = self.decode_tokens(result.tokens, output_type, (model.grid.height, model.grid.width))
        return self.make_output(images, result, return_dict)
