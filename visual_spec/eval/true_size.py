"""The speed of LlamaGen at its true sizes, without its checkpoints: measured calls, stated acceptance.

What a call costs depends on sizes, not on what the weights are, so it is measured on random weights, with the real
sampler. How many drafts are accepted does depend on the weights, so it is not measured: it is stated, as the
probability that a draft is accepted, and every figure that follows from it is labelled so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.eval import measure
from visual_spec.eval.timing import PLAIN, Entry
from visual_spec.models import checkpoints, llamagen
from visual_spec.models.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.protocol import TokenGrid
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.law import TokenLaw

# Float32 arrays of the size of the logits that are alive at the peak of a step: guided and filtered logits, two laws,
# their exponentials, the residual, and noise.
_LAW_ARRAYS = 8


def architecture(name: str) -> checkpoints.Architecture:
    """The official architecture called "llamagen-xxl", or "llamagen-xl-t2i" for a text-conditional one.

    Raises:
        ValueError: another name; lists those there are.
    """
    presets = {f"llamagen-{preset.lower()}": preset for preset in llamagen.PRESETS}
    if name in presets:
        return checkpoints.transformer_architecture(presets[name], num_classes=checkpoints.NUM_CLASSES)
    if name.endswith("-t2i") and name.removesuffix("-t2i") in presets:
        return checkpoints.transformer_architecture(
            presets[name.removesuffix("-t2i")],
            num_classes=None,
            caption_dim=checkpoints.CAPTION_DIM,
            prefix_length=checkpoints.CAPTION_LENGTH,
        )
    raise ValueError(
        f"--random-weights with --model {name}; pass one of {', '.join(presets)}, with -t2i behind it for the "
        "text-conditional one."
    )


def needed_bytes(
    model: LlamaGenTransformer, *, dtype: torch.dtype, batch_size: int, window: int, guided: bool
) -> dict[str, int]:
    """Bytes of weights, cache, and logits with what is made of them. The model may be on the meta device."""
    size, rows = dtype.itemsize, batch_size * (2 if guided else 1)
    config = model.config
    places = config["prefix_length"] + model.grid.num_tokens + window
    return {
        "weights": sum(parameter.numel() for parameter in model.parameters()) * size,
        "cache": 2 * config["num_layers"] * rows * places * config["dim"] * size,
        "logits": rows * window * model.vocab_size * 4 * _LAW_ARRAYS,
    }


def refuse_what_does_not_fit(needed: dict[str, int], device: torch.device) -> None:
    """Refuse, before anything is allocated, what the device has no room for.

    Raises:
        ValueError: names what is needed, what is free, and what helps.
    """
    available, total = measure.available_memory(device), sum(needed.values())
    if total > available:
        parts = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in needed.items())
        raise ValueError(
            f"this needs {total / 1e9:.1f} GB ({parts}), and {device} has {available / 1e9:.1f} GB free; pass a "
            "smaller --model, --dtype bfloat16, or smaller --batch-sizes and --windows."
        )


def random_transformer(
    chosen: checkpoints.Architecture,
    *,
    image_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> LlamaGenTransformer:
    """A transformer of official size with random weights, made on the device it runs on."""
    return fill_at_random(on_meta(chosen, image_size), dtype=dtype, device=device, seed=seed)


def fill_at_random(model: Any, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model that is on the meta device, with random weights on another."""
    nn.Module.to(model, dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model.eval()


def on_meta(chosen: checkpoints.Architecture, image_size: int) -> LlamaGenTransformer:
    """The model without its weights.

    Raises:
        ValueError: a size that is no multiple of the 16 pixels of a token.
    """
    if image_size < 16 or image_size % 16:
        raise ValueError(f"--image-size {image_size}; pass a multiple of 16, officially 256, 384 or 512")
    with torch.device("meta"):
        return LlamaGenTransformer(**chosen.config, grid_size=image_size // 16)


def random_condition(model: LlamaGenTransformer, batch_size: int) -> TextCondition | Tensor:
    """Labels, or captions of full length with random features."""
    width = model.config["caption_dim"]
    if width is None:
        return torch.arange(batch_size, device=model.device) % model.config["num_classes"]
    length = model.config["prefix_length"]
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(batch_size, length, width, generator=generator).to(model.device, model.dtype)
    return TextCondition(features, torch.ones(batch_size, length, dtype=torch.bool, device=model.device))


class Middle:
    """The `count` slots in the middle of a model's grid as a model of their own, so that a sampler runs for some calls
    at the mean cost of a whole picture. The cache before them is empty, which costs no less to read. Counts calls.
    """

    def __init__(self, model: Any, count: int) -> None:
        self.model = model
        self.grid = TokenGrid(1, min(count, model.grid.num_tokens))
        self.vocab_size = model.vocab_size
        self.first = (model.grid.num_tokens - self.grid.num_tokens) // 2
        self.calls = 0

    def prefill(self, condition: Any, **options: Any) -> Any:
        return self.model.prefill(condition, **options)

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        self.calls += 1
        return self.model(state, tokens, slots + self.first)


def stated_tokens_per_call(probability: float, window: int) -> float:
    """Mean tokens of a call whose every draft is accepted with `probability`, whatever its place: one is certain, and
    the k-th draft counts when it and all before it are accepted. 1 + p + ... + p ** (window - 1).
    """
    return sum(probability**place for place in range(window))


@torch.no_grad()
def measure_calls(
    model: LlamaGenTransformer,
    samplers: Sequence[Entry],
    law: TokenLaw,
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    slots: int,
    probability: float,
    report: Callable[[str], Any] = lambda text: None,
) -> list[dict[str, Any]]:
    """Time the calls of plain decoding and of every sampler over `slots` slots in the middle of the grid.

    Returns:
        One dict per sampler, plain decoding first. Measured: `seconds` and `calls` of every round without the prefill,
        `ms_per_call` (quantiles), `prefill_ms`, `weight_bytes`, `cache_bytes`, `peak_memory_bytes`. Stated:
        `tokens_per_call`. From both: `ms_per_image`, `speed_up`.
    """
    device, condition = model.device, random_condition(model, batch_size)
    weight_bytes, cache_bytes = measure.bytes_per_call(
        model, condition, batch_size=batch_size, guided=law.guided
    )
    rows: list[dict[str, Any]] = []
    for entry in [Entry(PLAIN, AutoregressiveSampler(), 1), *samplers]:
        seconds, calls, prefills = [], [], []
        measure.reset_peak_memory(device)
        for number in range(warmup + runs):
            middle = Middle(model, slots)
            generator = [torch.Generator().manual_seed(number * batch_size + i) for i in range(batch_size)]
            trace = entry.sampler(
                middle, condition, law=law, generator=generator, batch_size=batch_size
            ).trace
            if number >= warmup:
                phases = dict(trace.phase_seconds)
                prefills.append(phases.pop("prefill"))
                seconds.append(sum(phases.values()))
                calls.append(middle.calls)
        tokens_per_call = stated_tokens_per_call(probability, entry.window or 1)
        per_call = measure.quantiles([s / c * 1000 for s, c in zip(seconds, calls, strict=True)])
        prefill = measure.quantiles([1000 * s for s in prefills])["p50"]
        # The prefill yields the first token.
        per_image = prefill + (model.grid.num_tokens - 1) / tokens_per_call * per_call["p50"]
        rows.append(
            {
                "name": entry.name,
                "window": entry.window,
                "sampler": measure.sampler_settings(entry.sampler),
                "batch_size": batch_size,
                "guidance_scale": law.guidance_scale,
                "tokens": model.grid.num_tokens,
                "seconds": seconds,
                "calls": calls,
                "ms_per_call": per_call,
                "prefill_ms": prefill,
                "weight_bytes": weight_bytes,
                "cache_bytes": cache_bytes,
                "peak_memory_bytes": measure.peak_memory(device),
                "tokens_per_call": tokens_per_call,
                "ms_per_image": per_image / batch_size,
                "speed_up": rows[0]["ms_per_image"] * batch_size / per_image if rows else 1.0,
            }
        )
        report(f"batch {batch_size}, {entry.name}, window {entry.window}: {per_call['p50']:.2f} ms per call")
    return rows


def acceptance_statement(probability: float) -> dict[str, Any]:
    """What the document says about where acceptance comes from."""
    return {
        "measured": False,
        "profile": "constant",
        "probability": probability,
        "meaning": "every draft is accepted with this probability, whatever its place, sampler and sample",
    }


def size_table(rows: Sequence[dict[str, Any]], probability: float) -> str:
    """The Markdown table, stated columns marked by a star, and a line that says what the star means."""
    from visual_spec.eval.bench import markdown

    header = ["batch", "guidance", "sampler", "window", "ms/call p50", "p20 - p80", "floor", "prefill ms"]
    header += ["peak MiB", "tokens/call*", "ms/image*", "speed-up*"]
    lines = []
    for row in rows:
        call = row["ms_per_call"]
        lines.append(
            [
                str(row["batch_size"]),
                f"{row['guidance_scale']:g}",
                row["name"],
                str(row["window"]),
                f"{call['p50']:.2f}",
                f"{call['p20']:.2f} - {call['p80']:.2f}",
                f"{row['floor_ms_per_call']:.2f}",
                f"{row['prefill_ms']:.1f}",
                f"{row['peak_memory_bytes'] / 2**20:.0f}",
                f"{row['tokens_per_call']:.2f}",
                f"{row['ms_per_image']:.0f}",
                f"{row['speed_up']:.2f}x",
            ]
        )
    note = (
        f"* not measured: random weights; follows from the stated acceptance of {probability:g} for every draft, "
        "and the measured calls"
    )
    return f"{markdown(header, lines)}\n\n{note}"
