"""Text to image by masked models: caption -> features -> tokens, many at a time -> picture."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.masked.causal_layer import CausalLayer
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.masked.shortcut import FeatureShortcut
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.models.text.t5_features import T5Features
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.repaint import Pictures, check_repainting, known_tokens
from visual_spec.pipelines.texts import Texts
from visual_spec.samplers.core.masked_presets import PRESETS
from visual_spec.samplers.masked import MaskedSampler


def given_parts(pipe: Any, image: Pictures | None, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What the sampler takes beside the model for a picture that is given.

    Raises:
        ValueError: the sampler cannot keep tokens.
    """
    if image is None:
        return {}
    if "given" not in pipe.sampler.takes:
        raise ValueError(
            f"{type(pipe.sampler).__name__} keeps no tokens of a picture; set pipe.sampler to a MaskedSampler."
        )
    return {"given": known_tokens(pipe, image, *args, **kwargs)}


class MaskedImagePipeline(ImagePipeline):
    """Draws pictures from prompts by a masked model, whole or into a picture that is given.

    Args:
        transformer: a masked model over the image tokens (`visual_spec.models.core.protocol.MaskedModel`). None here,
            for the tokenizer or for the sampler: the pipeline only encodes prompts.
        vq_model: turns tokens into pictures and back; its codebook is the transformer's vocabulary.
        text_encoder: turns prompts into the features that the transformer reads. None: pass `prompt_embeds`.
        sampler: a `MaskedSampler`, a `SpeculativeMaskedSampler` for the law of one token a call, or a
            `SelfSpeculativeMaskedSampler` for that of the causal layer.
        default_guidance_scale, default_top_k: those of `__call__` where it is given none; saved with the pipeline.
        shortcut: stands in for the transformer on some calls where the sampler says `reuse_by="shortcut"`.
        causal_layer: what a `SelfSpeculativeMaskedSampler` draws groups from.

    Raises:
        TypeError: a component that could not be saved.
        ValueError: tokenizer and transformer that do not fit.

    Example:
        >>> pipe = MaskedImagePipeline.from_pretrained("shapes_masked")
        >>> pipe("a large red circle on a plain sky background").images[0].save("circle.png")
    """

    shortcut: Any
    causal_layer: Any
    model_cpu_offload_seq = "text_encoder->transformer->shortcut->causal_layer->vq_model"
    _optional_components = ["text_encoder", "shortcut", "causal_layer"]

    def __init__(
        self,
        transformer: MaskedImageTransformer | None,
        vq_model: VQModel | None,
        text_encoder: CaptionEncoder | T5Features | None,
        sampler: SchedulerMixin | None,
        default_guidance_scale: float = 2.0,
        default_top_k: int = 0,
        shortcut: FeatureShortcut | None = None,
        causal_layer: CausalLayer | None = None,
    ):
        VisualPipeline.__init__(self)
        self.register_modules(
            transformer=transformer,
            vq_model=vq_model,
            text_encoder=text_encoder,
            sampler=sampler,
            shortcut=shortcut,
            causal_layer=causal_layer,
        )
        self._finish_init(default_guidance_scale=default_guidance_scale, default_top_k=default_top_k)
        if self.transformer is not None and self.transformer.config.get("num_classes") is not None:
            raise ValueError("the transformer draws from class labels; use MaskedClassImagePipeline.")

    @classmethod
    def from_official(cls, *_: Any, **__: Any) -> Any:
        """There are no official masked models of captions in this layout.

        Raises:
            ValueError: always; says what there is.
        """
        raise ValueError(
            "no masked model of captions was released in this layout; official ones of classes are loaded by "
            "MaskedClassImagePipeline.from_official."
        )

    def sampler_parts(self) -> dict[str, Any]:
        """What the sampler asks for beside the model: the shortcut, or the causal layer."""
        config, parts = self.sampler.config, {}
        if config.get("reuse") and config.reuse_by == "shortcut":
            parts["shortcut"] = self.shortcut
        if "causal_layer" in self.sampler.takes:
            parts["causal_layer"] = self.causal_layer
        return {name: part for name, part in parts.items() if part is not None}

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | list[str] | None = None,
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
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict], Any] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> ImagePipelineOutput:
        """Draw.

        Args:
            image: a picture to draw into, or one for each prompt: PIL, numpy [H, W, 3] or a tensor [3, H, W] in [0, 1],
                of the size that the model draws. Tokens that are not drawn anew stay, bit for bit; pixels beside them
                may change, as the tokenizer's decoder looks around.
            mask: white (1, True) where the picture is painted anew: inpainting. For outpainting, place the picture on a
                canvas, and mask the rest of it. PIL, numpy or a tensor [H, W]. A token is drawn anew if the mask
                touches its patch.
            strength: share of the tokens (of those under the mask) that are drawn anew, chosen at random: a variation
                of the picture. None: all of them.

        All other arguments, and the errors, are those of `ImagePipeline.__call__`; a masked model knows no
        `guidance_until`.
        """
        law = self.make_law(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
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
            height=height,
            width=width,
            num_images_per_prompt=num_images_per_prompt,
            generator=generator,
            output_type=output_type,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            **texts,
        )
        prompts = [prompt] if isinstance(prompt, str) else prompt
        count = len(prompts) if prompts is not None else len(prompt_embeds)  # type: ignore[arg-type]
        check_repainting(self.image_size, image, mask, strength, count)
        condition = self.encode_prompt(prompt, num_images_per_prompt=num_images_per_prompt, **texts)
        each = num_images_per_prompt
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


def default_sampler() -> MaskedSampler:
    """Published settings of the Halton sampler."""
    return MaskedSampler(**PRESETS["halton"].settings)
