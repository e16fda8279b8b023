"""FlexVAR: next-scale prediction without residuals, at any list of scales (Jiao et al. 2025, arXiv 2502.20313).

Every map is the whole picture at its size. The input of a scale is made of the codes of the scale before it alone,
enlarged, and positions are counted on one grid for all scales, so a call may draw other scales than the model was made
with: `ScaleWiseSampler(scales=[1, 2, 4, 8, 16])`.

The layers are VAR's and the tokenizer's networks LlamaGen's; one pair of classes serves the embedded size and the
official files. SAR (arXiv 2512.06421) is further training of the same models; its files have the same keys.

The released sampler does three things that ours does not. Guidance grows by min(K - 1, 9), so that with more than ten
scales it passes the one that was asked for. Scales of a side that is not in its list (7, 9, 11, 12, 14, and all above
`max_pn`) take the likeliest code, even in its own recipe of nine scales. And scales above `max_pn` have full
guidance. Here guidance ends at the law's scale, and every scale is sampled.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.checkpoints import Checkpoint, Source, read_checkpoint
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, loaded
from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_scale.scale_budget import offsets_of
from visual_spec.models.next_scale.scale_tokenizer import MultiscaleTokenizer
from visual_spec.models.next_scale.var import SCALES, VARTransformer, check_sizes, sizes_of, zero_biases
from visual_spec.models.next_token.llamagen_checkpoint import build, recognise
from visual_spec.models.next_token.llamagen_vq import VQModel

POSITIONS = 32  # side of the official grid of positions
CODES, CODE_DIM = 8912, 32  # of the official tokenizer
PRESETS = {
    f"d{depth}": {"num_layers": depth, "num_heads": depth, "dim": 64 * depth} for depth in (16, 20, 24)
}
# What hooks of accelerate and diffusers leave in a module.
_HOOKS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook")


class AnyScales:
    """A model or tokenizer whose calls may have other scales."""

    scales: tuple[int, ...]

    def at(self, scales: Sequence[int]) -> Self:
        """Return this model with other scales; it shares the weights, and nothing else changes.

        Hooks that bring in offloaded weights stay with the model itself: keep it `at_hand` meanwhile.

        Raises:
            ValueError: the model cannot have these scales.
        """
        view = copy.copy(self)
        for name in _HOOKS:
            view.__dict__.pop(name, None)
        view.set_scales(scales)
        return view

    @abstractmethod
    def set_scales(self, scales: Sequence[int]) -> None:
        """Set the sides of the maps, coarse to fine."""


class FlexVARTransformer(AnyScales, VARTransformer):
    """A `ScaleModel` over the token maps of a `FlexVQModel`, conditioned on a class. Logits of a scale `[R, n * n, V]`.

    Args:
        vocab_size, code_dim, dim, num_layers, num_heads, num_classes, shared_adaln: see `VARTransformer`; `PRESETS`
            lists the official sizes.
        scales: tokens per side of each map where a call has no others, from 1 up.
        position_side: side of the grid of positions, which is the largest map.

    Raises:
        ValueError: the scales do not begin with 1, are not ordered coarse to fine, or end above `position_side`; or the
            width is not a multiple of the heads.
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = CODES,
        code_dim: Count = CODE_DIM,
        dim: Count = 1024,
        num_layers: int = 16,
        num_heads: Count = 16,
        num_classes: Count = 1000,
        scales: Sequence[int] = SCALES[256],
        shared_adaln: bool = False,
        position_side: Count = POSITIONS,
    ):
        super().__init__(vocab_size, code_dim, dim, num_layers, num_heads, num_classes, scales, shared_adaln)
        self.set_scales(scales)

    def set_scales(self, scales: Sequence[int]) -> None:
        scales, most = tuple(scales), self.config["position_side"]
        check_sizes(scales, self.config["dim"], self.config["num_heads"])
        if scales[0] != 1 or scales[-1] > most:
            raise ValueError(
                f"scales={scales} given; this model draws sides from 1 to {most}, of which the first is 1."
            )
        self.scales, self.offsets = scales, offsets_of(scales)

    def _add_positions(self, dim: int) -> None:
        side = self.config["position_side"]
        self.pos_1LC = nn.Parameter(torch.empty(1, dim, side, side))

    def _initialise(self) -> None:
        """Initialise as VAR; positions begin as waves."""
        super()._initialise()
        with torch.no_grad():
            self.pos_1LC.copy_(waves(self.config["position_side"], self.config["dim"]))

    def _places(self, scale: int) -> Tensor:
        """Return the position embeddings of a scale: the grid of positions, area-averaged. `[1, n * n, dim]`."""
        side = self.scales[scale]
        return F.interpolate(self.pos_1LC, size=(side, side), mode="area").flatten(2).mT

    def student_forced(self, map: Tensor, condition: Any, dropped: Tensor | None = None) -> Tensor:
        """Return the logits `[B, n * n, V]` of one map after the condition alone, with gradients.

        The second pass of SAR's training (arXiv 2512.06421): no scale before it is seen.

        Args:
            map: `[B, D, n, n]`, the codes that the model drew at the scale before, enlarged to this one.
            condition, dropped: see `teacher_forced`.
        """
        alone = self.at((1, map.shape[-1]))
        hidden, state = alone._begin(condition, [map], dropped=dropped, fed=0, stop=0, pruned=None)
        # The condition stands for no scale.
        hidden = hidden - F.pad(self.pos_start, (0, 0, 0, hidden.shape[1] - 1))
        return alone._logits(alone._run(state, hidden, range(2))[:, 1:], state.head_modulation)


