"""From the samples of every setting to figures with their intervals, to a table, and to a sheet of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from einops import rearrange
from PIL import Image, ImageDraw
from torch import Tensor

from visual_spec.eval.intervals import mean_figure, quantiles, ratio_figure
from visual_spec.eval.quality.accuracy import hits_of, summarise
from visual_spec.eval.quality.audio import kernel_figure
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.neighbours import density_coverage, precision_recall
from visual_spec.eval.quality.published import frechet_of_pairs
from visual_spec.eval.report.drawing import INK, PAPER, draw_text, fit_square, mel_picture, wrap_text
from visual_spec.eval.settings import Setting, sampler_settings
from visual_spec.eval.tables import Column, cells, column, interval, markdown
from visual_spec.eval.words import words_of
from visual_spec.samplers.core.trace import IDENTICAL, LOSSLESS, LOSSY, OTHER, kept, promised

_OF_NEIGHBOURS = ("precision", "recall", "density", "coverage")


@dataclass(frozen=True)
class Judged:
    """The samples of a setting, and what was read off them.

    Attributes:
        samples: the set.
        times: its batches, see `set_files.read_times`; none where no sampler drew it.
        attributes: what the parser of the data says, [N, A], see `extractors.parsed_attributes`.
        features: by extractor, [N, D].
    """

    samples: SampleFiles
    times: list[dict[str, Any]]
    attributes: Tensor
    features: dict[str, Tensor]

    def each(self, name: str) -> list[Any]:
        """An entry of the manifest, of every sample that has it."""
        return [line[name] for line in self.samples.lines if name in line]

    def batches(self, name: str) -> list[Any]:
        """A fact of every batch that has it."""
        return [time[name] for time in self.times if name in time]

    @property
    def accuracy(self) -> dict[str, object]:
        """See `accuracy.summarise`; without figures if the parser knows none of the prompts."""
        hits = hits_of(self.attributes)
        if any(hits):
            return summarise(hits)
        return {"all_correct": None, "mean_attribute": None, "attributes": {}, "unread": len(hits)}


def figures_of(
    settings: Sequence[Setting],
    drawn: Sequence[Judged],
    tokenizer: Judged | None,
    real: dict[str, Tensor] | None,
    alone: dict[str, Any] | None,
    *,
    on_processor: bool,
    kernels: bool = False,
) -> dict[str, object]:
    """The figures of all settings, each as {value, low, high} with a 95 % interval.

    Args:
        drawn: samples of each setting; the first is plain decoding.
        tokenizer: true samples that the tokenizer encoded and decoded; None: nobody knows what is true.
        real: features of the true samples, likewise.
        alone: seconds at batch 1, see `evaluate.time_alone`; None: not timed.
        on_processor: whether the model ran on a processor.
        kernels: kernel distances too.

    Returns:
        rows, one a setting: name, kind, sampler, law, seed, lossless, samples; identical: whether it promises the
        tokens of plain decoding in this precision; tokens_per_call: all tokens, or columns of clips, over all calls;
        speed_up_calls: plain calls over the setting's; head_calls: of continuous tokens, mean calls of the head a
        sample that waited for each other, else None; accuracy (see `accuracy.summarise`; its figures are None
        if the parser knows no prompt); features, {extractor: frechet_to_real, frechet_to_plain, precision, recall,
        density, coverage}, against the true samples of the same prompts (without these None, but for
        frechet_to_plain), and with `kernels` kernel_to_real, kernel_to_plain (see `audio.kernel_figure`); divergence
        and moved_mass: what `DivergenceMeter` measures a tested token and a sample,
        means over batches and over samples, None for a sampler that has none; identical_samples: how many are, byte
        for byte, plain decoding's, None where not promised; wall_clock: {batch_size, seconds_per_picture and
        speed_up at that batch, alone_seconds and alone_speed_up at batch 1 or None}, quantiles p20, p50 and p80, the
        each speed-up of one batch or round; processor_time: the same in seconds of the processor, which others on the
        machine do not change, None unless `on_processor`. cache: of a next-scale pipeline, bytes of keys and values a
        picture, {held, peak: with the copies that attention makes, share: held over plain decoding's}, else None.
        peak_memory: the most bytes that PyTorch held on a GPU in a batch, else None.
        references: {tokenizer: accuracy and features of `tokenizer`}.
    """

    def compared(judged: Judged, plain: Judged | None = None) -> dict[str, object]:
        strata = judged.samples.prompts
        return {
            name: compare_features(
                None if real is None else real[name],
                judged.features[name],
                None if plain is None else plain.features[name],
                strata=strata,
                kernel=kernels,
            )
            for name in judged.features
        }

    rows = []
    for index, (setting, one) in enumerate(zip(settings, drawn, strict=True)):
        seconds = {}
        if alone is not None:
            seconds = {
                kind: (alone[kind][index], alone[kind][0]) for kind in ("seconds", "processor_seconds")
            }
        rows.append(
            {
                **setting_figures(setting, settings[0], one, drawn[0]),
                "accuracy": one.accuracy,
                "features": compared(one, drawn[0]),
                **clocks_of(one, drawn[0], seconds, on_processor=on_processor),
                "cache": cache_figures(one, drawn[0]),
                "peak_memory": max(one.batches("peak_memory"), default=None),
            }
        )
    if tokenizer is None:
        return {"references": {}, "rows": rows}
    reference = {"accuracy": tokenizer.accuracy, "features": compared(tokenizer)}
    return {"references": {"tokenizer": reference}, "rows": rows}


def setting_figures(setting: Setting, first: Setting, judged: Judged, plain: Judged) -> dict[str, object]:
    """Return what a setting is, what it promises, and its calls; see `figures_of`.

    Args:
        first: plain decoding, and `plain` its samples.
    """
    promise = _promise(setting, judged, first, plain)
    calls, divergence, moved, heads = (
        judged.each("calls"), judged.batches("divergence"), judged.each("moved_mass"), judged.each("head_calls")
    )  # fmt: skip
    # With `exact_width` the tokens equal plain decoding with `exact_width`.
    widths = {bool(one.sampler.config.get("exact_width")) for one in (setting, first)}
    exact = all(judged.batches("promises")) and len(widths) == 1
    same = promise == IDENTICAL and (setting.law, setting.seed) == (first.law, first.seed)
    return {
        "name": setting.text,
        "kind": kind_of(setting, first, promise),
        **setting.describe(),
        "lossless": promise in (IDENTICAL, LOSSLESS),
        "identical": promise == IDENTICAL and exact,
        "samples": len(calls),
        "tokens_per_call": ratio_figure([judged.times[0]["length"]] * len(calls), calls),
        "speed_up_calls": ratio_figure(plain.each("calls"), calls),
        "head_calls": mean_figure(heads) if heads else None,
        "divergence": mean_figure(divergence) if divergence else None,
        "moved_mass": mean_figure(moved) if moved else None,
        "identical_samples": sum(judged.samples.same(plain.samples)) if same else None,
    }


def _promise(setting: Setting, judged: Judged, first: Setting, plain: Judged) -> str:
    """What a setting keeps of the first one, in any precision: by its draws, where they tell, else by its sampler."""
    keeps = setting.sampler.keeps if all(judged.batches("lossless")) else LOSSY
    laws = [one.each("law_settings")[:1] for one in (judged, plain)]
    if not all(laws):
        laws = [[one.sampler.law_settings] for one in (setting, first)]
    return kept(keeps, laws[0][0], laws[1][0])


def clocks_of(
    judged: Judged, plain: Judged, alone: dict[str, tuple[list[float], list[float]]], *, on_processor: bool
) -> dict[str, object]:
    """wall_clock and processor_time of a setting; see `figures_of`."""

    def clocked(kind: str) -> dict[str, object]:
        seconds = judged.batches(kind), plain.batches(kind)
        return clock_figures(judged.times[0]["samples"], seconds, alone.get(kind))

    return {
        "wall_clock": clocked("seconds"),
        "processor_time": clocked("processor_seconds") if on_processor else None,
    }


def kind_of(setting: Setting, plain: Setting, promise: str | None = None) -> str:
    """`plain`: the setting all others are compared with. `lossy`: its law is not the model's. `control`: plain decoding
    otherwise, or a lossless sampler of another law. `lossless`: the law of `plain`.

    Args:
        promise: what the setting keeps of plain decoding; None: as its sampler says without a run.
    """
    promise = promised(setting.sampler, plain.sampler) if promise is None else promise
    if setting is plain:
        return "plain"
    if plain.sampler.keeps in (LOSSY, OTHER) and sampler_settings(setting.sampler) == sampler_settings(
        plain.sampler
    ):
        return "control"  # of a masked model, whose law is defined by its own decoding
    if promise not in (IDENTICAL, LOSSLESS):
        return "lossy"
    same = type(setting.sampler) is type(plain.sampler) and setting.same_models(plain)
    return "control" if same or setting.law != plain.law else "lossless"


def cache_figures(drawn: Judged, plain: Judged) -> dict[str, float] | None:
    """Bytes of keys and values a picture, at most over batches; see `figures_of`."""
    if not drawn.batches("cache_held"):
        return None

    def largest(judged: Judged, name: str) -> float:
        return max(judged.batches(name)) / judged.times[0]["samples"]

    held, whole = largest(drawn, "cache_held"), largest(plain, "cache_held")
    return {"held": held, "peak": largest(drawn, "cache_peak"), "share": held / whole if whole else 1.0}


def compare_features(
    real: Tensor | None,
    drawn: Tensor,
    plain: Tensor | None = None,
    *,
    strata: Sequence[str] | None = None,
    kernel: bool = False,
) -> dict[str, object]:
    """Distances of the features `[N, D]` of drawn samples to true samples and to plain decoding.

    Args:
        strata: what each sample was asked for; see `published.deal`.
        kernel: kernel audio distances too.
    """
    figures: dict[str, object] = {}
    for name, other in (("real", real), ("plain", plain)):
        if other is not None:
            figures[f"frechet_to_{name}"] = frechet_of_pairs(drawn, other, strata)
            if kernel:
                figures[f"kernel_to_{name}"] = kernel_figure(other, drawn)
    if real is None:
        missing = ("frechet_to_real", *(["kernel_to_real"] if kernel else []), *_OF_NEIGHBOURS)
        return figures | dict.fromkeys(missing)
    most = len(real) - 1
    return (
        figures
        | precision_recall(real, drawn, neighbours=min(3, most))
        | density_coverage(real, drawn, neighbours=min(5, most))
    )


def clock_figures(
    batch_size: int,
    seconds: tuple[Sequence[float], Sequence[float]],
    alone: tuple[list[float], list[float]] | None,
) -> dict[str, Any]:
    """Quantiles of seconds a picture and of speed-ups over plain decoding; see `figures_of`.

    Args:
        seconds: of every batch of the setting, and of plain decoding.
        alone: seconds of every picture at batch 1, likewise.
    """
    own, base = seconds
    return {
        "batch_size": batch_size,
        "seconds_per_picture": quantiles([spent / batch_size for spent in own]),
        "speed_up": quantiles([b / o for b, o in zip(base, own, strict=True)]),
        "alone_seconds": quantiles(alone[0]) if alone else None,
        "alone_speed_up": quantiles([b / o for o, b in zip(*alone, strict=True)]) if alone else None,
    }


def thumbnails(samples: SampleFiles, count: int, side: int = 96) -> np.ndarray:
    """The first samples of a set at a glance, uint8 [N, H, W, 3].

    Pictures as they are; of clips of frames four frames in two rows, the first and the last among them; of clips of
    sound log mel spectrograms.
    """
    if samples.medium == "image":
        return samples.pictures(0, count)
    if samples.medium == "video":
        clips = np.stack(list(samples.videos(0, count)))
        places = np.linspace(0, clips.shape[1] - 1, 4).round().astype(int)
        return rearrange(clips[:, places], "n (a b) h w c -> n (a h) (b w) c", a=2)
    return np.stack(
        [np.asarray(mel_picture(clip, rate, side, side)) for clip, rate in samples.clips(0, count)]
    )


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
        for place, picture in enumerate(pictures):
            fitted = fit_square(Image.fromarray(picture), side)
            sheet.paste(fitted, (label + place * (side + gap), top))
    return sheet


def quality_table(document: dict[str, Any], extractor: str = "shapes") -> str:
    """Markdown: see `quality_cells`."""
    return markdown(*quality_cells(document, extractor))


def quality_cells(document: dict[str, Any], extractor: str = "shapes") -> tuple[list[str], list[list[str]]]:
    """Headers and lines: one a row, intervals in brackets, for speed-ups p20 and p80.

    Speed-ups are in processor time where the model ran on a processor: the clock counts others' work too.
    """

    def times(header: str, key: str) -> Column:
        return column(header, "{:.2f}x ({:.2f}-{:.2f})", *(f"{key}.{name}" for name in ("p50", "p20", "p80")))

    words = words_of(document)
    clock = "wall_clock" if document["rows"][0]["processor_time"] is None else "processor_time"
    unit = "wall clock" if clock == "wall_clock" else "processor time"
    batch = document["settings"]["batch_size"]
    seconds = "alone_seconds" if document["rows"][0][clock]["alone_seconds"] else "seconds_per_picture"
    of_heads = document["rows"][0].get("head_calls") is not None  # results of older versions do not hold it
    far = f"features.{extractor}"
    columns = [column("sampler", "{}", "name"), column("kind", "{}", "kind")]
    if words.caches:
        columns.append(column("cache KiB", "{:.0f} ({:.0f} %)", "cache.kib", "cache.per_cent"))
    else:
        columns.append(interval(f"{words.unit}s/call", "tokens_per_call"))
    if of_heads:
        columns.append(column("head calls", "{:.0f}", "head_calls.value"))
    if words.kernels:
        columns.append(column("s/clip", "{:.2f}", f"{clock}.{seconds}.p50"))
    columns += [
        times(f"{unit}, batch 1", f"{clock}.alone_speed_up"),
        times(f"batch {batch}", f"{clock}.speed_up"),
        interval("attributes %", "accuracy.mean_attribute", 1, times=100),
        interval(f"{words.whole} %", "accuracy.all_correct", 1, times=100),
        interval("Frechet to real", f"{far}.frechet_to_real"),
        interval("to plain", f"{far}.frechet_to_plain"),
        *([interval("kernel to real", f"{far}.kernel_to_real")] if words.kernels else []),
        interval("precision", f"{far}.precision", 3),
        interval("recall", f"{far}.recall", 3),
        interval("divergence", "divergence", 4),
    ]
    rows = [
        row | {"cache": held and {"kib": held["held"] / 2**10, "per_cent": 100 * held["share"]}}
        for row in document["rows"]
        for held in [row.get("cache")]
    ]
    rows += [
        {"name": f"({name} alone)", "kind": "reference", **reference}
        for name, reference in document["references"].items()
    ]
    return cells(rows, columns)
