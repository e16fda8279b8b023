"""aMUSEd through diffusers' own modules (Patil et al. 2024): a U-ViT over VQ tokens, conditioned by CLIP.

Both classes are diffusers', with the contracts of this library: `from_pretrained(folder, subfolder="transformer")` and
`subfolder="vqvae"` load them from the folders on the Hub. diffusers' pipeline of the same name is deprecated; these do
not need it.

Tokens that are known are marked by a boolean here. diffusers' scheduler marks them by the largest confidence of the
dtype, whose logarithm noise can beat in half precision, and then hides known tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.models.unets.uvit_2d import UVit2DModel
from torch import Tensor

from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import TokenGrid, wide

if TYPE_CHECKING:
    from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

AESTHETIC_SCORE = 6.0


@dataclass
class ClipCondition:
    """What CLIP says of prompts, and of the prompt that guidance leads away from.

    Attributes:
        pooled, states: [B, C] and [B, T, D], the projected summary, and the states before the last layer.
        null_pooled, null_states: [1, C] and [1, T, D], or as many rows as prompts.
        pixels_per_token: of the tokenizer that makes the pictures, whose size the model reads.
    """

    pooled: Tensor
    states: Tensor
    null_pooled: Tensor
    null_states: Tensor
    pixels_per_token: int = 16


@torch.no_grad()
def clip_condition(
    text_encoder: CLIPTextModelWithProjection,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    negative_prompt: str = "",
) -> ClipCondition:
    """Encode prompts as aMUSEd was trained.

    Args:
        text_encoder: a `CLIPTextModelWithProjection`.
        tokenizer: its `CLIPTokenizer`.
        negative_prompt: what guidance leads away from.
    """

    def encode(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        # A tokenizer may be saved without what its model reads.
        length = min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
        ids = tokenizer(
            list(texts), return_tensors="pt", padding="max_length", truncation=True, max_length=length
        )
        output = text_encoder(
            ids.input_ids.to(text_encoder.device), return_dict=True, output_hidden_states=True
        )
        return output.text_embeds, output.hidden_states[-2]

    return ClipCondition(*encode(prompts), *encode([negative_prompt]))


@dataclass
class AmusedState(MaskedState):
    """What one batch is conditioned on, rows of R = B or 2B when guided.

    Attributes:
        pooled, states: [R, C] and [R, T, D].
        sizes: [R, 5], width, height, crop and aesthetic score of the picture that is asked for.
    """

    pooled: Tensor
    states: Tensor
    sizes: Tensor

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples, len(self.pooled))
        self.pooled, self.states, self.sizes = self.pooled[rows], self.states[rows], self.sizes[rows]


class AmusedTransformer(UVit2DModel):
    """aMUSEd's U-ViT as a `MaskedModel`. The mask has the last id of its vocabulary."""

    @property
    def grid(self) -> TokenGrid:
        """The grid of the size it was trained at."""
        return TokenGrid(self.config["sample_size"], self.config["sample_size"])

    @property
    def mask_id(self) -> int:
        return self.config["vocab_size"] - 1

    @property
    def vocab_size(self) -> int:
        """Codes that can be drawn: never the mask."""
        return min(self.config["codebook_size"], self.mask_id)

    @torch.no_grad()
    def prepare(
        self,
        condition: ClipCondition,
        *,
        batch_size: int,
        guided: bool,
        aesthetic_score: float = AESTHETIC_SCORE,
    ) -> AmusedState:
        """See `MaskedModel`. `aesthetic_score`: of the pictures that are asked for."""
        if not isinstance(condition, ClipCondition):
            raise TypeError(
                f"{type(condition).__name__} given; aMUSEd takes a ClipCondition (clip_condition)."
            )
        if len(condition.pooled) != batch_size:
            raise ValueError(
                f"a condition of {len(condition.pooled)} prompts for {batch_size} samples given."
            )
        pooled, states = condition.pooled, condition.states
        if guided:
            pooled = torch.cat([pooled, condition.null_pooled.expand_as(pooled)])
            states = torch.cat([states, condition.null_states.expand_as(states)])
        side = float(self.grid.width * condition.pixels_per_token)
        sizes = torch.tensor(
            [side, side, 0.0, 0.0, aesthetic_score], device=states.device, dtype=states.dtype
        )
        return AmusedState(guided, states.device, pooled, states, sizes.expand(len(states), -1))

    @decodes
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state: AmusedState, tokens: Tensor, stage: int = 0
    ) -> Tensor:
        """Logits `[R, L, V]` of every slot, given `tokens [B, L, 1]` with the mask id where they are hidden."""
        ids = tokens[..., 0].unflatten(1, (self.grid.height, -1))
        if state.guided:
            ids = ids.repeat(2, 1, 1)
        logits = super().forward(ids, state.states, state.pooled, state.sizes)  # [R, codes, H, W]
        return wide(logits.flatten(2).mT[..., : self.vocab_size])


class AmusedVQModel(VQModel):
    """aMUSEd's tokenizer with the contract of `visual_spec.models.next_token.llamagen_vq.VQModel`."""

    @property
    def patch_size(self) -> int:
        return 2 ** (len(self.config["block_out_channels"]) - 1)

    @torch.no_grad()
    def encode_tokens(self, images: Tensor) -> Tensor:
        output = self.encode((images + 1) / 2)  # it was trained on pictures in [0, 1]
        return self.quantize(output.latents)[2][2].reshape(len(images), -1)

    @torch.no_grad()
    def decode_tokens(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Pictures `[B, 3, H, W]` in [-1, 1] of token ids `[B, h * w]` of a grid `size`; None: a square one."""
        if self.dtype == torch.float16 and self.config.get("force_upcast"):
            self.float()
            try:
                return self.decode_tokens(tokens, size)
            finally:
                self.half()
        size = size or (round(tokens.shape[1] ** 0.5),) * 2
        shape = (len(tokens), *size, self.config["latent_channels"])
        output: Any = self.decode(
            tokens.unflatten(1, size),  # pyright: ignore[reportArgumentType]
            force_not_quantize=True,
            shape=shape,
        )
        return 2 * output.sample.clamp(0, 1) - 1
