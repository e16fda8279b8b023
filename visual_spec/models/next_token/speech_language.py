"""Language models of speech codes that read embeddings: those of a prompt, and what stands beside every code.

Their decoders are Llamas, Qwens and GPT-2s of transformers. Before the codes stand embeddings that another network made
(a thinker's hidden states, a voice, a text), and a code may be read with a vector of its slot: the text that is spoken
meanwhile, or a learned position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.transformers_cache import ImagePrompt
from visual_spec.models.next_token.cached_decoder import CachedDecoder, CachedState


@dataclass
class SpeechCodeState(CachedState):
    """One batch during decoding.

    Attributes:
        beside: [R, S, C], what is added to the embedding of the code at each slot; the last one goes on.
    """

    beside: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        if self.beside is not None:
            self.beside = self.beside[self.rows(samples)]
        super().select(samples)

    def buffers(self) -> list[Tensor]:
        return super().buffers() + ([] if self.beside is None else [self.beside])


class SpeechLanguageModel(CachedDecoder):
    """The codes of a speech language model after one batch of prompts. Token t is the code t.

    The ids of a prompt say which row of `prompt` it is.

    Args:
        decoder: of transformers, which does not change.
        table: embedding of the codes.
        head: scores all codes.
        prompt: [R, T, C'], what the decoder reads, left-padded. Rows of guidance come after the others.
        text: long [B, P], the codes that laws with a history count before the first one.
        new_tokens: L, most codes.
        beside: see `SpeechCodeState`; None: nothing is added.
        project: what the decoder reads [R, W, C'], from embeddings of codes with what is beside them.
    """

    family = "a language model of speech codes"

    def __init__(
        self,
        decoder: nn.Module,
        table: nn.Module,
        head: nn.Linear,
        prompt: Tensor,
        text: Tensor,
        *,
        new_tokens: int,
        beside: Tensor | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        size = head.weight.shape[0]
        super().__init__(decoder, table, head, list(range(size)), TokenGrid(1, new_tokens))
        self.prompt, self.text, self.beside, self.project = prompt, text, beside, project
        self.plain_draws = (size, torch.arange(size), torch.float32)

    def text_of(self, condition: ImagePrompt) -> tuple[Tensor, Tensor]:
        """Return the codes before the first one, long [B, P], and that all of them count, bool [B, P]."""
        return self.text, torch.ones_like(self.text, dtype=torch.bool)

    def of_text(self, ids: Tensor) -> Tensor:
        rows = self.prompt[ids[:, -1]]
        return F.pad(rows, (0, 0, ids.shape[1] - rows.shape[1], 0))

    def run_prompt(self, prompt: tuple[Tensor, ...], **settings: Any) -> SpeechCodeState:
        state = super().run_prompt(prompt, **settings)
        return SpeechCodeState(
            **{field.name: getattr(state, field.name) for field in fields(CachedState) if field.init},
            beside=None if self.beside is None else self.beside.expand(len(state.start), -1, -1),
        )

    def _picture_forward(
        self, state: SpeechCodeState, embeddings: Tensor, offsets: Tensor, *args: Any, **settings: Any
    ) -> Tensor:
        if state.beside is not None:
            places = offsets.clamp_max(state.beside.shape[1] - 1)[..., None]
            embeddings = embeddings + state.beside.gather(1, places.expand(-1, -1, embeddings.shape[-1]))
        read = embeddings if self.project is None else self.project(embeddings)
        return super()._picture_forward(state, read, offsets, *args, **settings)
