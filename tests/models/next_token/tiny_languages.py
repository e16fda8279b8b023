"""Causal language models of transformers, real classes but tiny and random, in float64. Nothing is downloaded."""

from typing import Any

import torch
import transformers

VOCABULARY = 96
CODES, END = (40, 80), 80  # ids of the codes; the end follows them, as in ACE-Step's vocabulary
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=END,
    pad_token_id=0,
)
_GPT: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=256,
    bos_token_id=1,
    eos_token_id=END,
    pad_token_id=0,
)
# Class, and settings of its configuration. Windows are shorter than the texts.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _SIZES),
    "qwen2": ("Qwen2ForCausalLM", _SIZES),
    "qwen3": ("Qwen3ForCausalLM", _SIZES | dict(head_dim=8)),
    "mistral": ("MistralForCausalLM", _SIZES | dict(sliding_window=7)),
    "gemma": ("GemmaForCausalLM", _SIZES | dict(head_dim=8)),
    "gemma2": ("Gemma2ForCausalLM", _SIZES | dict(head_dim=8, sliding_window=7)),
    "gemma3": (
        "Gemma3ForCausalLM",
        _SIZES | dict(head_dim=8, sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "gpt-neox": ("GPTNeoXForCausalLM", _SIZES),
    "phi3": ("Phi3ForCausalLM", _SIZES),
    "granite": ("GraniteForCausalLM", _SIZES | dict(logits_scaling=3.0, embedding_multiplier=2.0)),
    "cohere": ("CohereForCausalLM", _SIZES | dict(logit_scale=0.3)),
    "olmo2": ("Olmo2ForCausalLM", _SIZES),
    "starcoder2": ("Starcoder2ForCausalLM", _SIZES),
}


def language_model(name: str, **changes: Any) -> Any:
    """A model with weights large enough that its laws differ from slot to slot. Of another name than those of CLASSES
    the configuration holds `changes`, and the sizes of a Llama."""
    kind, settings = CLASSES.get(name, (f"{name}ForCausalLM", _SIZES))
    model = getattr(transformers, kind)(getattr(transformers, kind).config_class(**(settings | changes)))
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.ndim >= 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    # These compute attention in float32.
    return (model.float() if name in ("GPTNeo", "Doge") else model.double()).eval()


def texts(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded prompts: text, and some codes at their ends."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(2, CODES[1], (length,), generator=generator)
        mask[row, longest - length :] = 1
    return dict(input_ids=ids, attention_mask=mask.long())
