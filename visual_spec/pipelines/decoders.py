"""What turns the tokens of a model into pictures. Each decoder makes a canvas of tokens, and pixels of a canvas.

The canvas is what a call with `output_type="latent"` returns.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.protocol import ScaleModel, ScaleTokenizer, area_of


class VQDecoder:
    """Token ids on a grid; the canvas is long [B, h, w].

    Args:
        model: the tokenizer.
        transformer: what draws the tokens.
    """

    part = "vq_model"  # the component of a pipeline

    def __init__(self, model: Any, transformer: Any) -> None:
        self.model, self.transformer = model, transformer

    @property
    def patch(self) -> int:
        """Side of a token in pixels."""
        return self.model.patch_size

    def check_fit(self) -> None:
        """Refuse a tokenizer of other codes or another grid than the transformer's.

        Raises:
            ValueError: names both.
        """
        grid, side = self.transformer.grid, self.model.tokens_per_side
        vocab_size, codes = self.transformer.vocab_size, self.model.config["codebook_size"]
        if (vocab_size, grid.height, grid.width) != (codes, side, side):
            raise ValueError(
                f"the transformer predicts {grid.height} x {grid.width} tokens out of {vocab_size}, but the "
                f"tokenizer decodes {side} x {side} out of {codes}; load both from the same model."
            )

    def canvas(self, tokens: Tensor, height: int) -> Tensor:
        """The canvas of tokens [B, h * w], of `height` rows."""
        return rearrange(tokens, "b (h w) -> b h w", h=height)

    def pixels(self, canvas: Tensor) -> Tensor | list[Tensor]:
        """Pictures [B, 3, H, W] in [-1, 1] of a canvas; of clips a list of them."""
        grid, size = self.transformer.grid, tuple(canvas.shape[1:])
        return self.model.decode_tokens(
            canvas.flatten(1), *([] if size == (grid.height, grid.width) else [size])
        )


class AmusedDecoder(VQDecoder):
    """As `VQDecoder`; the tokenizer may have more codes than the transformer predicts."""

    def check_fit(self) -> None:
        codes, own = self.transformer.vocab_size, self.model.config["num_vq_embeddings"]
        if codes > own:
            raise ValueError(
                f"the transformer predicts {codes} codes, but the tokenizer has {own}; load both from the same model."
            )

    def pixels(self, canvas: Tensor) -> Tensor:
        return self.model.decode_tokens(canvas.flatten(1), tuple(canvas.shape[1:]))


class FrameDecoder(VQDecoder):
    """Token ids of all frames; the canvas is long [B, T, h, w].

    Frames may be of another size than the pictures that the tokenizer was made for: it is convolutional.
    """

    def check_fit(self) -> None:
        grid, codes = self.transformer.grid, self.model.config["codebook_size"]
        if self.transformer.vocab_size != codes:
            raise ValueError(
                f"the transformer predicts tokens out of {self.transformer.vocab_size}, but the tokenizer decodes "
                f"tokens out of {codes}; load both from the same model."
            )
        if grid.frames < 2:
            raise ValueError("the transformer draws one picture, no frames; use ImagePipeline.")

    def canvas(self, tokens: Tensor, height: int) -> Tensor:
        return rearrange(tokens, "b (t h w) -> b t h w", h=height, w=self.transformer.grid.width)

    def pixels(self, canvas: Tensor) -> list[Tensor]:
        # Clip by clip: successive frames share most tokens, but pixels take memory.
        return [self.model.decode_latents(self.model.quantize.lookup(clip)).clamp(-1, 1) for clip in canvas]


class CodesDecoder(VQDecoder):
    """Vectors on a grid, codes of a tokenizer or between them; the canvas is float [B, d, h, w]."""

    def check_fit(self) -> None:
        super().check_fit()
        model, length = self.transformer, self.model.config["codebook_dim"]
        if model.token_dim != length:
            raise ValueError(
                f"the student draws tokens of {model.token_dim} numbers, but the tokenizer's codes have {length}; load "
                "both from the same release."
            )

    @property
    def codebook(self) -> Tensor:
        """The code of every token [V, d]."""
        return self.model.quantize.codes

    def vectors(self, tokens: Tensor) -> Tensor:
        """Tokens as they are drawn, or the codes of ids."""
        if tokens.is_floating_point():
            return tokens
        with at_hand(self.model):
            return self.codebook[tokens]

    def canvas(self, tokens: Tensor, height: int) -> Tensor:
        return rearrange(self.vectors(tokens), "b (h w) d -> b d h w", h=height)

    def pixels(self, canvas: Tensor) -> Tensor:
        return self.model.decode_latents(canvas.to(self.model.dtype)).clamp(-1, 1)


class KLDecoder(VQDecoder):
    """Continuous tokens of an `AutoencoderKL`, or patches of them; the canvas is float [B, d, h, w]."""

    part = "vae"

    @property
    def side(self) -> int:
        """Latents per side of a token."""
        return getattr(self.transformer, "patch", 1)

    @property
    def patch(self) -> int:
        return self.side * 2 ** (len(self.model.config["block_out_channels"]) - 1)

    def check_fit(self) -> None:
        if self.transformer.grid.frames > 1:
            raise ValueError(
                f"the transformer draws clips of {self.transformer.grid.frames} frames, and this pipeline pictures; "
                "pass one of pictures, or draw latents by calling the sampler."
            )
        drawn = self.transformer.token_dim // self.side**2
        if self.model.config["latent_channels"] != drawn:
            raise ValueError(
                f"the transformer draws tokens of {drawn} numbers, but the autoencoder decodes "
                f"{self.model.config['latent_channels']}; load both from the same model."
            )

    def canvas(self, tokens: Tensor, height: int) -> Tensor:
        shape = "b (h w) (p q d) -> b d (h p) (w q)"
        return rearrange(tokens, shape, h=height, p=self.side, q=self.side)

    @property
    def scale(self) -> float:
        """Of the autoencoder's latents; signs have none."""
        return self.model.config.get("scaling_factor", 1.0)

    def pixels(self, canvas: Tensor) -> Tensor:
        return self.model.decode((canvas / self.scale).to(self.model.dtype)).sample

    def encode(self, pictures: Tensor) -> Tensor:
        """The most likely canvas of pictures [B, 3, H, W] in [-1, 1]."""
        with at_hand(self.model):
            posterior = self.model.encode(pictures.to(self.model.device, self.model.dtype)).latent_dist
        return posterior.mode() * self.scale


