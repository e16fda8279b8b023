"""LlamaGen as a model of vLLM: our blocks on vLLM's attention, and captions or classes as prompt tokens.

The ids of prompts lie above the codebook (`folder.PromptIds`). A caption is read whole by the caption encoder, so a
prompt comes in one piece. All prompts have the prefix's length, as slots are counted from its end. The
padding of a shorter caption must not be seen, and vLLM's attention has no mask for single keys. So heads have channels
more than the model's, which hold zeros, but for one: 1 in all queries, and in the keys of padding a number so negative
that their weight is exactly 0.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_blocks import CaptionEmbedding, turns_of
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.serving.vllm.folder import PromptIds
from visual_spec.serving.vllm.start import windows_of

_UNSEEN = -3e4  # times 1 and the scale of scores: further below any score than float32's smallest exponential


class ServedLlamaGen(nn.Module):
    """A raster-order LlamaGen of one frame, from a folder of `folder.save_for_vllm`. Eager, and on one device.

    Raises:
        ValueError: vLLM was started with tensor parallelism, or to record graphs; or see `start.check_start`.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        windows_of(vllm_config)  # refuses settings
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            size = vllm_config.parallel_config.tensor_parallel_size
            raise ValueError(f"tensor_parallel_size={size}; this model is not split. Pass 1.")
        if not vllm_config.model_config.enforce_eager:
            raise ValueError(
                "enforce_eager=False; captions are read between the calls. Pass enforce_eager=True."
            )
        config = vllm_config.model_config.hf_config
        parts = config.visual_spec
        self.transformer = LlamaGenTransformer(**parts["transformer"])
        self.text_encoder = CaptionEncoder(**parts["text_encoder"]) if parts["text_encoder"] else None
        self.ids, self.vocab_size = PromptIds(self.transformer, self.text_encoder), config.vocab_size
        heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.more = config.head_dim - width  # channels that the heads of vLLM have beside
        self.attentions = nn.ModuleList(
            Attention(
                heads,
                config.head_dim,
                width**-0.5,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.attentions.{index}".lstrip("."),
            )
            for index in range(config.num_hidden_layers)
        )
        table = self.transformer.rotary_table()
        unturned = self.transformer.unturned(table)  # of the prefix, the last row
        self.turns: Tensor
        self.register_buffer("turns", torch.cat([table, unturned]), persistent=False)

    def embed_input_ids(self, input_ids: Tensor, *more: object, **named: object) -> Tensor:
        """Return [N, dim] of the tokens of a batch, in any order of whole prompts and tokens of pictures."""
        hidden = self.transformer.tok_embeddings(input_ids.clamp(max=self.ids.first - 1))
        in_prompt = input_ids >= self.ids.first
        if in_prompt.any():
            hidden[in_prompt] = self._prompts(input_ids[in_prompt]).to(hidden.dtype)
        return hidden

    def _whole(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The ids, with 0 in place of prompts that are not whole. Such requests end, see `Windows`."""
        length, at = self.transformer.prefix_length, torch.arange(len(input_ids), device=input_ids.device)
        starts = at - positions  # where the first token of the request would be, if it is in this call
        inside = (input_ids >= self.ids.first) & (positions < length) & (starts >= 0)
        count = torch.zeros_like(at).index_add_(0, starts.clamp(min=0), inside.long())
        broken = (input_ids >= self.ids.first) & ~(inside & (count[starts.clamp(min=0)] == length))
        return torch.where(broken, 0, input_ids)

    def _prompts(self, ids: Tensor) -> Tensor:
        """Return embeddings [P * T, dim] of the ids of P whole prompts, one after the other."""
        length = self.transformer.prefix_length
        rows = ids.view(-1, length) - self.ids.first  # [P, T]
        embedding = self.transformer.cls_embedding
        if not isinstance(embedding, CaptionEmbedding):
            return embedding.embedding_table(rows[:, 0])
        assert self.text_encoder is not None
        learned = rows >= self.ids.words
        condition = self.text_encoder(rows.masked_fill(learned, 0))
        places = (rows - self.ids.words).clamp(min=0)
        features = torch.where(learned[..., None], embedding.uncond_embedding[places], condition.features)
        condition = TextCondition(features, learned | condition.mask)
        return embedding.prefix(condition)[0].flatten(0, 1)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
        **named: object,
    ) -> Tensor:
        """Return [N, dim], what the head reads. `input_ids`, `positions`: [N], of all requests of the batch."""
        assert input_ids is not None
        input_ids = self._whole(input_ids, positions)
        hidden = self.embed_input_ids(input_ids)[None]  # [1, N, dim]
        slots = positions - self.transformer.prefix_length
        last = len(self.turns) - 1
        turns = turns_of(self.turns[slots.clamp(max=last - 1).where(slots >= 0, last)][None])
        unseen = torch.where(input_ids == self.ids.padding, _UNSEEN, 0.0).to(hidden.dtype)
        change = None
        blocks: Any = self.transformer.layers
        for block, attention in zip(blocks, self.attentions, strict=True):
            hidden, x = block.attention_norm.after(hidden, change)
            mixed = self._attend(attention, *block.attention.project(x, turns), unseen)
            hidden, x = block.ffn_norm.after(hidden, block.attention.wo(mixed))
            change = block.feed_forward(x)
        return self.transformer.norm.after(hidden, change)[1][0]

    def _attend(self, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, unseen: Tensor) -> Tensor:
        """Attend by vLLM: q, k, v [1, N, H, D] to [1, N, H * D]."""
        if self.more:
            q, k, v = (F.pad(part, (0, self.more)) for part in (q, k, v))
            q[..., -1] = 1.0
            k[..., -1] = unseen[:, None]
        q, k, v = (part[0].flatten(1).contiguous() for part in (q, k, v))
        out = attention(q, k, v).view(len(q), self.transformer.config["num_heads"], -1)
        return out[..., : out.shape[-1] - self.more].flatten(1)[None]

    def compute_logits(self, hidden_states: Tensor, *more: object) -> Tensor:
        """Return [N, V of the engine]: -inf for the ids of prompts."""
        logits = self.transformer.output(hidden_states).float()
        return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the weights of the folder.

        Raises:
            RuntimeError: a name is missing or unknown.
        """
        own, official = dict(self.state_dict()), dict(weights)
        self.load_state_dict({name: own[name] for name in own if name.startswith("attentions.")} | official)
        return set(own)
