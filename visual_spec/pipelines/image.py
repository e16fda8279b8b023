"""Text to image by next-token models: caption -> features -> tokens -> picture."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.schedulers.scheduling_utils import SchedulerMixin

# diffusers finds the class of a saved component only in modules that are imported already: every class that a saved
# pipeline may name is imported here, used below or not.
from visual_spec.models.caption_encoder import CaptionEncoder
from visual_spec.models.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.llamagen_vq import VQModel
from visual_spec.pipelines.base import DecodeProgress, VisualPipeline, wake
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.samplers import autoregressive, jacobi  # noqa: F401
from visual_spec.samplers.law import TokenLaw

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class ImagePipeline(VisualPipeline):
    """Draws pictures from prompts.

    Args:
        transformer: a next-token model over the image tokens (`visual_spec.models.protocol.NextTokenModel`).
        vq_model: turns tokens into pictures; its codebook is the transformer's vocabulary.
        text_encoder: turns prompts into the features that the transformer reads. None: pass `prompt_embeds`.
        sampler: how tokens are decoded, e.g. `SpeculativeJacobiSampler`; swap it freely (`pipe.sampler = ...`).

    Raises:
        TypeError: a component that could not be saved.
        ValueError: tokenizer and transformer that do not fit.

    Example:
        >>> pipe = ImagePipeline.from_pretrained("shapes")
        >>> pipe("a large red circle on a plain sky background").images[0].save("circle.png")
    """

    model_cpu_offload_seq = "text_encoder->transformer->vq_model"
    _optional_components = ["text_encoder"]
    _callback_tensor_inputs = ["lengths"]

    transformer: Any
    vq_model: Any
    text_encoder: Any

    # `from_pipe` hands a model on only if it is of exactly one of the annotated classes.
    def __init__(
        self,
        transformer: LlamaGenTransformer,
        vq_model: VQModel,
        text_encoder: CaptionEncoder | None,
        sampler: SchedulerMixin,
    ):
        super().__init__()
        self.register_modules(
            transformer=transformer, vq_model=vq_model, text_encoder=text_encoder, sampler=sampler
        )
        self.image_processor = VaeImageProcessor(do_resize=False)
        grid, side = self.transformer.grid, self.vq_model.tokens_per_side
        vocab_size, codes = self.transformer.vocab_size, self.vq_model.config["codebook_size"]
        if (vocab_size, grid.height, grid.width) != (codes, side, side):
            raise ValueError(
                f"the transformer predicts {grid.height} x {grid.width} tokens out of {vocab_size}, but the "
                f"tokenizer decodes {side} x {side} out of {codes}; load both from the same model."
            )

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the pictures in pixels."""
        grid, patch = self.transformer.grid, self.vq_model.patch_size
        return grid.height * patch, grid.width * patch

    def check_inputs(
        self,
        prompt: str | list[str] | None,
        *,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> None:
        """Refuse what cannot be drawn, before any computation. Arguments as in `__call__`.

        Raises:
            ValueError, TypeError: names what was given, what is allowed, and what to do.
        """
        self.check_sampler()
        if (prompt is None) == (prompt_embeds is None):
            given = "neither" if prompt is None else "both"
            raise ValueError(f"{given} of prompt and prompt_embeds given; pass exactly one of them.")
        size = self.image_size
        if height not in (None, size[0]) or width not in (None, size[1]):
            grid = self.transformer.grid
            raise ValueError(
                f"height={height}, width={width}, but this model draws {size[0]} x {size[1]} pixels "
                f"({grid.height} x {grid.width} tokens); leave height and width out."
            )
        if not isinstance(num_images_per_prompt, int) or num_images_per_prompt < 1:
            raise ValueError(
                f"num_images_per_prompt={num_images_per_prompt!r}; pass an integer of at least 1."
            )
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type={output_type!r}; pass one of {', '.join(OUTPUT_TYPES)}.")
        asked = callback_on_step_end_tensor_inputs or ()
        unknown = [name for name in asked if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs holds {unknown}; allowed are {self._callback_tensor_inputs}."
            )
        if prompt_embeds is None:
            count = self._check_prompt(prompt)
        else:
            count = self._check_embeds(prompt_embeds, prompt_attention_mask)
        _check_generator(generator, count * num_images_per_prompt)

    def _check_prompt(self, prompt: Any) -> int:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, (list, tuple)) or not all(isinstance(text, str) for text in prompts):
            raise TypeError(f"prompt={prompt!r}; pass a string or a list of strings.")
        if not prompts:
            raise ValueError("prompt is an empty list; pass at least one prompt.")
        if self.text_encoder is None:
            raise ValueError(
                "this pipeline was loaded without a text encoder; pass prompt_embeds, or set pipe.text_encoder."
            )
        self.text_encoder.word_ids(list(prompts))  # refuses prompts without a word, and over-long ones
        return len(prompts)

    def _check_embeds(self, embeds: torch.Tensor, mask: torch.Tensor | None) -> int:
        if embeds.ndim != 3:
            raise ValueError(
                f"prompt_embeds of shape {tuple(embeds.shape)}; pass [prompts, words, channels]."
            )
        if mask is not None and mask.shape != embeds.shape[:2]:
            raise ValueError(
                f"prompt_attention_mask of shape {tuple(mask.shape)} beside prompt_embeds of shape "
                f"{tuple(embeds.shape)}; pass a mask of shape {tuple(embeds.shape[:2])}."
            )
        return embeds.shape[0]

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        *,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
    ) -> TextCondition:
        """Features of the prompts, each repeated for its pictures.

        Words the text encoder was not trained on are named in a warning, and stand for nothing in the picture.

        Returns:
            TextCondition with features [prompts * num_images_per_prompt, T, C] on the pipeline's device.
        """
        device, dtype = self._execution_device, self.transformer.dtype
        if prompt_embeds is None:
            prompts = [prompt] if isinstance(prompt, str) else list(prompt or ())
            unknown = self.text_encoder.unknown_words(prompts)
            if unknown:
                warnings.warn(
                    f"the text encoder does not know {', '.join(map(repr, unknown))}; the picture will not show it.",
                    stacklevel=3,
                )
            condition = self.text_encoder(prompts)
            features, mask = condition.features, condition.mask
        else:
            features, mask = prompt_embeds, prompt_attention_mask
            if mask is None:
                mask = torch.ones(features.shape[:2], dtype=torch.bool)
        return TextCondition(
            features=features.to(device, dtype).repeat_interleave(num_images_per_prompt, 0),
            mask=mask.to(device, torch.bool).repeat_interleave(num_images_per_prompt, 0),
        )

    def decode_tokens(self, tokens: torch.Tensor, output_type: str = "pil") -> Any:
        """Pictures of tokens [B, h * w] in the form `output_type` asks for (see `ImagePipelineOutput`)."""
        if output_type == "latent":
            grid = self.transformer.grid
            return tokens.view(-1, grid.height, grid.width)
        wake(self.vq_model)
        return self.image_processor.postprocess(self.vq_model.decode_tokens(tokens), output_type=output_type)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float = 3.0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict], Any] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> ImagePipelineOutput:
        """Draw.

        Args:
            prompt: one prompt or a list.
            height, width: pixels; the model draws one size only, and others are refused.
            guidance_scale: `s` of `unconditional + s * (conditional - unconditional)`; above 1 each target call runs
                the unconditional rows too, at 1 or below none.
            temperature, top_k, top_p: the law of a token (`visual_spec.samplers.law.TokenLaw`).
            num_images_per_prompt: pictures of each prompt; those of one prompt follow each other.
            generator: one `torch.Generator` for the batch, or a list of one per picture; of any device. With a list,
                a picture depends on its own generator only, not on the batch it is drawn in.
            prompt_embeds, prompt_attention_mask: features [prompts, T, C] and their mask [prompts, T] (true at words,
                left-padded), in place of `prompt`, as `encode_prompt` gives them.
            output_type: "pil", "np", "pt", or "latent" for the token grid [B, h, w].
            return_dict: False returns the tuple (images, tokens, trace).
            callback_on_step_end: called as (pipe, step, timestep, kwargs) after every target call: `step` is the
                index of the call (0: the prefill), `timestep` the number of tokens that the slowest picture has.
                What it returns is ignored: tokens that are committed cannot be changed. Raise to stop.
            callback_on_step_end_tensor_inputs: which tensors `kwargs` holds: "lengths", tokens committed [B].

        Raises:
            ValueError, TypeError: bad input, before any computation.
            FloatingPointError: the model gave non-finite logits; names the slot.
        """
        law = TokenLaw(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
        tensor_inputs = (
            self._callback_tensor_inputs
            if callback_on_step_end_tensor_inputs is None
            else (callback_on_step_end_tensor_inputs)
        )
        self.check_inputs(
            prompt,
            height=height,
            width=width,
            num_images_per_prompt=num_images_per_prompt,
            generator=generator,
            prompt_embeds=prompt_embeds,
            prompt_attention_mask=prompt_attention_mask,
            output_type=output_type,
            callback_on_step_end_tensor_inputs=tensor_inputs,
        )
        condition = self.encode_prompt(
            prompt,
            num_images_per_prompt=num_images_per_prompt,
            prompt_embeds=prompt_embeds,
            prompt_attention_mask=prompt_attention_mask,
        )

        def listen(step: int, lengths: torch.Tensor) -> None:
            tensors = {"lengths": lengths}
            kwargs = {name: tensors[name] for name in tensor_inputs}
            callback_on_step_end(self, step, int(lengths.min()), kwargs)  # type: ignore[misc]

        batch_size, num_tokens = condition.features.shape[0], self.transformer.grid.num_tokens
        wake(self.transformer)
        with self.progress_bar(total=batch_size * num_tokens) as bar:  # type: ignore[call-arg]
            progress = DecodeProgress(bar, num_tokens, listen if callback_on_step_end is not None else None)
            result = self.sampler(
                self.transformer,
                condition,
                law=law,
                generator=generator,
                batch_size=batch_size,
                callback=None if bar.disable and callback_on_step_end is None else progress,
            )
            progress.finish()
        self.last_trace = result.trace
        images = self.decode_tokens(result.tokens, output_type)
        self.maybe_free_model_hooks()
        if not return_dict:
            return images, result.tokens, result.trace  # type: ignore[return-value]
        return ImagePipelineOutput(images=images, tokens=result.tokens, trace=result.trace)


def _check_generator(generator: Any, pictures: int) -> None:
    if generator is None or isinstance(generator, torch.Generator):
        return
    if not isinstance(generator, (list, tuple)):
        raise TypeError(
            f"generator is a {type(generator).__name__}; pass a torch.Generator or a list of them."
        )
    if len(generator) != pictures:
        raise ValueError(
            f"{len(generator)} generators for {pictures} pictures; pass one per picture, or a single one."
        )
    kinds = sorted({type(item).__name__ for item in generator if not isinstance(item, torch.Generator)})
    if kinds:
        raise TypeError(
            f"the generator list also holds {', '.join(kinds)}; every entry must be a torch.Generator."
        )
