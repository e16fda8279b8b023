"""A set of samples compared with another one for the same prompts and seeds, such as plain decoding's.

The statement about the sampler is what it keeps of a plain decoding with the law settings of the other set, by what the
manifests say (`samplers.core.trace`); where the two sets differ in more than the sampler, it says nothing about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from visual_spec.eval.intervals import mean_figure, rate
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.set_files import read_run
from visual_spec.samplers.core.trace import IDENTICAL, LOSSLESS, LOSSY, NEAR_TIES, OTHER, UNKNOWN, kept, named
from visual_spec.samplers.registry import all_samplers, sampler_class

# By what `DecodeTrace.promise` says.
STATEMENTS = {
    IDENTICAL: "The sampler promises the tokens of plain decoding for every seed, and so its law.",
    NEAR_TIES: "The sampler promises the tokens of plain decoding up to near-ties, which rounding decides.",
    LOSSLESS: "The sampler promises the law of plain decoding, not the same samples. The test suite enumerates what "
    "it may draw from a small model, and compares that with the law (tests/exactness).",
    LOSSY: "The sampler departs from the law of plain decoding.",
    OTHER: "The sampler draws from another law than plain decoding's.",
    UNKNOWN: "Nothing is promised.",
}
_SAMPLER = {"sampler", "drafter", "refiner", "plan"}  # what may differ; "plan" was saved by earlier versions


def compared(drawn: SampleFiles, other: SampleFiles) -> dict[str, Any]:
    """Return what the manifests of two sets say; their prompts and seeds are the same.

    Returns:
        beside: the folder of the other set; same_samples: the share of samples that are equal byte for byte, with its
        interval; differing: settings other than the sampler in which the sets differ; promise and statement: of the
        sampler, beside the plain decoding of the other set, "not known" where that is none; kept: whether a
        promise of the same tokens holds, None where none is made or the batches differ; divergence and moved_mass: of
        a lossy sampler, the measured distance of a tested token and the sum over a sample, else None.

    Raises:
        ValueError, OSError: as `read_run`; a promise that nobody makes.
    """
    runs = [read_run(one.path) for one in (drawn, other)]
    names = sorted({*runs[0], *runs[1]} - _SAMPLER)
    differing = [name for name in names if runs[0].get(name) != runs[1].get(name)]
    same = rate(drawn.same(other))
    laws = [_law_settings(one.lines[0], run) for one, run in zip((drawn, other), runs, strict=True)]
    # What a sample keeps of plain decoding with its own law settings. Earlier versions knew no other.
    promises = {line.get("own_promise", line.get("promise", UNKNOWN)) for line in drawn.lines}
    plain = {entry.class_name for entry in all_samplers() if entry.plain}
    comparable = set(differing) <= {"batch_size"} and runs[1].get("sampler", {}).get("class") in plain
    promise = promises.pop() if comparable and len(promises) == 1 else UNKNOWN
    if promise not in STATEMENTS:
        raise ValueError(
            f"{drawn.path} promises {promise!r}; known are {', '.join(STATEMENTS)}; run sample again"
        )
    promise = kept(promise, *laws)
    others = f" ({named(*laws)})" if promise == OTHER else ""
    return {
        "beside": str(other.path),
        "same_samples": same,
        "differing": differing,
        "promise": promise,
        "statement": STATEMENTS[promise].removesuffix(".") + others + "." if others else STATEMENTS[promise],
        # In a batch of another size the same tokens may become pixels by other roundings.
        "kept": same["hits"] == same["total"] if promise == IDENTICAL and not differing else None,
        "divergence": _measured(drawn, "divergence"),
        "moved_mass": _measured(drawn, "moved_mass"),
    }


def summary(comparison: dict[str, Any]) -> str:
    """The comparison in sentences."""
    same = comparison["same_samples"]
    text = f"{same['hits']} of {same['total']} samples are, byte for byte, equal to {comparison['beside']}."
    if comparison["differing"]:
        text += f" The sets also differ in {', '.join(comparison['differing'])}."
    text += f" {comparison['statement']}"
    if comparison["kept"] is False:
        text += " This promise is broken."
    if comparison["promise"] == LOSSY and comparison["divergence"] is None:
        text += " It measured nothing of how far."
    if comparison["divergence"] is not None:
        moved, sample = comparison["divergence"], comparison["moved_mass"]
        text += f" Divergence, as it measured: {moved['value']:.4f} of a tested token, {sample['value']:.3f} summed "
        text += "over a sample."
    return text


def _law_settings(line: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The law settings of a set; where earlier versions wrote none, as its sampler says without the model."""
    if "law_settings" in line:
        return line["law_settings"]
    settings = dict(run.get("sampler", {}))
    known = {entry.class_name: entry for entry in all_samplers()}
    entry = known.get(settings.pop("class", None))
    return {} if entry is None else sampler_class(entry).from_config(settings).law_settings


def _measured(samples: SampleFiles, name: str) -> dict[str, float] | None:
    values = [line[name] for line in samples.lines if name in line]
    return mean_figure(values) if values else None