def waves(side: int, dim: int) -> Tensor:
    """Return `[1, dim, side, side]`: sines of the row in even channels, cosines of the column in odd ones."""
    places = torch.arange(side, dtype=torch.float32)
    # [side, dim / 2]
    angles = places[:, None] * torch.exp(torch.arange(0, dim, 2) * -(math.log(10000.0) / dim))
    table = torch.empty(side, side, dim)
    table[..., 0::2], table[..., 1::2] = angles.sin()[:, None], angles.cos()[None]
    return table.permute(2, 0, 1)[None]


class FlexVQModel(AnyScales, MultiscaleTokenizer, VQModel):
    """Maps pictures to the tokens of all scales and back: LlamaGen's tokenizer, whose codes have length 1.

    A map codes the latents of the picture, area-averaged to its size. A local tokenizer (`norm_groups=None`), which
    was not trained on such latents, codes the picture itself, area-averaged to its size. The canvas `[B, D, n, n]` is
    the last map alone, at its own size.

    Args:
        base_channels, channel_multipliers, blocks_per_level, latent_channels, norm_groups: see `VQModel`.
        codebook_size, codebook_dim: number and length of the codes.
        image_size: side of the pictures in pixels.
        scales: side of each token map where a call has no others, growing; the last is `image_size`'s.

    Raises:
        ValueError: the sides do not grow, or the last one is of another picture size.
    """

    tokens_per_place = 1
    reads = ("VQModel",)

    @register_to_config
    def __init__(
        self,
        base_channels: int = 128,
        channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4),
        blocks_per_level: int = 2,
        latent_channels: int = 256,
        codebook_size: Count = CODES,
        codebook_dim: int = CODE_DIM,
        norm_groups: int | None = 32,
        image_size: Count = 256,
        scales: Sequence[int] = SCALES[256],
    ):
        sizes = base_channels, channel_multipliers, blocks_per_level, latent_channels
        super().__init__(*sizes, codebook_size, codebook_dim, norm_groups, image_size)
        self.codebook_size, self.code_dim = codebook_size, codebook_dim
        self.set_scales(scales)
        if self.image_size != image_size:
            raise ValueError(
                f"image_size={image_size} given with scales={tuple(scales)}, whose pictures have {self.image_size} "
                "pixels; pass sizes that fit."
            )

    def set_scales(self, scales: Sequence[int]) -> None:
        check_sizes(scales, 1, 1)
        self.scales = tuple(scales)

    @property
    def codebook(self) -> Tensor:
        """The codes `[V, D]` by token id."""
        return self.quantize.codes

    @property
    def image_size(self) -> int:
        """Side of the pictures in pixels."""
        return self.scales[-1] * self.patch_size

    @loads_weights
    def encode_latents(self, images: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(images))

    @loads_weights
    def tokens_of(self, latents: Tensor) -> list[Tensor]:
        """See `MultiscaleTokenizer.tokens_of`; the latents are area-averaged."""
        return [self.quantize.nearest(_averaged(latents, side)).flatten(1) for side in self.scales]

    @loads_weights
    def encode_tokens(self, images: Tensor) -> Tensor:
        if self.config["norm_groups"] is not None:
            return super().encode_tokens(images)
        self._check_pictures(images)
        maps = [self.encode_latents(_averaged(images, side * self.patch_size)) for side in self.scales]
        return torch.cat([self.quantize.nearest(map).flatten(1) for map in maps], 1)

    # -- the canvas ---------------------------------------------------------------------------------------------------

    @property
    def canvas_shape(self) -> tuple[int, int, int]:
        """Of the first scale: the canvas is the last map, at its own size."""
        return self.code_dim, self.scales[0], self.scales[0]

    def codes_of(self, tokens: Tensor, scale: int, like: Tensor) -> Tensor:
        side = self.scales[scale]
        return self.quantize.lookup(tokens.unflatten(1, (side, side)))

    def accumulate_codes(self, canvas: Tensor, scale: int, codes: Tensor) -> Tensor:
        return codes.to(canvas.dtype)

    def next_map(self, canvas: Tensor, scale: int) -> Tensor:
        """Return the model's input for a scale >= 1: the canvas, bicubically enlarged to its side: `[B, D, n, n]`."""
        side = self.scales[scale]
        return F.interpolate(canvas, size=(side, side), mode="bicubic")

    @loads_weights
    def decode_canvas(self, canvas: Tensor) -> Tensor:
        """Return pictures `[B, 3, H, W]` clamped to [-1, 1] of a canvas; one of a smaller scale is enlarged."""
        pictures = self.decode_latents(canvas.to(self.dtype))
        if canvas.shape[-1] < self.scales[-1]:
            pictures = F.interpolate(pictures, size=self.picture_shape, mode="bicubic")
        return pictures.clamp(-1, 1)


