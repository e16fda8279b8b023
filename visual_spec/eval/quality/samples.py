"""Samples drawn for an evaluation, and what was read off their pictures, kept so that nothing is done twice.

Samples are what a pipeline draws or plays: read clip for picture below.

Sample i has prompt i and seed `seed + i`, so it depends on nothing else: neither on the batch, nor on how many
processes share the work, nor on interruptions. A folder holds the samples of one setting in two kinds of files, both
complete or absent: `draws-<first>-<end>.npz` (see `draws.draw`), which took the time, and
`judged-<first>-<end>.npz` (scores and features of its pictures), which another judge replaces.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visual_spec.eval.media import show
from visual_spec.eval.quality.features import features_of
from visual_spec.files.arrays import read_npz
from visual_spec.files.records import parse, read_object
from visual_spec.files.whole import ready_folder, write_atomically
from visual_spec.models.core.fingerprint import fingerprint

_RANGE = re.compile(r"draws-(\d+)-(\d+)\.npz")
_FILE = re.compile(r"(draws|judged)-(\d+)-(\d+)\.npz")
# What every file of a kind holds, beside samples or features.
_HELD = {
    "draws": ("calls", "moved_mass", "divergence", "seconds", "processor_seconds", "prompts"),
    "judged": ("hits", "judge"),
}
# What reading a damaged file raises, NumPy's and Python's own.
_DAMAGED = (KeyError, TypeError, ValueError)


@dataclass
class Judge:
    """What is read off a picture. `score`: (prompt, picture uint8 [H, W, 3]) -> {attribute: whether it holds}.

    A clip is float32 [samples].
    """

    score: Callable[[str, np.ndarray], dict[str, bool]]
    extractors: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the extractors and their weights."""
        return " ".join([fingerprint(self.extractors.values()), *self.extractors])

    def __call__(self, prompts: Sequence[str], pictures: np.ndarray) -> dict[str, np.ndarray]:
        """`hits`, JSON of one score a picture, and for each extractor its features [N, D]."""
        scores = [self.score(prompt, picture) for prompt, picture in zip(prompts, pictures, strict=True)]
        plain = [{name: bool(hit) for name, hit in found.items()} for found in scores]
        found = {"hits": np.array(json.dumps(plain))}
        return found | {
            name: features_of(network, pictures).numpy() for name, network in self.extractors.items()
        }


@dataclass
class Samples:
    """All samples of a setting, in order.

    Attributes:
        stored: token ids [N, L], of clips codes [N, K, T], or canvases [N, D, h, w].
        calls: target calls [N].
        length: what a call commits one or more of, the tokens of a picture or the columns of a clip.
        moved_mass, batch_divergence: those of `DivergenceMeter`, [N] and of each batch; nan for a sampler without one.
        batch_sizes, batch_seconds, batch_processor_seconds: of each batch, by the clock and of the processor.
        hits, features: what the judge said; {extractor: [N, D]}.
        batch_cache_held, batch_cache_peak, batch_lossless: of a next-scale pipeline, of each batch: bytes of keys and
            values that were held and that were there at the peak, and whether the model's own law was drawn from.
        batch_promises: whether the tokens of each batch are those of plain decoding without a condition, such as one
            of precision; nothing of files of older versions.
        batch_peak_memory: on a GPU the most memory of each batch.
        head_calls: of continuous tokens, calls of the head that waited for each other, [N]; else None.
    """

    stored: np.ndarray
    calls: np.ndarray
    length: int
    moved_mass: np.ndarray
    batch_sizes: list[int]
    batch_seconds: list[float]
    batch_processor_seconds: list[float]
    batch_divergence: list[float]
    hits: list[dict[str, bool]]
    features: dict[str, Tensor]
    batch_cache_held: list[int]
    batch_cache_peak: list[int]
    batch_lossless: list[bool]
    batch_promises: list[bool]
    batch_peak_memory: list[int]
    head_calls: np.ndarray | None = None


