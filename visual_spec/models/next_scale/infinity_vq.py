"""The bitwise multi-scale tokenizer of Infinity (Han et al. 2024, arXiv 2412.04431, section 3, "Visual Tokenizer").

A picture is a latent map. Each of its token maps codes what the smaller ones have left, as in VAR. The code of a place
is the signs of its channels (binary spherical quantization, Zhao et al. 2024): d bits stand for a vector of the unit
sphere with entries +-1 / sqrt(d), one of 2^d codes, without a table. One class serves tiny sizes and the official
`infinity_vae_d*.pth`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from visual_spec.models.core.layouts import Given, KeyLayout, loaded, vqgan_sizes
from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.protocol import Side, shape_of, sides_of, wide
from visual_spec.models.core.settings import register_to_config
from visual_spec.models.core.vq_blocks import Decoder, Design, Encoder
from visual_spec.models.next_scale.infinity_scales import scales_for
from visual_spec.models.next_scale.scale_tokenizer import MultiscaleTokenizer

_INFINITY_VQ = KeyLayout(
    "tokenizer of Infinity",
    "a file such as infinity_vae_d32reg.pth",
    needed={"encoder.conv_in.weight": 4, "encoder.conv_out.weight": 4},
    renamed={  # each convolution and each norm is wrapped
        r"((?:^|\.)(?:conv|conv_in|conv_out|conv1|conv2|nin_shortcut)\.)conv\.(?=\w+$)": r"\1",
        r"((?:^|\.)(?:norm1|norm2|norm_out)\.)norm\.(?=\w+$)": r"\1",
    },
)
# Powers of two, with which the official code makes numbers of bits.
_CONSTANTS = ("quantizer.lfq.mask", "quantize.lfq.mask")


class BitwiseVQModel(MultiscaleTokenizer):
    """Maps pictures to bits of all scales and back: a `ScaleTokenizer` with `tokens_per_place` bits a place.

    Tokens of a picture are bits, long `[B, L * T]`: the maps from coarse to fine, each in raster order, with the T bits
    of a place adjacent. The canvas is a latent map `[B, bits, h, w]`.

    Args:
        bits: d, channels of the latent map.
        base_channels, channel_multipliers, blocks_per_level: see `VQModel` of LlamaGen.
        scales: side of each token map, or (height, width), coarse to fine; `scales_for` gives the official ones.
        patchify: a place of a token map covers 2 x 2 of the latent map, and so has 4 d bits: channel 0 at its
            four corners in raster order, then channel 1, and so on. Used by the official 8B.
        norm_groups: groups of each GroupNorm; None normalises every position separately.

    The defaults are the official ones of `infinity_vae_d32reg.pth` at 1024 pixels.

    Raises:
        ValueError: there are no scales, or the sides are not ordered coarse to fine.
    """

    @register_to_config
    def __init__(
        self,
        bits: int = 32,
        base_channels: int = 128,
        channel_multipliers: tuple[int, ...] = (1, 2, 4, 4, 4),
        blocks_per_level: int = 2,
        scales: Sequence[Side] = scales_for(1024),
        patchify: bool = False,
        norm_groups: int | None = 32,
    ):
        super().__init__()
        self.scales = sides_of(scales)
        check_scales(self.scales)
        self.bits, self._cell = bits, 2 if patchify else 1
        self.codebook_size = 2  # the values of a bit
        self.tokens_per_place = self.code_dim = bits * self._cell**2
        # Pixels per side of a place, last scale.
        self.patch_size = 2 ** (len(channel_multipliers) - 1) * self._cell
        self.image_size = self.picture_shape
        design = Design(base_channels, tuple(channel_multipliers), blocks_per_level, bits, norm_groups)
        self.encoder, self.decoder = Encoder(design), Decoder(design)

    @property
    def codebook(self) -> Tensor:
        """`[2, 1]`: the numbers of bit 0 and bit 1, in at least float32."""
        return torch.tensor([[-1.0], [1.0]], device=self.device, dtype=self.canvas_dtype) / math.sqrt(
            self.bits
        )

    # -- the canvas ---------------------------------------------------------------------------------------------------

    @property
    def canvas_shape(self) -> tuple[int, int, int]:
        return self.bits, *self._latent_shape(-1)

    @property
    def canvas_dtype(self) -> torch.dtype:
        """At least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def codes_of(self, tokens: Tensor, scale: int, like: Tensor) -> Tensor:
        values = self.codebook.to(like.device, like.dtype)[tokens, 0]  # [B, n * n * T]
        height, width = shape_of(self.scales[scale])
        return rearrange(values, "b (h w t) -> b t h w", h=height, w=width)

    def accumulate_codes(self, canvas: Tensor, scale: int, codes: Tensor) -> Tensor:
        """As `accumulate`, for codes `[B, T, n, n]` that need not come from bits."""
        codes = codes.to(canvas.dtype)
        if self._cell > 1:
            codes = F.pixel_shuffle(codes, self._cell)
        return canvas + _resized(codes, canvas.shape[-2:])

    def next_map(self, canvas: Tensor, scale: int) -> Tensor:
        """Return the model's input for a scale >= 1: the canvas so far at that scale's size, `[B, T, n, n]`.

        It is interpolated, not averaged, as in the official sampling and training of the transformer.
        """
        small = _resized(canvas, self._latent_shape(scale))
        return F.pixel_unshuffle(small, self._cell) if self._cell > 1 else small

    @loads_weights
    def decode_canvas(self, canvas: Tensor) -> Tensor:
        """Return pictures `[B, 3, H, W]` clamped to [-1, 1] of a canvas, complete or after its first scales only."""
        return self.decoder(canvas.to(self.dtype)).clamp(-1, 1)

    # -- pictures and tokens ------------------------------------------------------------------------------------------

    @loads_weights
    def encode_latents(self, images: Tensor) -> Tensor:
        """Return the map `[B, bits, h, w]` that the canvas should become, for pictures `[B, 3, H, W]` in [-1, 1]."""
        return self.encoder(images)

    def quantise(self, latents: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Code a map `[B, bits, h, w]` scale by scale: each scale takes the signs of the rest, averaged to its size.

        Returns:
            For every scale its bits, long `[B, n * n * T]`, and the canvas including them.
        """
        latents = wide(latents)
        tokens, canvas, canvases = [], torch.zeros_like(latents), []
        for scale in range(len(self.scales)):
            left, shape = latents - canvas, self._latent_shape(scale)
            if left.shape[-2:] != shape:
                left = F.interpolate(left, size=shape, mode="area")
            signs = (left > 0).long()
            if self._cell > 1:
                signs = F.pixel_unshuffle(signs, self._cell)
            tokens.append(rearrange(signs, "b t h w -> b (h w t)"))
            canvas = self.accumulate(canvas, scale, tokens[-1])
            canvases.append(canvas)
        return tokens, canvases

    def tokens_of(self, latents: Tensor) -> list[Tensor]:
        return self.quantise(latents)[0]

    def _latent_shape(self, scale: int) -> tuple[int, int]:
        height, width = shape_of(self.scales[scale])
        return height * self._cell, width * self._cell


def check_scales(scales: Sequence[Side]) -> None:
    """Refuse maps that are not ordered coarse to fine, or none, or a side below 1, by ValueError."""
    shapes = [shape_of(side) for side in scales]
    shrinks = any(a > c or b > d for (a, b), (c, d) in pairwise(shapes))
    if not shapes or min(map(min, shapes)) < 1 or shrinks:
        raise ValueError(
            f"scales={tuple(scales)} given; pass sides, or (height, width), of at least 1, coarse to fine, such as "
            "scales_for(1024)."
        )


def _resized(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x if tuple(x.shape[-2:]) == tuple(shape) else F.interpolate(x, size=tuple(shape), mode="bilinear")


# -- official checkpoints --------------------------------------------------------------------------------------------


def load_infinity_vq_checkpoint(
    source: Given, *, dtype: torch.dtype | None = None, **config: object
) -> BitwiseVQModel:
    """Return the tokenizer of an official file: `infinity_vae_d32reg.pth` or `infinity_vae_d56_f8_14_patchify.pth`.

    Sizes are read off the weights. A file that shrinks pictures by 8 only is assumed to use 2 x 2 patches, as the
    official ones do.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        config: other constructor arguments of `BitwiseVQModel`, e.g. `scales=scales_for(512)`: one file serves all
            picture sizes.
    """
    weights, name = _INFINITY_VQ.read(source)
    settings = vqgan_sizes(weights, name)
    settings["bits"] = len(weights["encoder.conv_out.weight"])
    settings["patchify"] = len(settings["channel_multipliers"]) == 4

    def constants(model: BitwiseVQModel) -> dict[str, Tensor]:
        # With 64 bits the last one is negative, as in the official code.
        powers = 2 ** torch.arange(model.bits)
        ones = {key: weights[key].flatten()[:1] for key in _CONSTANTS if key in weights}
        return {
            key: powers if one.is_meta or one.eq(1).all() else powers.flip(0) for key, one in ones.items()
        }

    what = "tokenizer of Infinity"
    return loaded(
        BitwiseVQModel, settings | config, weights, name, what=what, constants=constants, dtype=dtype
    )
