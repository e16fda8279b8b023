"""The rows of an evaluation: from the samples of every setting to figures with their intervals, and to a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from visual_spec.eval.quality.accuracy import per_cent, summarise
from visual_spec.eval.quality.audio import kernel_figure
from visual_spec.eval.quality.features import features_of
from visual_spec.eval.quality.intervals import mean_figure, ratio_figure
from visual_spec.eval.quality.metrics import density_coverage, frechet_figure, precision_recall
from visual_spec.eval.quality.samples import Judge, Samples, Setting
from visual_spec.eval.report.drawing import INK, PAPER, draw_text, fit_square, wrap_text
from visual_spec.eval.speed.bench import markdown
from visual_spec.eval.speed.measure import quantiles, sampler_settings

_RESAMPLES = 200  # bootstrap resamples of a Frechet distance


def rows_of(
    settings: Sequence[Setting],
    drawn: Sequence[Samples],
    tokenizer: Samples,
    pictures: np.ndarray,
    judge: Judge,
    alone: dict[str, list[list[float]]] | None,
    *,
    on_processor: bool,
) -> dict[str, Any]:
    """The figures of all settings, each as {value, low, high} with a 95 % interval.

    Returns:
        rows, one a setting: name, kind, sampler, law, seed, lossless, identical, samples; tokens_per_call: all tokens,
        or columns of clips, over all calls; speed_up_calls: plain calls over the row's; accuracy (see
        `accuracy.summarise`); features, {extractor: frechet_to_real, frechet_to_plain, precision, recall, density,
        coverage}, against the true scenes of the same prompts, and of clips kernel_to_real, kernel_to_plain (see
        `audio.kernel_figure`); divergence and moved_mass: what `DivergenceMeter` measures a tested token and a picture,
        means over batches and over samples, None for a sampler that has none; identical_samples: how many have the
        tokens of plain decoding, None where not promised; wall_clock: {batch_size, seconds_per_picture and speed_up at
        that batch, alone_seconds and alone_speed_up at batch 1 or None}, quantiles p20, p50 and p80, the speed-ups
        those of one block or round; processor_time: the same in seconds of the processor, which others on the machine
        do not change, None unless `on_processor` says that the model ran there. cache: of a next-scale pipeline, bytes
        of keys and values a picture, {held, peak: with the copies that attention makes, share: held over plain
        decoding's}, else None. peak_memory: the most bytes that PyTorch held on a GPU in a batch, else None.
        references: {tokenizer: accuracy and features of true scenes that the tokenizer encoded and decoded}.
    """
    real = {name: features_of(network, pictures) for name, network in judge.extractors.items()}
    plain, rows, clips = drawn[0], [], pictures.ndim == 2

    def clocked(kind: str, index: int) -> dict[str, Any]:
        found, name = drawn[index], f"batch_{kind}"
        return clock_figures(
            (found.batch_sizes, plain.batch_sizes),
            (getattr(found, name), getattr(plain, name)),
            (alone[kind][index], alone[kind][0]) if alone else None,
        )

    for index, (setting, found) in enumerate(zip(settings, drawn, strict=True)):
        length = found.length
        measured = [value for value in found.batch_divergence if not np.isnan(value)]
        moved = found.moved_mass[~np.isnan(found.moved_mass)]
        exact = setting.sampler.identical and setting.plan.same_model and all(found.batch_lossless)
        promised = exact and (setting.law, setting.seed) == (settings[0].law, settings[0].seed)
        rows.append(
            {
                "name": setting.text,
                "kind": kind_of(setting, settings[0], all(found.batch_lossless)),
                **setting.describe(),
                "lossless": bool(setting.sampler.lossless) and all(found.batch_lossless),
                "identical": bool(setting.sampler.identical) and all(found.batch_lossless),
                "samples": len(found.calls),
                "tokens_per_call": ratio_figure([length] * len(found.calls), found.calls.tolist()),
                "speed_up_calls": ratio_figure(plain.calls.tolist(), found.calls.tolist()),
                "accuracy": summarise(found.hits),
                "features": {
                    name: compare_features(
                        real[name], found.features[name], plain.features[name], kernel=clips
                    )
                    for name in real
                },
                "divergence": mean_figure(measured) if measured else None,
                "moved_mass": mean_figure(moved.tolist()) if len(moved) else None,
                "identical_samples": same_samples(found.tokens, plain.tokens) if promised else None,
                "wall_clock": clocked("seconds", index),
                "processor_time": clocked("processor_seconds", index) if on_processor else None,
                "cache": cache_figures(found, plain),
                "peak_memory": max(found.batch_peak_memory, default=None),
            }
        )
    reference = {
        "accuracy": summarise(tokenizer.hits),
        "features": {
            name: compare_features(real[name], tokenizer.features[name], kernel=clips) for name in real
        },
    }
    return {"references": {"tokenizer": reference}, "rows": rows}


def same_samples(tokens: np.ndarray, others: np.ndarray) -> int:
    """How many samples of [N, ...] are equal, token for token."""
    return int((tokens == others).reshape(len(tokens), -1).all(1).sum())


def kind_of(setting: Setting, plain: Setting, exact: bool = True) -> str:
    """`plain`: the row all others are compared with. `lossy`: its law is not the model's. `control`: plain decoding
    otherwise, or a lossless sampler of another law. `lossless`: the law of `plain`.

    Args:
        exact: whether the trace says that the model's own law was drawn from, where a sampler alone does not tell.
    """
    if setting is plain:
        return "plain"
    if not plain.sampler.lossless and sampler_settings(setting.sampler) == sampler_settings(plain.sampler):
        return "control"  # of a masked model, whose law is that of its own decoding
    if not (setting.sampler.lossless and setting.plan.same_model and exact):
        return "lossy"
    same = type(setting.sampler) is type(plain.sampler) and setting.plan == plain.plan
    return "control" if same or setting.law != plain.law else "lossless"


def cache_figures(found: Samples, plain: Samples) -> dict[str, float] | None:
    """Bytes of keys and values a picture, at most over batches; see `rows_of`."""
    if not found.batch_cache_held:
        return None

    def largest(samples: Samples, values: list[int]) -> float:
        return max(value / size for value, size in zip(values, samples.batch_sizes, strict=True))

    held = largest(found, found.batch_cache_held)
    whole = largest(plain, plain.batch_cache_held)
    peak = largest(found, found.batch_cache_peak)
    return {"held": held, "peak": peak, "share": held / whole if whole else 1.0}


def compare_features(
    real: Tensor, drawn: Tensor, plain: Tensor | None = None, *, kernel: bool = False
) -> dict[str, Any]:
    """Distances of the features `[N, D]` of drawn pictures to those of the true scenes and of plain decoding.

    Args:
        kernel: kernel audio distances too.
    """
    # A resample of wide features takes seconds; few of them give a rougher interval.
    resamples = _RESAMPLES if real.shape[1] <= 256 else 10
    found: dict[str, Any] = {"frechet_to_real": frechet_figure(drawn, real, resamples=resamples)}
    if plain is not None:
        found["frechet_to_plain"] = frechet_figure(drawn, plain, resamples=resamples)
    if kernel:
        found["kernel_to_real"] = kernel_figure(real, drawn)
        if plain is not None:
            found["kernel_to_plain"] = kernel_figure(plain, drawn)
    most = len(real) - 1
    return (
        found
        | precision_recall(real, drawn, neighbours=min(3, most))
        | density_coverage(real, drawn, neighbours=min(5, most))
    )


def clock_figures(
    sizes: tuple[list[int], list[int]],
    seconds: tuple[list[float], list[float]],
    alone: tuple[list[float], list[float]] | None,
) -> dict[str, Any]:
    """Quantiles of seconds a picture and of speed-ups over plain decoding; see `rows_of`.

    Args:
        sizes, seconds: of every batch of the row, and of plain decoding.
        alone: seconds of every picture at batch 1, likewise.
    """
    own, base = (
        [spent / size for spent, size in zip(part, batch, strict=True)]
        for part, batch in zip(seconds, sizes, strict=True)
    )
    pairs = [(b, o) for b, o in zip(base, own, strict=True)] if sizes[0] == sizes[1] else []
    if not pairs:  # one of the two was drawn in more goes than the other
        pairs = [(quantiles(base)["p50"], quantiles(own)["p50"])]
    return {
        "batch_size": max(sizes[0]),
        "seconds_per_picture": quantiles(own),
        "speed_up": quantiles([b / o for b, o in pairs]),
        "alone_seconds": quantiles(alone[0]) if alone else None,
        "alone_speed_up": quantiles([b / o for o, b in zip(*alone, strict=True)]) if alone else None,
    }


def picture_sheet(rows: dict[str, np.ndarray]) -> Image.Image:
    """Pictures uint8 [n, H, W, 3] of every named row below each other, one prompt a column."""
    side, label, gap = 96, 230, 6
    columns = max(len(pictures) for pictures in rows.values())
    sheet = Image.new("RGB", (label + columns * (side + gap) + gap, len(rows) * (side + gap) + gap), PAPER)
    draw = ImageDraw.Draw(sheet)
    for line, (title, pictures) in enumerate(rows.items()):
        top = gap + line * (side + gap)
        # Broken at the commas between settings, which hold no blanks.
        for place, text in enumerate(wrap_text(title.replace(",", ", ").replace(":", ": "), 13, label - 20)):
            draw_text(draw, (10, top + 4 + 17 * place), text, 13, INK)
        for column, picture in enumerate(pictures):
            fitted = fit_square(Image.fromarray(picture), side)
            sheet.paste(fitted, (label + column * (side + gap), top))
    return sheet


def quality_table(document: dict[str, Any], extractor: str = "shapes") -> str:
    """Markdown: one line a row, intervals in brackets, for speed-ups p20 and p80.

    Speed-ups are those of processor time where the model ran on a processor: the clock counts others' work too.
    """

    def cell(figure: dict[str, float] | None, digits: int = 2) -> str:
        if figure is None:
            return "-"
        return f"{figure['value']:.{digits}f} ({figure['low']:.{digits}f}-{figure['high']:.{digits}f})"

    def times(figure: dict[str, float] | None) -> str:
        return "-" if figure is None else f"{figure['p50']:.2f}x ({figure['p20']:.2f}-{figure['p80']:.2f})"

    def cached(figure: dict[str, float]) -> str:
        return f"{figure['held'] / 2**10:.0f} ({100 * figure['share']:.0f} %)"

    clock = "wall_clock" if document["rows"][0]["processor_time"] is None else "processor_time"
    unit = "wall clock" if clock == "wall_clock" else "processor time"
    batch = document["settings"]["batch_size"]
    by_scales = document["rows"][0].get("cache") is not None
    music = "sampling_rate" in document["settings"]
    seconds = "alone_seconds" if document["rows"][0][clock]["alone_seconds"] else "seconds_per_picture"
    header = ["sampler", "kind", "cache KiB" if by_scales else "columns/call" if music else "tokens/call"]
    header += ["s/clip"] if music else []
    header += [f"{unit}, batch 1", f"batch {batch}", "attributes %"]
    header += ["class %" if by_scales else "whole prompt %"]
    header += ["Frechet to real", "to plain", *(["kernel to real"] if music else [])]
    header += ["precision", "recall", "divergence"]
    lines = []
    for row in document["rows"]:
        far, wall = row["features"][extractor], row[clock]
        lines.append(
            [
                row["name"],
                row["kind"],
                cached(row["cache"]) if by_scales else cell(row["tokens_per_call"]),
                *([f"{wall[seconds]['p50']:.2f}"] if music else []),
                times(wall["alone_speed_up"]),
                times(wall["speed_up"]),
                per_cent(row["accuracy"]["mean_attribute"]),
                per_cent(row["accuracy"]["all_correct"]),
                cell(far["frechet_to_real"]),
                cell(far["frechet_to_plain"]),
                *([cell(far["kernel_to_real"])] if music else []),
                cell(far["precision"], 3),
                cell(far["recall"], 3),
                cell(row["divergence"], 4),
            ]
        )
    for name, reference in document["references"].items():
        far = reference["features"][extractor]
        rates = [per_cent(reference["accuracy"][key]) for key in ("mean_attribute", "all_correct")]
        distances = [cell(far["frechet_to_real"]), "-", *([cell(far["kernel_to_real"])] if music else [])]
        distances += [cell(far["precision"], 3), cell(far["recall"], 3)]
        none = ["-"] * (4 if music else 3)
        lines.append([f"({name} alone)", "reference", *none, *rates, *distances, "-"])
    return markdown(header, lines)
