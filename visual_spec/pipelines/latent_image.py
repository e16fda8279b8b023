"""Class to image by models of continuous tokens: label -> vectors, each drawn by a small diffusion head -> picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from einops import rearrange

from visual_spec.models.continuous.causal import CausalLatentTransformer
from visual_spec.models.continuous.mar import MARTransformer
from visual_spec.models.core.offload import at_hand
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.constructor import registers
from visual_spec.pipelines.sampler_text import make_sampler

if TYPE_CHECKING:
    from visual_spec.models.core.layouts import Given


class LatentImagePipeline(ClassImagePipeline):
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
        ValueError: an autoencoder of other tokens, or a number of names other than that of classes.

    Example:
        >>> pipe = LatentImagePipeline.from_pretrained("shapes_mar")
        >>> pipe("red circle", generator=torch.Generator().manual_seed(0)).images[0].save("circle.png")
    """

    model_cpu_offload_seq = "drafter->transformer->vae"
    _optional_components = ["drafter"]
    _tokenizer_part = "vae"
    _of_texts = ""
    _fitting_drafter = "a model trained by `python scripts/train mar --size small`"

    vae: Any

    @registers
    def __init__(
        self,
        transformer: MARTransformer | CausalLatentTransformer,
        vae: AutoencoderKL,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 3.0,
        drafter: MARTransformer | CausalLatentTransformer | None = None,
    ):
        self._finish_init()
        self._check_draws_classes()

    def _check_fit(self) -> None:
        if self.vae.config["latent_channels"] != self.transformer.token_dim:
            raise ValueError(
                f"the transformer draws tokens of {self.transformer.token_dim} numbers, but the autoencoder decodes "
                f"{self.vae.config['latent_channels']}; load both from the same model."
            )

    @classmethod
    def from_official(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        transformer: Given | MARTransformer,
        vae: Given,
        *,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
        id2label: list[str] | None = None,
        **settings: Any,
    ) -> Self:
        """A pipeline around MAR's official files.

        Args:
            transformer: `checkpoint-last.pth`, see `visual_spec.models.continuous.mar_checkpoint`,
                or the model of one.
            vae: `kl16.ckpt`.
            dtype: of all weights; None keeps that of each file.
            sampler: default: `ContinuousSampler()`, one token a call.
            id2label, settings: see the class. The published guidance, with 256 calls, is 2.9, 3.0, 3.2 for B, L, H.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is.
        """
        from visual_spec.models.continuous.mar_checkpoint import load_kl16_checkpoint, load_mar_checkpoint

        loaded = isinstance(transformer, MARTransformer)
        model: Any = transformer if loaded else load_mar_checkpoint(transformer, dtype=dtype)
        published = {768: 2.9, 1024: 3.0, 1280: 3.2}
        settings.setdefault("default_guidance_scale", published.get(model.config["dim"], 3.0))
        return cls(
            model,
            load_kl16_checkpoint(vae, dtype=dtype),
            sampler or make_sampler("continuous"),
            id2label,
            **settings,
        )

    @property
    def _patch(self) -> int:
        """Side of a token in pixels."""
        return 2 ** (len(self.vae.config["block_out_channels"]) - 1)

    def sampler_parts(self) -> dict[str, Any]:
        """What the sampler asks for beside the model: a drafter."""
        return {"drafter": self.drafter} if getattr(self.sampler, "needs_drafter", False) else {}

    @torch.no_grad()
    def decode_tokens(self, tokens: torch.Tensor, output_type: str = "pil") -> Any:
        """Pictures of tokens [B, h * w, d] in the form `output_type` asks for."""
        return self.decode_canvas(
            rearrange(tokens, "b (h w) d -> b d h w", h=self.transformer.grid.height), output_type
        )

    @torch.no_grad()
    def decode_canvas(self, canvas: torch.Tensor, output_type: str = "pil") -> Any:
        """Pictures of vectors [B, d, h, w] in the form `output_type` asks for."""
        if output_type == "latent":
            return canvas
        with at_hand(self.vae):
            latents = (canvas / self.vae.config["scaling_factor"]).to(self.vae.dtype)
            pictures = self.vae.decode(latents).sample
        return self.image_processor.postprocess(pictures, output_type=output_type)

    @torch.no_grad()
    def encode_canvas(self, pictures: torch.Tensor) -> torch.Tensor:
        """The most likely vectors [B, d, h, w] of pictures [B, 3, H, W] in [-1, 1]."""
        with at_hand(self.vae):
            found = self.vae.encode(pictures.to(self.vae.device, self.vae.dtype)).latent_dist.mode()
        return found * self.vae.config["scaling_factor"]
