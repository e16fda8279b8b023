"""Class to image by models of continuous tokens: label -> vectors, drawn in any of several ways -> picture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.families import all_families
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.decoders import KLDecoder

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

    from visual_spec.models.continuous.binary_autoencoder import BinaryAutoencoder
    from visual_spec.models.continuous.bitdance import BitDanceTransformer
    from visual_spec.models.continuous.causal import CausalContinuousTransformer
    from visual_spec.models.continuous.mar import MARTransformer
    from visual_spec.models.core.checkpoints import Checkpoint
    from visual_spec.models.core.layouts import Given


class ContinuousImagePipeline(ClassImagePipeline):
    """Draws pictures of classes by a model whose tokens are vectors: MAR, a causal one, BitDance, FlowAR, or ACDiT.

    Args:
        transformer: the model, with its head or its flow network.
        vae: turns a grid of vectors into a picture and back; of BitDance a `BinaryAutoencoder`.
        sampler: `ContinuousSampler`, or one of those that speculate; of FlowAR `FlowScaleSampler`, of ACDiT
            `BlockDiffusionSampler`.
        id2label, default_guidance_scale: as for `ClassImagePipeline`.
        drafter: a smaller model of the same kind and tokens, for samplers that ask for one.

    A call takes what `ClassImagePipeline` takes, without top-k and top-p: the tokens are not out of a vocabulary. With
    `output_type="latent"` its pictures are the vectors, [B, d, h, w].

    Raises:
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
        transformer: MARTransformer | CausalContinuousTransformer | BitDanceTransformer,
        vae: AutoencoderKL | BinaryAutoencoder,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 3.0,
        drafter: MARTransformer | CausalContinuousTransformer | BitDanceTransformer | None = None,
    ): ...

    @classmethod
    def from_official(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        transformer: Given | torch.nn.Module,
        vae: Given | AutoencoderKL | BinaryAutoencoder,
        *,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
        id2label: list[str] | None = None,
        drafter: Given | torch.nn.Module | None = None,
        **settings: Any,
    ) -> Self:
        """A pipeline around the official files of MAR, BitDance, FlowAR or ACDiT.

        Args:
            transformer: `checkpoint-last.pth` of MAR, a file of BitDance such as `BitDance_B_16x.pt`, `FlowAR-S.pth`,
                `FlowAR-L.pth` or `FlowAR-H.pth`, or `ACDiT-XL-img.pt`; or the model of one.
            vae: `kl16.ckpt`; of BitDance `ae_d16c32.pt`; or a folder of diffusers' class, such as `vae` of
                facebook/DiT-XL-2-256, which ACDiT's latents are of; or the model of one.
            dtype: of all weights; None keeps each file's own.
            sampler: default: the published one of its size (`visual-spec models --json`): of MAR `ContinuousSampler()`,
                one token a call, of ACDiT `BlockDiffusionSampler()`.
            drafter: a smaller file or model of MAR or BitDance, for samplers that ask for one.
            id2label, settings: see the class. The default guidance is the published one of its size.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is.
        """
        model: Any
        second: Any
        model, second = (
            part if part is None or isinstance(part, torch.nn.Module) else _loaded(part, dtype)
            for part in (transformer, drafter)
        )
        own, guidance = _published(model)
        settings.setdefault("default_guidance_scale", guidance)
        if isinstance(vae, str | os.PathLike) and os.path.isdir(vae):
            vae = AutoencoderKL.from_pretrained(vae, torch_dtype=dtype)
        tokenizer: Any = vae if isinstance(vae, torch.nn.Module) else _loaded(vae, dtype, "vae")
        return cls(model, tokenizer, sampler or own, id2label, drafter=second, **settings)

    def sampler_parts(self) -> dict[str, Any]:
        """What the sampler asks for beside the model: a drafter."""
        return {"drafter": self.drafter} if getattr(self.sampler, "needs_drafter", False) else {}

    @torch.no_grad()
    def encode_canvas(self, pictures: torch.Tensor) -> torch.Tensor:
        """The most likely vectors [B, d, h, w] of pictures [B, 3, H, W] in [-1, 1]."""
        return self.decoder.encode(pictures)


def _loaded(source: Given, dtype: torch.dtype | None, role: str = "transformer") -> Any:
    """The model of a file of a family that this pipeline draws with, or of a state dict. A file is read once."""
    from visual_spec.models.core.checkpoints import read_by

    ours = [family for family in all_families() if ContinuousImagePipeline.__name__ in family.pipelines]
    files = [kind for family in ours if family.layout for kind in family.layout.files]
    kinds = [kind for kind in files if kind.role == role]

    def unpack(path: Path, content: object) -> Checkpoint | None:
        found = (kind.function(kind.unpack)(path, content) for kind in kinds if kind.unpack)
        return next((one for one in found if one is not None), None)

    read: Any = source if isinstance(source, Mapping) else read_by(source, unpack)
    weights = read if isinstance(read, Mapping) else read.weights
    kind = next((kind for kind in kinds if kind.fits(weights)), kinds[0])  # which says what is missing
    return kind.function(kind.load)(read, dtype=dtype)


def _published(model: ModelMixin) -> tuple[SchedulerMixin, float]:
    """The sampler and the guidance of the published figures of an official size, the nearest one by its parameters."""
    from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler

    own, count = f":{type(model).__name__}", model.num_parameters()
    sizes = next(
        family.sizes for family in all_families() if any(part.endswith(own) for part in family.parts)
    )
    nearest = min(sizes, key=lambda size: abs(math.log(size.parameters / count)))
    assert nearest.published is not None
    sampler, guidance = nearest.published
    name, settings = parse_sampler(sampler)
    return make_sampler(name, **settings), guidance