def _averaged(map: Tensor, side: int) -> Tensor:
    return F.interpolate(map, size=(side, side), mode="area")


# -- official files --------------------------------------------------------------------------------------------------

_FLEXVAR = KeyLayout(
    "FlexVAR transformer",
    "a file such as FlexVARd16-epo179.pth",
    needed={"pos_1LC": 4, "class_emb.weight": 2, "word_embed.weight": 2, "blocks.0.attn.scale_mul_1H11": 4},
    dropped=("attn_bias_for_masking",),  # of the scales of the last step of training; the release replaces it
)


def is_flexvar(weights: Mapping[str, Tensor]) -> bool:
    """Return whether these keys are of a FlexVAR or a SAR, whose positions are a grid."""
    return "pos_1LC" in weights and weights["pos_1LC"].ndim == 4


def is_flexvae(weights: Mapping[str, Tensor]) -> bool:
    """Return whether these keys are of FlexVAR's tokenizer: LlamaGen's, with longer codes."""
    codes = weights.get("quantize.embedding.weight")
    return "encoder.conv_blocks.0.res.0.conv1.weight" in weights and codes is not None and codes.shape[-1] > 8


def name_of(checkpoint: Checkpoint) -> str:
    """Return what a file of FlexVAR or SAR is called, by its depth."""
    return f"FlexVAR-d{count_parts(checkpoint.weights, 'blocks.')}"


def scales_of_size(size: int | None, path: object = None) -> tuple[int, ...]:
    """Return the scales of pictures of this side in pixels; None: 256.

    Raises:
        ValueError: FlexVAR has no published list for it.
    """
    published = {256: SCALES[256], 512: (*range(1, 11), 12, 14, 16, 23, 32)}
    if (size or 256) not in published:
        raise ValueError(
            f"image_size={size}; pass 256 or 512, the sizes that FlexVAR has lists of scales for."
        )
    return published[size or 256]


def load_flexvar(
    source: Given, *, scales: Sequence[int] = SCALES[256], dtype: torch.dtype | None = None
) -> FlexVARTransformer:
    """Return the transformer of an official file of FlexVAR or SAR.

    Sizes are read off the weights. The zero bias of keys, which the files carry, is checked and dropped.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        scales: tokens per side of each map; no weight depends on them.
    """
    weights, name = _FLEXVAR.read(source)
    config = sizes_of(weights) | {"scales": tuple(scales), "position_side": weights["pos_1LC"].shape[-1]}
    checked: Any = dict(what="FlexVAR", constants=zero_biases, dtype=dtype)
    return loaded(FlexVARTransformer, config, weights, name, **checked)


def load_flexvae(
    source: Source, *, scales: Sequence[int] = SCALES[256], dtype: torch.dtype | None = None
) -> FlexVQModel:
    """Return the tokenizer of an official file, `FlexVAE.pth`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        scales: side of each token map; no weight depends on them.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    architecture = recognise(checkpoint)
    if architecture.model is not VQModel or not is_flexvae(checkpoint.weights):
        raise ValueError(f"{checkpoint.path} is {architecture.name}; pass FlexVAR's tokenizer, FlexVAE.pth.")
    patch = 2 ** (len(architecture.config["channel_multipliers"]) - 1)
    sizes = {"scales": tuple(scales), "image_size": scales[-1] * patch}
    return build(checkpoint, replace(architecture, model=FlexVQModel), dtype=dtype, **sizes)
