"""VibeVoice with random weights: what a latent costs `generate` of transformers, and the same `generate` accelerated.

What a latent costs depends on sizes, not on what the weights are. Every step is made to say audio, so that every step
makes a latent. Both share one set of weights and take turns, round by round.

    python -m benchmarks.sizes speech [--size SIZE] [--batch 1]
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.eval import measure
from visual_spec.eval.intervals import quantiles
from visual_spec.eval.timing import Report, add_floors

_BOS, _EOS, _AUDIO, _PAD, _END = range(5)
HEAD_STEPS, GUIDANCE = 10, 1.3  # of the released models


@dataclass(frozen=True)
class SpeechSize:
    """Layers, widths and heads of the language model, its vocabulary, the head's inner width, and filters of the codec.

    Attributes:
        depths: layers of the codec's stages; each but the last one is followed by a change of rate.
        rates: by which the rate changes.
    """

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    head_inner: int
    filters: int
    depths: tuple[int, ...] = (3, 3, 3, 3, 3, 3, 8)
    rates: tuple[int, ...] = (2, 2, 4, 5, 5, 8)


SIZES = {
    "tiny": SpeechSize(2, 32, 4, 64, 64, 64, 2, (1, 1, 1), (2, 2)),
    "middle": SpeechSize(8, 512, 8, 2048, 8192, 1536, 8, (1, 1, 1), (4, 5)),
    "1.5b": SpeechSize(28, 1536, 12, 8960, 151936, 4608, 32),
}


def vibevoice(size: str | SpeechSize, *, dtype: torch.dtype, device: torch.device) -> Any:
    """A `VibeVoiceForConditionalGeneration` with random weights, made on the device.

    Args:
        size: of `SIZES`, or a size of your own.
    """
    from transformers import VibeVoiceConfig, VibeVoiceForConditionalGeneration

    one = SIZES[size] if isinstance(size, str) else size
    codec: dict[str, Any] = dict(
        num_filters=one.filters, depths=list(one.depths), downsampling_ratios=list(one.rates)
    )
    config = VibeVoiceConfig(
        audio_config=dict(model_type="vibevoice_acoustic_tokenizer", hidden_size=64, **codec),
        semantic_model_config=dict(
            model_type="vibevoice_acoustic_tokenizer_encoder", hidden_size=128, **codec
        ),
        text_config=dict(
            model_type="qwen2",
            vocab_size=one.vocabulary,
            hidden_size=one.width,
            intermediate_size=one.inner,
            num_hidden_layers=one.layers,
            num_attention_heads=one.heads,
            num_key_value_heads=2,
            max_position_embeddings=65536,
        ),
        diffusion_head_config=dict(intermediate_size=one.head_inner),
        pad_token_id=_PAD,
        eos_token_id=_END,
        audio_bos_token_id=_BOS,
        audio_eos_token_id=_EOS,
        audio_token_id=_AUDIO,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = VibeVoiceForConditionalGeneration(config)
    return model.to(dtype).eval()


def measure_latents(
    model: Any,
    *,
    batch_size: int,
    latents: int,
    runs: int,
    warmup: int,
    prompt: int = 64,
    scale: float = GUIDANCE,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time whole generations of `latents` latents after a prompt of `prompt` tokens.

    Args:
        model: of `vibevoice`.

    Returns:
        One dict a row, `generate` first: `seconds` of every round; `calls` of the language model in a generation, of
        which the prefill is one; `tokens_per_call`, latents over these; `ms_per_call` and `ms_per_image`, milliseconds
        a call and a clip (quantiles); `speed_up`, over `generate`, both of one round; `floor_ms_per_call` and
        `floor_share` (see `add_floors`) for the weights that a latent reads; `peak_memory_bytes`.
    """
    import visual_spec

    device = next(model.parameters()).device
    ids = torch.randint(_END + 1, model.config.vocab_size, (batch_size, prompt), device=device)
    settings: dict[str, Any] = dict(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=latents,
        guidance_scale=scale,
        num_diffusion_steps=HEAD_STEPS,
        logits_processor=[_says_audio],
        pad_token_id=_PAD,
    )
    # A copy of the outside alone: the modules, and so the weights, are the same.
    plain, fast = copy.copy(model), visual_spec.accelerate(copy.copy(model))
    names = {"transformers generate": plain, "accelerated": fast}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks, calls = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for number in range(warmup + runs):
        for name, one in names.items():
            measure.reset_peak_memory(device)
            counts: list[int] = []
            handle = one.model.language_model.register_forward_hook(lambda *_: counts.append(1))  # noqa: B023
            try:
                torch.manual_seed(number)
                _, elapsed = measure.timed(lambda: one.generate(**settings), device)  # noqa: B023
            finally:
                handle.remove()
            peaks[name], calls[name] = measure.peak_memory(device), len(counts)
            if number >= warmup:
                seconds[name].append(elapsed)
                report(f"batch {batch_size}, round {number - warmup + 1} of {runs}, {name}: {elapsed:.3f} s")
    rows = [
        dict(
            name=name,
            window=1,
            sampler=None,
            batch_size=batch_size,
            guidance_scale=scale,
            seconds=seconds[name],
            calls=calls[name],
            tokens_per_call=latents / calls[name],
            ms_per_call=quantiles([1000 * one / calls[name] for one in seconds[name]]),
            ms_per_image=quantiles([1000 * one / batch_size for one in seconds[name]]),
            speed_up=quantiles(
                [a / b for a, b in zip(seconds["transformers generate"], seconds[name], strict=True)]
            ),
            weight_bytes=_latent_bytes(model, name == "accelerated", scale != 1) * latents / calls[name],
            cache_bytes=0,
            peak_memory_bytes=peaks[name],
        )
        for name in names
    ]
    add_floors(rows, measure.copy_bandwidth(device))
    return rows


def _says_audio(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[:, _AUDIO] = scores.max() + 1
    return scores


def _latent_bytes(model: Any, fast: bool, guided: bool) -> int:
    """Bytes of the weights that a latent reads: of the language model, the head and the codec."""
    parts = model.model
    head = parts.diffusion_head
    language = _bytes(parts.language_model.layers) + _bytes(model.lm_head)
    codec = _bytes(parts.audio_tower.decoder) + _bytes(parts.semantic_tokenizer_encoder)
    if not fast:
        return (3 if guided else 2) * language + HEAD_STEPS * _bytes(head) + codec
    in_loop = [head.noisy_images_proj, head.final_layer.linear_2, *(layer.ffn for layer in head.layers)]
    once = _bytes(head) - _bytes(head.timestep_proj)
    return language + once + (HEAD_STEPS - 1) * sum(map(_bytes, in_loop)) + codec


def _bytes(module: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in module.parameters())
