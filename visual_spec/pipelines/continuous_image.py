"""Class to image by models of continuous tokens: label -> vectors, each drawn by a small diffusion head -> picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.decoders import KLDecoder

if TYPE_CHECKING:
    from visual_spec.models.continuous.causal import CausalContinuousTransformer
    from visual_spec.models.continuous.mar import MARTransformer
    from visual_spec.models.core.layouts import Given


class ContinuousImagePipeline(ClassImagePipeline):
    """Draws pictures of classes by a model whose tokens are vectors: MAR, or a causal one.

    Args:
        transformer: the model with its head.
        vae: turns a grid of vectors into a picture and back.
        sampler: `ContinuousSampler`, or one of those that speculate.
        id2label, default_guidance_scale: as for `ClassImagePipeline`.
        drafter: a smaller model of the same kind and tokens, for samplers that ask for one.

    A call takes what `ClassImagePipeline` takes, without top-k and top-p: the tokens are not out of a vocabulary. With
    `output_type="latent"` its pictures are the vectors, [B, d, h, w].

    Raises:
        TypeError: a component that could not be saved.
        ValueError: an autoencoder of other tokens, or another number of names than of classes.

    Example:
        >>> pipe = ContinuousImagePipeline.from_pretrained("shapes_mar")
        >>> pipe("red circle", generator=torch.Generator().manual_seed(0)).images[0].save("circle.png")
    """

    model_cpu_offload_seq = "drafter->transformer->vae"
    _optional_components = ["drafter"]
    _decoder = KLDecoder
    _of_texts = ""
    _fitting_drafter = "a model trained by `python scripts/train mar --size small`"

    vae: Any

    @registers
    def __init__(
        self,
        transformer: MARTransformer | CausalContinuousTransformer,
        vae: AutoencoderKL,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 3.0,
        drafter: MARTransformer | CausalContinuousTransformer | None = None,
    ): ...

    @classmethod
    def from_official(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        transformer: Given | MARTransformer,
        vae: Given,
        *,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
        id2label: list[str] | None = None,
        drafter: Given | MARTransformer | None = None,
        **settings: Any,
    ) -> Self:
        """A pipeline around MAR's official files.

        Args:
            transformer: `checkpoint-last.pth`, see `visual_spec.models.continuous.mar_checkpoint`,
                or the model of one.
            vae: `kl16.ckpt`.
            dtype: of all weights; None keeps each file's own.
            sampler: default: `ContinuousSampler()`, one token a call.
            drafter: a smaller file or model, for samplers that ask for one.
            id2label, settings: see the class. The published guidance, with 256 calls, is 2.9, 3.0, 3.2 for B, L, H.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is.
        """
        from visual_spec.models.continuous.mar_checkpoint import load_kl16_checkpoint, load_mar_checkpoint
        from visual_spec.samplers.continuous.continuous import ContinuousSampler

        def loaded(source: Any) -> Any:
            is_model = source is None or isinstance(source, torch.nn.Module)
            return source if is_model else load_mar_checkpoint(source, dtype=dtype)  # pyright: ignore

        model = loaded(transformer)
        published = {768: 2.9, 1024: 3.0, 1280: 3.2}
        settings.setdefault("default_guidance_scale", published.get(model.config["dim"], 3.0))
        return cls(
            model,
            load_kl16_checkpoint(vae, dtype=dtype),
            sampler or ContinuousSampler(),
            id2label,
            drafter=loaded(drafter),
            **settings,
        )

    def sampler_parts(self) -> dict[str, Any]:
        """What the sampler asks for beside the model: a drafter."""
        return {"drafter": self.drafter} if getattr(self.sampler, "needs_drafter", False) else {}

    @torch.no_grad()
    def encode_canvas(self, pictures: torch.Tensor) -> torch.Tensor:
        """The most likely vectors [B, d, h, w] of pictures [B, 3, H, W] in [-1, 1]."""
        return self.decoder.encode(pictures)
