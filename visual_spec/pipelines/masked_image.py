"""Text to image by masked models: caption -> features -> tokens, many at a time -> picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.pipelines.components import registers
from visual_spec.pipelines.image import ImagePipeline

if TYPE_CHECKING:
    from visual_spec.models.masked.maskgit import MaskedImageTransformer
    from visual_spec.models.next_token.llamagen_vq import VQModel
    from visual_spec.models.text.caption_encoder import CaptionEncoder
    from visual_spec.models.text.t5_features import T5Features


class MaskedImagePipeline(ImagePipeline):
    """Draws pictures from prompts by a masked model, whole or into a picture that is given.

    Args:
        transformer: a masked model over the image tokens (`visual_spec.models.core.protocol.MaskedModel`). None here,
            for the tokenizer or for the sampler: the pipeline only encodes prompts.
        vq_model: turns tokens into pictures and back; its codebook is the transformer's vocabulary.
        text_encoder: turns prompts into the features that the transformer reads. None: pass `prompt_embeds`.
        sampler: a `MaskedSampler`, a `SpeculativeMaskedSampler` for the law of one token a call, or a
            `SelfSpeculativeMaskedSampler` for the law of the causal layer.
        default_guidance_scale, default_top_k: what `__call__` takes where none is passed; saved with the pipeline.
        shortcut: stands in for the transformer on some calls of a `ReusingMaskedSampler(reuse_by="shortcut")`.
        causal_layer: what a `SelfSpeculativeMaskedSampler` draws groups from.

    Raises:
        ValueError: tokenizer and transformer that do not fit.

    Example:
        >>> pipe = MaskedImagePipeline.from_pretrained("shapes_masked")
        >>> pipe("a large red circle on a plain sky background").images[0].save("circle.png")
    """

    shortcut: Any
    causal_layer: Any
    model_cpu_offload_seq = "text_encoder->transformer->shortcut->causal_layer->vq_model"
    _optional_components = ["text_encoder", "shortcut", "causal_layer"]

    _of_classes = "MaskedClassImagePipeline"

    @registers
    def __init__(
        self,
        transformer: MaskedImageTransformer | None,
        vq_model: VQModel | None,
        text_encoder: CaptionEncoder | T5Features | None,
        sampler: SchedulerMixin | None,
        default_guidance_scale: float = 2.0,
        default_top_k: int = 0,
        shortcut: ModelMixin | None = None,
        causal_layer: ModelMixin | None = None,
    ): ...

    @classmethod
    def from_official(cls, *_: object, **__: object) -> Self:
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
        parts = {
            name: getattr(self, name) for name in ("shortcut", "causal_layer") if name in self.sampler.takes
        }
        return {name: part for name, part in parts.items() if part is not None}
