"""The parts that the tokenizers of VAR and Infinity share: a picture as token maps of growing size, on one canvas.

Each tokenizer defines how a map is drawn, read and found (Tian et al. 2024, algorithms 1 and 2; Han et al. 2024).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.protocol import Side, area_of, check_ids, shape_of
from visual_spec.models.core.saved import SavedModel


class MultiscaleTokenizer(SavedModel):
    """A `ScaleTokenizer` that maps pictures to tokens `[B, L]`: the maps from coarse to fine, each in raster order.

    A subclass sets `scales`, sides or (height, width) of the maps.
    """

    scales: Sequence[Side]
    tokens_per_place: int
    codebook_size: int
    patch_size: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a picture, all scales together."""
        return sum(self.map_sizes)

    @property
    def map_sizes(self) -> list[int]:
        """Number of tokens of each map."""
        return [area_of(side) * self.tokens_per_place for side in self.scales]

    @property
    def picture_shape(self) -> tuple[int, int]:
        """Height and width of the pictures in pixels."""
        height, width = shape_of(self.scales[-1])
        return height * self.patch_size, width * self.patch_size

    # -- defined by each tokenizer ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def canvas_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the empty canvas."""

    @abstractmethod
    def codes_of(self, tokens: Tensor, scale: int, like: Tensor) -> Tensor:
        """Return the codes `[B, D, n, n]` of the tokens `[B, n * n * T]` of a scale, for a canvas `like` this one."""

    @abstractmethod
    def accumulate_codes(self, canvas: Tensor, scale: int, codes: Tensor) -> Tensor:
        """As `accumulate`, for codes `[B, D, n, n]` that need not be in the codebook."""

    @abstractmethod
    def next_map(self, canvas: Tensor, scale: int) -> Tensor:
        """Return the model's input for a scale >= 1."""

    @abstractmethod
    def decode_canvas(self, canvas: Tensor) -> Tensor:
        """Return pictures `[B, 3, H, W]` in [-1, 1] of a canvas."""

    @abstractmethod
    def encode_latents(self, images: Tensor) -> Tensor:
        """Return the map `[B, D, h, w]` that the canvas should become, for pictures `[B, 3, H, W]` in [-1, 1]."""

    @abstractmethod
    def tokens_of(self, latents: Tensor) -> Sequence[Tensor]:
        """Return the tokens of every scale, long `[B, n * n * T]`, of such a map."""

    # -- the canvas ---------------------------------------------------------------------------------------------------

    @property
    def canvas_dtype(self) -> torch.dtype:
        """The type in which a canvas is added up."""
        return self.dtype

    def begin(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the empty canvas `[B, *canvas_shape]`; device and dtype are the model's unless given."""
        shape = batch_size, *self.canvas_shape
        return torch.zeros(shape, device=device or self.device, dtype=dtype or self.canvas_dtype)

    @loads_weights
    def accumulate(self, canvas: Tensor, scale: int, tokens: Tensor) -> Tensor:
        """Return the canvas after drawing the tokens `[B, n * n * T]` of a scale onto it.

        Raises:
            ValueError: the number of tokens is not the scale's.
        """
        size, each = self.map_sizes[scale], self.tokens_per_place
        if tokens.ndim != 2 or tokens.shape[1] != size:
            bits = f": {each} bits for each of {size // each} places" if each > 1 else ""
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} given; scale {scale} has [B, {size}]{bits}."
            )
        return self.accumulate_codes(canvas, scale, self.codes_of(tokens, scale, canvas))

    # -- pictures and tokens ------------------------------------------------------------------------------------------

    def encode_tokens(self, images: Tensor) -> Tensor:
        """Return tokens, long `[B, L]`, of pictures `[B, 3, H, W]` in [-1, 1].

        Raises:
            ValueError: the pictures do not have the size of the scales.
        """
        self._check_pictures(images)
        return torch.cat(list(self.tokens_of(self.encode_latents(images))), 1)

    def maps_of(self, tokens: Tensor) -> list[Tensor]:
        """Return the model's inputs for scales 1, 2, ... of the pictures with tokens `[B, L]`: maps `[B, D, n, n]`."""
        canvas, maps = self.begin(len(tokens), tokens.device), []
        for scale, part in enumerate(self._split(tokens)[:-1]):
            canvas = self.accumulate(canvas, scale, part)
            maps.append(self.next_map(canvas, scale + 1))
        return maps

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Return pictures `[B, 3, H, W]` clamped to [-1, 1] of tokens `[B, L]`.

        Raises:
            ValueError: the number of tokens does not fit the scales, or an id is outside the codebook.
        """
        parts = self._split(tokens)
        check_ids("tokens", tokens, self.codebook_size)
        canvas = self.begin(len(tokens), tokens.device)
        for scale, part in enumerate(parts):
            canvas = self.accumulate(canvas, scale, part)
        return self.decode_canvas(canvas)

    def forward(self, images: Tensor) -> Tensor:
        """Return the reconstruction `[B, 3, H, W]` of pictures `[B, 3, H, W]` in [-1, 1]."""
        return self.decode_tokens(self.encode_tokens(images))

    def _check_pictures(self, images: Tensor) -> None:
        height, width = self.picture_shape
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, height, width):
            raise ValueError(
                f"pictures of shape {tuple(images.shape)} given; this tokenizer encodes [B, 3, {height}, {width}]; "
                "resample them first."
            )

    def _split(self, tokens: Tensor) -> Sequence[Tensor]:
        if tokens.ndim != 2 or tokens.shape[1] != self.num_tokens:
            places = f" of {self.tokens_per_place} tokens a place" if self.tokens_per_place > 1 else ""
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} given; scales {tuple(self.scales)}{places} have "
                f"[B, {self.num_tokens}]."
            )
        return tokens.split(self.map_sizes, 1)
