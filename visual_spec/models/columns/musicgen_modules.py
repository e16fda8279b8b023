"""The modules of MusicGen (Copet et al. 2023), around transformers' own classes: conditions, and the decoder's layers.

A MusicGen reads the states of a text encoder by cross-attention. A MusicGen Melody has them in front of the codes,
after the chroma of a tune (section 2.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from visual_spec.models.core.protocol import wide
from visual_spec.models.core.transformers_cache import attention_mask, cache_argument
from visual_spec.models.next_token.llamagen import TextCondition

WHOLE_MODELS = ("MusicgenForConditionalGeneration", "MusicgenMelodyForConditionalGeneration")

Padding = Literal["masked", "zeros"]


@dataclass
class MusicCondition(TextCondition):
    """The condition of a clip: text, for a continuation the codes of the clip so far, and of a Melody a tune to follow.

    Attributes:
        features: [B, T, C], the text encoder's output, before any projection.
        mask: bool [B, T], true at words, wherever the padding is. A row without any word is unconditional.
        codes: long [B, K, P], the first P frames, or None.
        melody: [B, L, C'], the chroma of a tune, as transformers' processor makes them (`input_features`), or None.
    """

    codes: Tensor | None = None
    melody: Tensor | None = None


@torch.no_grad()
def text_condition(model: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> TextCondition:
    """Return the text encoder's output for a caption, from a whole MusicGen or MusicGen Melody.

    Args:
        input_ids, attention_mask: [B, T], from the model's processor. Without a mask, nothing is padding.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    features = model.text_encoder(input_ids=input_ids, attention_mask=mask).last_hidden_state
    return TextCondition(features, mask.bool())


class MusicgenModules:
    """The modules of a MusicGen-type model, run with any mask.

    Args:
        model: a `MusicgenForConditionalGeneration`, the bare `MusicgenForCausalLM`, or a
            `MusicgenMelodyForConditionalGeneration`, whose condition is a prefix of the codes; it is not changed.
        padding: how the decoder treats padding of a caption. "masked": not seen, as in transformers. "zeros": zero
            states that attention is spread over, as in audiocraft, whose results therefore depend on how far a caption
            was padded. Without padding both are the same. Of a Melody both programs have zero states.

    Attributes:
        prefixed: whether the condition is a prefix of the codes (Melody), and not read by cross-attention.

    Raises:
        TypeError: the model is of another kind.
        ValueError: `padding` is unknown, or the attention implementation does not take our mask.
    """

    def __init__(self, model: Any, padding: Padding = "masked") -> None:
        kinds = {kind.__name__ for kind in type(model).__mro__}
        if not kinds & {*WHOLE_MODELS, "MusicgenForCausalLM"}:
            raise TypeError(
                f"{type(model).__name__} given; pass a {', a '.join(WHOLE_MODELS)} or a MusicgenForCausalLM."
            )
        if padding not in ("masked", "zeros"):
            raise ValueError(
                f"padding={padding!r}; pass 'masked' (as in transformers) or 'zeros' (as in audiocraft)."
            )
        whole = bool(kinds & set(WHOLE_MODELS))
        self.prefixed = WHOLE_MODELS[1] in kinds
        self.model = model
        self.padding = padding
        self.projection: Any = getattr(model, "enc_to_dec_proj", None)
        language_model = model.decoder if whole else model
        self.heads: Any = language_model.lm_heads
        self.decoder: Any = language_model.model.decoder
        self.config: Any = language_model.config
        self.vocab_size: int = self.config.vocab_size
        self.special_id = self.vocab_size  # of entries without a code; MAGNeT's mask
        self.text_width = self.config.hidden_size if self.projection is None else self.projection.in_features
        self.num_codebooks: int = self.config.num_codebooks
        self.num_channels: int = self.config.audio_channels
        if self._attention not in ("sdpa", "eager"):
            raise ValueError(
                f"the decoder runs with attn_implementation={self._attention!r}, which takes no mask of one row a "
                "sample; call set_attn_implementation('sdpa') on it (on model.decoder, of a whole MusicGen)."
            )

    @property
    def device(self) -> torch.device:
        """The device of the input codes."""
        table = self.decoder.embed_tokens[0]
        target = getattr(getattr(table, "_hf_hook", None), "execution_device", None)
        return table.weight.device if target is None else torch.device(target)

    @property
    def _attention(self) -> str:
        return self.decoder.layers[0].self_attn.config._attn_implementation

    # -- the condition -------------------------------------------------------------------------------------------------

    def check_condition(self, condition: TextCondition, batch_size: int) -> None:
        """Refuse what is no `TextCondition` (TypeError), or of another batch or width (ValueError)."""
        if not isinstance(condition, TextCondition):
            raise TypeError(
                f"{type(condition).__name__} given; this model takes a TextCondition(features, mask), or a "
                "MusicCondition to go on from codes."
            )
        for part in condition.parts:
            features, mask = part.features, part.mask
            fits = features.ndim == 3 and len(features) == batch_size and features.shape[2] == self.text_width
            if not fits or mask.shape != features.shape[:2]:
                raise ValueError(
                    f"features {tuple(features.shape)} and mask {tuple(mask.shape)} given; this model takes "
                    f"[{batch_size}, T, {self.text_width}] and [{batch_size}, T]."
                )
        melody = condition.melody if isinstance(condition, MusicCondition) else None
        if melody is None:
            return
        if not self.prefixed:
            raise ValueError(
                f"melody {tuple(melody.shape)} given; a {type(self.model).__name__} follows no tune, leave it out."
            )
        count = self.model.config.num_chroma
        if melody.ndim != 3 or (len(melody), melody.shape[2]) != (batch_size, count) or not melody.shape[1]:
            raise ValueError(
                f"melody {tuple(melody.shape)} given; this model takes [{batch_size}, L, {count}], the input_features "
                "of its processor."
            )

    def encoder_states(
        self, condition: TextCondition, *, guided: bool = False, dropped: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """States [R, T, dim] for the cross-attention, unconditional rows last when `guided`, and bool [R, T], the
        states that are seen. Of a Melody, the prefix: the chroma in front of the text, all of it seen.

        An unconditional row has zero states, so its cross-attention adds nothing (MusicGen section 2.3 drops the text);
        or the negative caption's where the condition has one. `dropped`, bool [B], marks rows that are
        unconditional (training for guidance).
        """
        states, mask = self._text_states(condition)
        if dropped is not None:
            states = states * ~dropped[:, None, None]
        if guided:
            other, seen = torch.zeros_like(states), torch.zeros_like(mask)
            if condition.negative is not None:
                other, seen = self._text_states(condition.negative)
            length = max(mask.shape[1], seen.shape[1])
            states, other = (F.pad(x, (0, 0, 0, length - x.shape[1])) for x in (states, other))
            mask, seen = (F.pad(x, (0, length - x.shape[1])) for x in (mask, seen))
            states, mask = torch.cat([states, other]), torch.cat([mask, seen])
        if self.prefixed:
            states = torch.cat([self._chroma(condition, dropped, guided), states], 1)
            return states, torch.ones(states.shape[:2], dtype=torch.bool, device=self.device)
        if self.padding == "zeros":
            return states, torch.ones_like(mask)
        # A row that sees nothing gives nan in some attention kernels; here it sees zeros.
        return states, mask | ~mask.any(-1, keepdim=True)

    def _text_states(self, condition: TextCondition) -> tuple[Tensor, Tensor]:
        """States [B, T, dim] of a caption, zero at padding, and bool [B, T], its words."""
        mask = condition.mask.to(self.device).bool()
        states = condition.features.to(self.device)
        if self.projection is None:
            states = states.to(self.decoder.layer_norm.weight.dtype)
        else:
            states = self.projection(states.to(self.projection.weight.dtype))
        return states * mask[..., None], mask

    def _chroma(self, condition: TextCondition, dropped: Tensor | None, guided: bool) -> Tensor:
        """States [R, N, dim] of the tunes, repeated or cut to N; no tune: its first chroma sounds all the time."""
        config, projection = self.model.config, getattr(self.model, "audio_enc_to_dec_proj", None)
        dtype = self.decoder.layer_norm.weight.dtype if projection is None else projection.weight.dtype
        melody = condition.melody if isinstance(condition, MusicCondition) else None
        if melody is None:
            melody = torch.zeros(len(condition.mask), 1, config.num_chroma)
            melody[..., 0] = 1
        melody = melody.to(self.device, dtype)
        nothing = torch.zeros_like(melody)
        nothing[..., 0] = 1
        if dropped is not None:
            melody = torch.where(dropped.to(self.device)[:, None, None], nothing, melody)
        if guided:
            melody = torch.cat([melody, nothing])
        states = melody if projection is None else projection(melody)
        return states.repeat(1, -(-config.chroma_length // states.shape[1]), 1)[:, : config.chroma_length]

    # -- running the decoder -------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [R, W, dim] of columns [R, W, K], without positions."""
        tables = self.decoder.embed_tokens
        total = tables[0](tokens[..., 0])
        for codebook in range(1, self.num_codebooks):
            total = total + tables[codebook](tokens[..., codebook])
        return total

    def position_table(self, count: int) -> Tensor:
        """Return sinusoidal embeddings [count, dim] of the first positions."""
        table = self.decoder.embed_positions
        if count <= len(table.weights):
            return table.weights[:count]
        return table.get_embedding(count, table.embedding_dim).to(table.weights)

    def run(
        self,
        embeddings: Tensor,
        visible: Tensor,
        states: Tensor,
        seen: Tensor,
        cache: EncoderDecoderCache | None = None,
    ) -> list[Tensor]:
        """Return the output of each layer, [R, W, dim]; the last one is normalised and is the heads' input.

        Args:
            embeddings: [R, W, dim], including positions.
            visible: bool [R or 1, W, S], the keys that each position sees; S = W without a cache.
            states, seen: from `encoder_states`; of a Melody, whose embeddings hold them, they are not read.
        """
        mask = attention_mask(visible[:, None], embeddings, self._attention)
        text_mask = attention_mask(seen[:, None, None], states, self._attention)
        hidden, outputs = embeddings, []
        held = {cache_argument(self.decoder.layers[0]): cache}
        for layer in self.decoder.layers:
            if self.prefixed:
                hidden = layer(hidden, mask, **held)[0]
            else:
                hidden = layer(hidden, mask, states, encoder_attention_mask=text_mask, **held)
            outputs.append(hidden)
        outputs[-1] = self.decoder.layer_norm(hidden)
        return outputs

    def score(self, features: Tensor) -> Tensor:
        """Return logits [R, W, K, V] of features [R, W, dim], in at least float32."""
        return wide(torch.stack([head(features) for head in self.heads], dim=2))
