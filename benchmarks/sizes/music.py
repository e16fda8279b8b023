"""MusicGen of official size with random weights: what a step costs in the middle of a clip of 30 seconds.

What a step costs depends on sizes, not on what the weights are. Acceptance does depend on them, and is not stated here:
rows give milliseconds a call. Beside our samplers stands transformers' `generate`. The codec is a small one, as it runs
after the last step, and the text's features are random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.sizes.baselines import Marks
from benchmarks.sizes.next_token import time_sampler, window_of
from visual_spec.eval import measure
from visual_spec.eval.intervals import quantiles
from visual_spec.eval.settings import Setting, sampler_settings
from visual_spec.eval.speed.rounds import with_graphs
from visual_spec.eval.timing import Report, add_floors
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition
from visual_spec.samplers.core.graph import can_record, forget

# Copet et al. 2023, section 3.1, and the released configurations: layers, width, heads, feed-forward width.
SIZES = {
    "small": (24, 1024, 16, 4096),
    "medium": (48, 1536, 24, 6144),
    "large": (48, 2048, 32, 8192),
}
CODES, CODEBOOKS, TEXT_WIDTH, TEXT_LENGTH = 2048, 4, 768, 16
FRAMES = 1500  # of 30 seconds


def musicgen(
    size: str | tuple[int, int, int, int] = "medium", *, dtype: torch.dtype, device: torch.device
) -> Any:
    """A `MusicgenForConditionalGeneration` with random weights, made on the device.

    Args:
        size: of `SIZES`, or layers, width, heads and feed-forward width.
    """
    from transformers import (
        EncodecConfig,
        MusicgenConfig,
        MusicgenDecoderConfig,
        MusicgenForConditionalGeneration,
        T5Config,
    )

    layers, width, heads, inner = SIZES[size] if isinstance(size, str) else size
    config = MusicgenConfig(
        text_encoder=T5Config(d_model=TEXT_WIDTH, d_kv=64, d_ff=64, num_layers=1, num_heads=1, vocab_size=64),
        audio_encoder=EncodecConfig(
            target_bandwidths=[2.2],
            sampling_rate=32000,
            upsampling_ratios=[8, 5, 4, 4],
            num_filters=4,
            hidden_size=16,
            num_lstm_layers=1,
            codebook_size=CODES,
        ),
        decoder=MusicgenDecoderConfig(
            vocab_size=CODES,
            max_position_embeddings=2048,
            num_hidden_layers=layers,
            ffn_dim=inner,
            num_attention_heads=heads,
            hidden_size=width,
            num_codebooks=CODEBOOKS,
            audio_channels=1,
            pad_token_id=CODES,
            bos_token_id=CODES,
            dropout=0.0,
        ),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = MusicgenForConditionalGeneration(config)
    model.to(dtype).eval()
    settings = model.generation_config
    settings.decoder_start_token_id = settings.bos_token_id = settings.pad_token_id = CODES
    return model


@torch.no_grad()
def measure_steps(
    model: Any,
    settings: Sequence[Setting],
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    steps: int,
    frames: int = FRAMES,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time calls over `steps` steps after the first half of a clip of `frames` frames.

    Args:
        model: of `musicgen`.
        settings: the first is plain decoding.

    Returns:
        One dict per row, `generate` first: `seconds` and `calls` of every round without the prefill, `ms_per_call`
        (quantiles), `floor_ms_per_call` and `floor_share` (see `add_floors`), `peak_memory_bytes`, of our samplers
        also what `time_sampler` gives; `weight_bytes` and `cache_bytes` of a call.
    """
    given, law = frames // 2, settings[0].law
    device = next(model.parameters()).device
    columns = MusicgenColumnModel(model, given + steps, prompt_frames=given)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(CODES, (batch_size, CODEBOOKS, given), generator=generator).to(device)
    features = torch.randn(batch_size, TEXT_LENGTH, TEXT_WIDTH, generator=generator)
    features = features.to(device, next(model.parameters()).dtype)
    mask = torch.ones(batch_size, TEXT_LENGTH, dtype=torch.bool, device=device)
    condition = MusicCondition(features, mask, codes)
    state = columns.prefill(condition, batch_size=batch_size, guided=law.guided, window=1)
    costs = _call_bytes(columns, state, batch_size, given)
    recordable = can_record(state)
    del state
    rows: list[dict[str, Any]] = []

    def add(name: str, window: int, sampler: Any, time_it: Callable[[], dict[str, Any]]) -> None:
        measure.reset_peak_memory(device)
        found = time_it()
        found |= dict(name=name, window=window, sampler=sampler, batch_size=batch_size, **costs)
        found |= dict(guidance_scale=law.guidance_scale, peak_memory_bytes=measure.peak_memory(device))
        rows.append(found)
        report(f"batch {batch_size}, {name}, window {window}: {found['ms_per_call']['p50']:.2f} ms per call")

    def ours(setting: Setting) -> dict[str, Any]:
        return time_sampler(setting, columns, condition, batch_size, runs, warmup)

    def theirs() -> dict[str, Any]:
        found = [_time_generate(model, condition, law, steps) for _ in range(warmup + runs)][warmup:]
        seconds, calls = [one[0] for one in found], [one[1] for one in found]
        each = [1000 * s / c for s, c in zip(seconds, calls, strict=True)]
        return dict(
            seconds=seconds,
            calls=calls,
            ms_per_call=quantiles(each),
            phase_ms_per_call={},
            gap_ms_per_call=None,
        )

    add("transformers generate", 1, None, theirs)
    for setting in with_graphs(settings, device, recordable=recordable):
        add(
            setting.name, window_of(setting), sampler_settings(setting.sampler), lambda one=setting: ours(one)
        )
        forget(columns)  # its memory would count for the next row
    add_floors(rows, measure.copy_bandwidth(device))
    return rows


def _call_bytes(columns: MusicgenColumnModel, state: Any, batch_size: int, given: int) -> dict[str, int]:
    """Weights, keys and values that a call cannot but read, of the clip so far and of the text."""
    empty = torch.zeros(batch_size, 1, CODEBOOKS, dtype=torch.long, device=columns.device)
    first = torch.zeros(batch_size, 1, dtype=torch.long, device=columns.device)
    weights = measure.weight_bytes_per_call(columns.model, lambda: columns(state, empty, first))
    config, rows = columns.config, len(state.logits)
    place = (
        2 * config.num_hidden_layers * config.hidden_size * columns.decoder.layer_norm.weight.element_size()
    )
    return dict(weight_bytes=weights, cache_bytes=rows * (given + TEXT_LENGTH) * place)


def _time_generate(model: Any, condition: MusicCondition, law: Any, steps: int) -> tuple[float, int]:
    """Seconds of calls of transformers' `generate` after the codes of a condition, and how many calls."""
    from transformers.modeling_outputs import BaseModelOutput

    codes: Tensor | None = condition.codes
    assert codes is not None
    count = steps + CODEBOOKS - 1
    marks = Marks(model.decoder.model.decoder, 1)
    with marks:
        model.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=condition.features),
            attention_mask=condition.mask.long(),
            decoder_input_ids=codes.flatten(0, 1),
            guidance_scale=law.guidance_scale if law.guided else None,
            do_sample=True,
            temperature=law.temperature,
            top_k=law.top_k,
            max_new_tokens=count,
        )
    return marks.between(1, marks.tokens - 1), marks.tokens - 2
