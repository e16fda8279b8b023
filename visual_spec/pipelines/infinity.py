"""Text to image by Infinity: caption -> T5 features -> bits of token maps, coarse to fine -> picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from visual_spec.models.core.checkpoints import Checkpoint, Source
from visual_spec.models.next_scale.infinity import InfinityTransformer
from visual_spec.models.next_scale.infinity_checkpoint import load_infinity_checkpoint
from visual_spec.models.next_scale.infinity_scales import scales_by_name
from visual_spec.models.next_scale.infinity_vq import BitwiseVQModel, load_infinity_vq_checkpoint
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.next_scale.scale_cache import CompressedVAR
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.next_scale import Budget, NextScalePipeline
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.steps import StepCallback, StepListener
from visual_spec.pipelines.texts import ReadsText, Texts, as_condition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage, check_alone

if TYPE_CHECKING:
    from visual_spec.models.core.layouts import Given
    from visual_spec.models.text.t5_features import T5Features


class InfinityPipeline(ReadsText, NextScalePipeline):
    """Draws pictures of prompts by next-scale prediction of bits.

    Args:
        transformer: draws the bits. None here, for the tokenizer or for the sampler: the pipeline only encodes prompts
            (`encode_prompt`).
        vq_model: turns them into pictures.
        text_encoder: turns prompts into T5 features. None: pass `prompt_embeds`.
        sampler: how scales are decoded; guidance of the published pictures has no ramp (`ramp=False`).
        default_guidance_scale, default_temperature, default_top_p: of calls that name none; saved
            with the pipeline. They are `cfg`, `tau` and `top_p` of the official code.
        budget: what the cache may keep (ScaleKV), or what `ScaleBudget.to_dict` made of it; None: everything.
            `compress` sets it later.

    Raises:
        ValueError: a tokenizer or a budget that does not fit the transformer.

    Example:
        >>> pipe = InfinityPipeline.from_official(
        ...     "infinity_2b_reg.pth", "infinity_vae_d32reg.pth", "google/flan-t5-xl", dtype=torch.bfloat16
        ... ).to("cuda")
        >>> pipe.compress(published_budget("2b"))
        >>> pipe("an alien spaceship").images[0].save("ship.png")
    """

    # The tokenizer works after every scale: it stays.
    model_cpu_offload_seq = "text_encoder->transformer"
    _exclude_from_cpu_offload = ["vq_model"]
    _optional_components = ["text_encoder"]
    _token = "bits"

    @registers
    def __init__(
        self,
        transformer: InfinityTransformer | None,
        vq_model: BitwiseVQModel | None,
        text_encoder: T5Features | None,
        sampler: ScaleWiseSampler | None,
        default_guidance_scale: float = 4.0,
        default_temperature: float = 0.5,
        default_top_p: float = 0.97,
        budget: ScaleBudget | dict[str, Any] | None = None,
    ):
        self.compress(budget)

    @classmethod
    def from_official(
        cls,
        transformer: Source,
        vq_model: Given,
        text_encoder: str | os.PathLike | T5Features | None = None,
        *,
        size: int | None = None,
        ratio: float = 1.0,
        dtype: torch.dtype | None = None,
        sampler: ScaleWiseSampler | None = None,
        feature_cache: str | os.PathLike | None = None,
    ) -> Self:
        """A pipeline around official files, with the guidance and temperature of their published pictures: 4 and 0.5 of
        the 2B, 3 and 1 of the 8B, whose tokenizer joins places to patches.

        Args:
            transformer: e.g. `infinity_2b_reg.pth`, or the folder `infinity_8b_weights`.
            vq_model: e.g. `infinity_vae_d32reg.pth` (2B), or `infinity_vae_d56_f8_14_patchify.pth` (8B).
            text_encoder: folder or Hub id of flan-t5-xl, or loaded `T5Features`. None: pass `prompt_embeds` to draw.
            size, ratio: of the pictures: about as many pixels as `size` squared, and height / width; see `scales_for`.
                No weight depends on them, but a model is trained for one size. None: what the name of the transformer's
                file says, see `size_by_name`.
            dtype: of all weights; None keeps each file's own (float32 for the text encoder).
            sampler: default `ScaleWiseSampler(ramp=False)`.
            feature_cache: folder that keeps the features of every caption, see `T5Features`.

        Raises:
            ValueError, OSError: a file that is none of these (says what it is), or one whose name tells no size.
        """
        from visual_spec.pipelines.families.llamagen import load_t5

        path = transformer.path if isinstance(transformer, Checkpoint) else transformer
        scales = scales_by_name(size, path, ratio)
        model = load_infinity_checkpoint(transformer, scales=scales, dtype=dtype)
        tokenizer = load_infinity_vq_checkpoint(vq_model, scales=scales, dtype=dtype)
        length = model.config["caption_length"]
        text_encoder = load_t5(
            text_encoder, dtype=dtype, max_words=length, cache_folder=feature_cache, clean=False
        )
        guidance, temperature = (3.0, 1.0) if tokenizer.config["patchify"] else (4.0, 0.5)
        return cls(
            model,
            tokenizer,
            text_encoder,
            sampler or ScaleWiseSampler(ramp=False),
            default_guidance_scale=guidance,
            default_temperature=temperature,
        )

    # -- what it is made of ------------------------------------------------------------------------------------------

    def compress(self, budget: Budget = None) -> Self:
        """Decode with a compressed cache from now on (ScaleKV), also when saved and loaded; None: with a whole one.

        Returns the pipeline.

        Raises:
            ValueError: a budget for another model.
        """
        self.register_to_config(budget=self._saved_budget(budget, self.transformer))
        return self

    def check_sampler(self) -> None:
        """Refuse also a sampler that divides the scales or compresses the cache.

        Raises:
            TypeError, ValueError: as `VisualPipeline.check_sampler` and `check_alone`.
        """
        super().check_sampler()
        check_alone(self.sampler)

    def _check_models(self) -> None:
        model, tokenizer = self.transformer, self.vq_model
        drawn, wanted = ((tuple(part.scales), part.code_dim) for part in (model, tokenizer))
        if drawn != wanted:
            raise ValueError(
                f"the transformer predicts scales {drawn[0]} of {drawn[1]} bits, but the tokenizer decodes scales "
                f"{wanted[0]} of {wanted[1]} bits; load both for the same pictures."
            )

    # -- drawing -----------------------------------------------------------------------------------------------------

    def make_laws(
        self,
        guidance_scale: float | Sequence[float] | None = None,
        temperature: float | Sequence[float] | None = None,
        top_p: float | None = None,
    ) -> list[TokenLaw]:
        """The law of each scale; None is the default of this pipeline, and a list has a value for each scale.

        Raises:
            ValueError: a value out of its range, or a list of another length; or there is no transformer.
        """
        self.check_complete("transformer")
        count, columns, own = len(self.transformer.scales), [], self.default_settings()
        for name, value in (("guidance_scale", guidance_scale), ("temperature", temperature)):
            value = own[name] if value is None else value
            column = list(value) if isinstance(value, Sequence) else [value] * count
            if len(column) != count:
                raise ValueError(
                    f"{len(column)} values of {name} given for {count} scales; pass one a scale, or a single number."
                )
            columns.append(column)
        share = own["top_p"] if top_p is None else top_p
        return [TokenLaw(*pair, top_p=share) for pair in zip(*columns, strict=True)]

    def stages(self, laws: Sequence[TokenLaw]) -> list[Stage]:
        """The schedule that is decoded: each scale by its law, with the cache that the budget leaves.

        With a sampler that measures, the compressed transformer is compared with itself uncompressed.
        """
        check_alone(self.sampler)
        budget, model = self.budget, self.transformer
        model = model if budget is None else CompressedVAR(model, budget)
        stages = [Stage(model, range(scale, scale + 1), law) for scale, law in enumerate(laws)]
        if budget is not None and self.sampler.config["measure"]:
            # The whole cache draws scale 0 alike: nothing is read there.
            stages[0] = Stage(self.transformer, range(1), laws[0])
        return stages

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | list[str] | None = None,
        guidance_scale: float | Sequence[float] | None = None,
        temperature: float | Sequence[float] | None = None,
        top_p: float | None = None,
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
        output_logprobs: bool = False,
    ) -> ImagePipelineOutput:
        """Draw. Prompts, features, generators and errors are as for `ImagePipeline.__call__`, output and callbacks as
        for `ScaleImagePipeline.__call__`, with bits for tokens; `output_logprobs` too.

        Args:
            guidance_scale, temperature: a number, or one for each scale (`cfg` and `tau` of the official code).
            top_p: see `TokenLaw`. Of two values, the rarer is left out where its share is at most 1 - top_p.

        Returns:
            Pictures; tokens [B, L * T], the T bits of all places that are drawn, coarse to fine; and the trace, a
            `ScaleTrace`, whose tokens are bits.
        """
        laws = self.make_laws(guidance_scale, temperature, top_p)
        negative = negative_prompt, negative_prompt_embeds, negative_prompt_attention_mask
        texts = Texts(prompt, prompt_embeds, prompt_attention_mask, *negative)
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs, ("canvas",))
        self.check_inputs(texts, num_images_per_prompt, laws, generator, output_type)
        self.check_logprobs(output_logprobs)
        stages, count = self.stages(laws), len(texts) * num_images_per_prompt
        with self.running():
            condition = as_condition(*self.encode_prompt(texts, num_images_per_prompt=num_images_per_prompt))
            self.transformer.check_condition(condition, count)
            result = self.draw_scales(stages, condition, count, laws, generator, listener, output_logprobs)
            images = self.decode_canvas(result.canvas, output_type)
        made: Any = (images, result.tokens, result.trace)
        return ImagePipelineOutput(*made) if return_dict else made