class SampleFolder:
    """The files of one setting. Damaged ones are set aside when it is opened, with a warning, and so drawn again.

    Args:
        path: made if it is not there.
        settings: all that fixes the samples, JSON types only; kept in `settings.json`.

    Raises:
        ValueError: the folder holds samples of other settings; names what differs.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        ready_folder(self.path)
        settle(self.path / "settings.json", settings)
        self._set_aside_damaged()

    def _set_aside_damaged(self) -> None:
        """Rename files that cannot be read whole to `<name>.damaged`."""
        for path in sorted(self.path.glob("*.npz")):
            named = _FILE.fullmatch(path.name)
            if named is None:
                continue
            try:
                _check_file(path, named[1], int(named[3]) - int(named[2]))
            except FileNotFoundError:  # another process was faster
                continue
            except _DAMAGED as error:
                path.replace(path.with_name(f"{path.name}.damaged"))
                warnings.warn(
                    f"{path} is damaged ({error or type(error).__name__}); it is set aside as "
                    f"{path.name}.damaged, and made again",
                    stacklevel=2,
                )

    def draws(self) -> list[tuple[int, int]]:
        """Half-open ranges of the samples that are there, in order."""
        matches = (_RANGE.fullmatch(path.name) for path in self.path.glob("draws-*.npz"))
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    def missing(self, first: int, end: int) -> tuple[int, int] | None:
        """The part of a block that is not there yet: the whole or its end, as files are written in order."""
        for there in self.draws():
            if there[0] <= first < there[1]:
                first = there[1]
        return (first, end) if first < end else None

    def complete(self, samples: int, judge: str) -> bool:
        """Whether all samples are there, and judged by the judge of this fingerprint."""
        ranges = [bounds for bounds in self.draws() if bounds[0] < samples]
        covered = {index for first, end in ranges for index in range(first, end)}
        return covered.issuperset(range(samples)) and all(
            self.judged_by(*bounds) == judge for bounds in ranges
        )

    def judged_by(self, first: int, end: int) -> str | None:
        """The fingerprint of the judge that saw a file of draws; None where none did."""
        found = self.read("judged", first, end, only="judge")
        return None if found is None else str(found["judge"])

    def write(self, kind: str, first: int, end: int, arrays: dict[str, Any]) -> None:
        """Write a file whole or not at all."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        write_atomically(self._file(kind, first, end), buffer.getvalue(), overwrite=True)

    def read(self, kind: str, first: int, end: int, only: str | None = None) -> dict[str, np.ndarray] | None:
        """Arrays of a file, all or one of them; None where there is no such file."""
        path = self._file(kind, first, end)
        if not path.exists():
            return None
        return read_npz(path, None if only is None else (only,))

    def _file(self, kind: str, first: int, end: int) -> Path:
        return self.path / f"{kind}-{first:06d}-{end:06d}.npz"

    def samples(self, count: int) -> Samples:
        """The first `count` samples; call it when `complete`."""
        draws, judged, sizes = [], [], []
        for first, end in self.draws():
            if first >= count:
                break
            one, other = self.read("draws", first, end), self.read("judged", first, end)
            assert one is not None and other is not None, "not complete"
            draws.append(one)
            judged.append(other)
            sizes.append(end - first)
        names = [name for name in judged[0] if name not in ("hits", "judge")]

        def joined(files: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
            return np.concatenate([file[name] for file in files])[:count]

        return Samples(
            stored=joined(draws, stored_name(draws[0])),
            calls=joined(draws, "calls"),
            length=_length(draws[0]),
            moved_mass=joined(draws, "moved_mass"),
            batch_sizes=sizes,
            batch_seconds=[float(file["seconds"]) for file in draws],
            batch_processor_seconds=[float(file["processor_seconds"]) for file in draws],
            batch_divergence=[float(file["divergence"]) for file in draws],
            hits=[found for file in judged for found in json.loads(str(file["hits"]))][:count],
            features={name: torch.from_numpy(joined(judged, name)) for name in names},
            batch_cache_held=[int(file["cache_held"]) for file in draws if "cache_held" in file],
            batch_cache_peak=[int(file["cache_peak"]) for file in draws if "cache_peak" in file],
            batch_lossless=[bool(file["lossless"]) for file in draws if "lossless" in file],
            batch_promises=[bool(file["promises"]) for file in draws if "promises" in file],
            batch_peak_memory=[int(file["peak_memory"]) for file in draws if "peak_memory" in file],
            head_calls=joined(draws, "head_calls") if "head_calls" in draws[0] else None,
        )


def _check_file(path: Path, kind: str, count: int) -> None:
    """Read a file whole: `count` samples, or what was read off them.

    Raises:
        One of `_DAMAGED`: it is no such file.
    """
    arrays = read_npz(path)
    if lacking := [name for name in _HELD[kind] if name not in arrays]:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    if kind == "draws":
        rows = [arrays[stored_name(arrays)], arrays["calls"], arrays["moved_mass"]]
        texts = parse(str(arrays["prompts"]), "prompts")
    else:
        rows = [array for name, array in arrays.items() if name not in _HELD[kind]]
        texts = parse(str(arrays["hits"]), "hits")
    if any(len(array) != count for array in [*rows, texts]):
        raise ValueError(f"it does not hold {count} samples")


def stored_name(draws: dict[str, np.ndarray]) -> str:
    """The array of a file of draws that holds the samples."""
    return "canvas" if "canvas" in draws else "tokens"


def _length(draws: dict[str, np.ndarray]) -> int:
    """What a call commits one or more of. Files of older versions do not hold it."""
    older = draws.get("columns", np.array(draws[stored_name(draws)].shape[-1]))
    return int(draws.get("length", older))


def settle(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a folder, or compare them with those its samples were drawn under.

    Raises:
        ValueError: they differ, which names where; or the file is damaged.
    """
    text = json.dumps(settings, indent=1) + "\n"
    if not path.exists():
        write_atomically(path, text, overwrite=True)
        return
    try:
        there = read_object(path)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}), so nothing tells what the samples beside it are; pass another folder"
        ) from error
    here = json.loads(text)
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if differing:
        changes = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise ValueError(f"{path.parent} holds samples of other settings ({changes}); pass another folder")


def judge_draws(
    pipe: Any, folder: SampleFolder, prompts: Sequence[str], judge: Judge, block: tuple[int, int]
) -> None:
    """Judge the pictures of the draws within a block that this judge has not seen yet.

    Pictures are made from what is stored, and in the batches of the files, so an interruption changes nothing.

    Raises:
        ValueError: samples that were drawn for other prompts.
    """
    known = judge.fingerprint
    for first, end in folder.draws():
        if not block[0] <= first < block[1]:
            continue
        draws = folder.read("draws", first, end)
        assert draws is not None
        drawn_for = json.loads(str(draws["prompts"]))
        if drawn_for != list(prompts[first:end]):
            raise ValueError(
                f"sample {first} in {folder.path} and those after it have other prompts ({drawn_for[0]!r} there, "
                f"{prompts[first]!r} here); pass another folder"
            )
        if folder.judged_by(first, end) == known:
            continue
        found = judge(prompts[first:end], show(pipe, draws[stored_name(draws)]))
        folder.write("judged", first, end, {**found, "judge": np.array(known)})
