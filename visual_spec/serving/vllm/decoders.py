"""Janus and GLM-Image on vLLM's own decoders; from folders of `token_models`. Emu3 is vLLM's Llama as it is."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.glm4 import Glm4ForCausalLM
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.llama import LlamaForCausalLM

from visual_spec.serving.vllm.start import windows_of


class ServedJanus(LlamaForCausalLM):
    """Janus: vLLM's Llama, whose ids of pictures lie above the text's, with the head of pictures."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        from transformers import JanusVQVAEConfig
        from transformers.models.janus.modeling_janus import JanusVQVAEHead

        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.image_ids = config.visual_spec["image_ids"]
        self.vocab_size = config.vocab_size
        self.lm_head = JanusVQVAEHead(JanusVQVAEConfig(**config.visual_spec["head"]))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return [N, V of the engine]: -inf for the ids of text."""
        first, stop = self.image_ids
        return F.pad(self.lm_head(hidden_states), (first, self.vocab_size - stop), value=-torch.inf)


class ServedGlmImage(Glm4ForCausalLM, SupportsMRoPE):
    """The token stage of GLM-Image, from text: vLLM's GLM-4 with rotary positions of three axes.

    vLLM counts a request's positions upwards after its prompt, on all axes alike. Tokens of a grid count by row and
    column, from the length of the prompt on. So a request goes on at a multiple of its prompt's length that
    no prompt reaches, and `forward` reads length and place from the position.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        windows = windows_of(vllm_config)
        assert windows is not None
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.visual_spec["scored"], bias=False)
        for layer in self.model.layers:  # GLM-4 turns neighbouring channels, GLM-Image the two halves
            layer.self_attn.rotary_emb = get_rope(
                layer.self_attn.head_dim,
                max_position=config.max_position_embeddings,
                rope_parameters=config.rope_parameters,
                is_neox_style=True,
            )
        self.stride = vllm_config.model_config.max_model_len + 1
        axes, start = [], 0
        for grid in windows.served.grids:
            place = torch.arange(grid.num_tokens)
            axes.append(start + torch.stack([0 * place, place // grid.width, place % grid.width]))
            start += max(grid.height, grid.width)
        self.axes: Tensor
        self.register_buffer("axes", torch.cat(axes, 1), persistent=False)  # [3, places]

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[object]
    ) -> tuple[Tensor, int]:
        """Return the positions of a prompt, [3, T], and what vLLM adds to the number of tokens after it."""
        length = len(input_tokens)
        return torch.arange(length).expand(3, -1), self.stride * length - length

    def forward(self, input_ids: Tensor | None, positions: Tensor, *more: object, **named: object) -> Tensor:
        if positions.ndim == 1:  # vLLM measures memory
            positions = positions.expand(3, -1)
        length, place = positions[0] // self.stride, positions[0] % self.stride
        drawn = length + self.axes[:, place.clamp(max=self.axes.shape[1] - 1)]
        return super().forward(input_ids, torch.where(length > 0, drawn, positions), *more, **named)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return [N, V of the engine]: -inf for ids that the head does not score."""
        logits = self.lm_head(hidden_states)
        return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)