class ScaleDecoder(CodesDecoder):
    """Token maps, coarse to fine, as ids or as vectors; the canvas [B, D, h, w] is their sum."""

    @property
    def codebook(self) -> Tensor:
        return self.model.codebook.detach().clone()

    def check_fit(self) -> None:
        model = self.model
        check_scales(self.transformer, model, "tokenizer has", model.codebook_size, model.code_dim)

    def canvas(self, tokens: Tensor, height: int = 0) -> Tensor:
        """The canvas of tokens [B, L], or of the tokens of the first scales."""
        model, add = self.model, "accumulate_codes" if tokens.is_floating_point() else "accumulate"
        # The type of the logits, in which the sampler adds up the canvas.
        own = tokens.dtype if tokens.is_floating_point() else model.dtype
        canvas = model.begin(len(tokens), tokens.device, torch.promote_types(own, torch.float32))
        each = getattr(model, "tokens_per_place", 1)
        ends = accumulate(area_of(side) * each for side in model.scales)
        for scale, (side, end) in enumerate(zip(model.scales, ends, strict=True)):
            if end > tokens.shape[1]:
                break
            part = tokens[:, end - area_of(side) * each : end]
            if tokens.is_floating_point():
                part = part.mT.unflatten(2, (side, side)).to(model.dtype)
            canvas = getattr(model, add)(canvas, scale, part)
        return canvas

    def pixels(self, canvas: Tensor) -> Tensor:
        return self.model.decode_canvas(canvas)


def check_scales(
    student: Any, other: ScaleModel | ScaleTokenizer, what: str, codes: int, length: int
) -> None:
    """Refuse a tokenizer or a teacher of other scales or codes than a student draws.

    Args:
        what: of whom the error tells what, such as "teacher draws".
        codes, length: of `other`: how many codes, and how long each is.

    Raises:
        ValueError: names both.
    """
    own = (student.scales, student.vocab_size, student.token_dim)
    if (tuple(other.scales), codes, length) != own:
        raise ValueError(
            f"the {what} scales {tuple(other.scales)} of {codes} codes with {length} numbers, and the student draws "
            f"{own[0]} of {own[1]} with {own[2]}; load all from the same release."
        )
