"""Sets of samples that somebody drew, as a scorer reads them, and their features, kept so that nothing is done twice.

A set is a folder of pictures, of clips of sound or of videos, or an `.npz` file as ADM's evaluator takes it: `arr_0`,
uint8 [N, H, W, 3], and of a reference also `mu` and `sigma`, the moments of its Inception features, and `mu_s` and
`sigma_s`, of its maps within Inception. Videos have a dimension more: `arr_0` is [N, T, H, W, 3].
"""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from visual_spec.eval.quality.media_files import MEDIA, read_clip, read_picture, read_video, resized
from visual_spec.eval.quality.published import Gaussian
from visual_spec.eval.quality.set_files import MANIFEST, read_manifest
from visual_spec.files.arrays import read_npz
from visual_spec.files.documents import json_text
from visual_spec.files.reading import inside, open_regular
from visual_spec.files.whole import whole_file, write_atomically
from visual_spec.models.core.fingerprint import fingerprint

CHUNK = 1000  # samples whose features are one file
_ARRAYS = "arr_0"


@dataclass(frozen=True)
class SampleFiles:
    """A set of samples.

    Attributes:
        path: folder or `.npz` file.
        files: of a folder, relative to it, in the order of its manifest, else of their names.
        lines: of its manifest, one a file; none where it has no manifest.
    """

    path: Path
    files: tuple[str, ...] = ()
    lines: tuple[dict[str, Any], ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> SampleFiles:
        """Find the samples.

        Raises:
            FileNotFoundError: no such folder or file.
            ValueError: no samples in it, of two kinds, or outside of it; a damaged manifest.
        """
        path = Path(path)
        if path.suffix.lower() == ".npz" and path.is_file():
            return cls(path)
        if not path.is_dir():
            raise FileNotFoundError(f"no folder of samples and no .npz file at {path}")
        if (path / MANIFEST).exists() or (path / MANIFEST).is_symlink():
            lines = read_manifest(path)
            return cls(path, tuple(line["file"] for line in lines), tuple(lines))
        if (path / "run.json").is_file():
            raise ValueError(f"{path} is not complete: it has no manifest.jsonl yet; run sample to its end")
        endings = tuple(ending for kind in MEDIA.values() for ending in kind)
        every = sorted(p.relative_to(path) for p in path.rglob("*") if not p.is_dir())
        files = [file for file in every if file.suffix.lower() in endings and not _is_none(file)]
        kinds = sorted({_medium(file.suffix) for file in files})
        if len(kinds) != 1:
            what = f"files of {' and '.join(kinds)}" if kinds else f"no {', '.join(endings)} files"
            raise ValueError(f"{path} holds {what}; pass a folder of pictures, of clips, or of videos")
        names = [file.as_posix() for file in files]
        for name in names:
            inside(path, name, path)
        media = {*endings, *Image.registered_extensions()}
        kept = set(files)
        others = (file for file in every if file.suffix.lower() in media and file not in kept)
        if left := [file.as_posix() for file in others]:
            named = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            warnings.warn(f"{path}: {len(names)} samples; {named} are none, and left out", stacklevel=2)
        return cls(path, tuple(names))

    @property
    def medium(self) -> str:
        """ "image", "audio" or "video"."""
        if self.files:
            return _medium(Path(self.files[0]).suffix)
        return "video" if self._array is not None and self._array.ndim == 5 else "image"

    @property
    def prompts(self) -> list[str] | None:
        """Return what each sample was asked for, as the manifest says."""
        return [line["prompt"] for line in self.lines] if self.lines else None

    def same(self, other: SampleFiles) -> list[bool]:
        """Whether each sample is, byte for byte, that of another set."""
        return [one == two for one, two in zip(self.digests, other.digests, strict=True)]

    def moments(self, names: tuple[str, ...]) -> Gaussian | None:
        """Return what an `.npz` file states under the names of a mean and of a covariance, where it does.

        Raises:
            ValueError: they are not finite, or do not fit.
        """
        if self.files or not names:
            return None
        if names not in self._stated:
            self._stated[names] = self._read_moments(names)
        return self._stated[names]

    @cached_property
    def _stated(self) -> dict[tuple[str, ...], Gaussian | None]:
        return {}

    def _read_moments(self, names: tuple[str, ...]) -> Gaussian | None:
        stored = read_npz(self.path, names)
        if len(stored) < 2:
            return None
        for name, array in stored.items():
            if array.dtype.kind != "f" or not np.isfinite(array).all():
                raise ValueError(
                    f"{self.path}: {name} is of {array.dtype}, or not finite; it has to be finite floats"
                )
        mean, covariance = (torch.from_numpy(stored[name].astype(np.float64)) for name in names)
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(
                f"{self.path}: {names[0]} {list(mean.shape)} and {names[1]} {list(covariance.shape)} do not fit"
            )
        try:
            return Gaussian.of_moments(mean, covariance)
        except ValueError as error:
            raise ValueError(f"{self.path}: {names[1]} is no covariance ({error})") from error

    @cached_property
    def _array(self) -> np.ndarray | None:
        array = read_npz(self.path, (_ARRAYS,)).get(_ARRAYS)
        if array is None:
            return None
        if array.ndim not in (4, 5) or array.shape[-1] != 3 or array.dtype != np.uint8:
            raise ValueError(
                f"{self.path}: arr_0 is {array.dtype} {list(array.shape)}; it has to be uint8 [N, H, W, 3], of videos "
                "[N, T, H, W, 3]"
            )
        return array

    @property
    def arrays(self) -> str:
        """What an `.npz` file holds, in words."""
        with zipfile.ZipFile(self.path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
        return f"its arrays are {', '.join(names[:8])}" if names else "it is empty"

    def __len__(self) -> int:
        """Samples; 0 for a file that holds moments alone."""
        if self.files:
            return len(self.files)
        return 0 if self._array is None else len(self._array)

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """SHA-256 of each file as it is now, whatever a manifest says of it."""
        paths, digests = [self.path / file for file in self.files] or [self.path], []
        for path in paths:
            with open_regular(path) as file:
                digest = hashlib.file_digest(file, "sha256")  # pyright: ignore[reportArgumentType]
                digests.append(digest.hexdigest())
        return tuple(digests)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the content, the names and the order of the files, and with their prompts."""
        return hashlib.sha256(json_text([self.files, self.digests, self.prompts]).encode()).hexdigest()[:12]

    def pictures(self, first: int, end: int, size: int | None = None) -> np.ndarray:
        """Pictures uint8 [N, H, W, 3].

        Args:
            size: side in pixels. They are resized to it as clean-fid does (Parmar et al. 2022): bicubic with
                antialiasing, each channel in floating point. None: as they are.

        Raises:
            ValueError: a file that is no picture, or pictures of several sizes; names it.
        """
        if not self.files:
            assert self._array is not None
            pictures = list(self._array[first:end])
        else:
            pictures = [read_picture(self.path / file) for file in self.files[first:end]]
        if size is not None:
            pictures = [resized(picture, size) for picture in pictures]
        for place, picture in enumerate(pictures):
            if picture.shape != pictures[0].shape:
                name = self.files[first + place] if self.files else first + place
                raise ValueError(
                    f"{self.path}: {name} has {picture.shape[1]} x {picture.shape[0]} pixels, others "
                    f"{pictures[0].shape[1]} x {pictures[0].shape[0]}; pass --size N"
                )
        return np.stack(pictures)

    def clips(self, first: int, end: int) -> Iterator[tuple[Tensor, int]]:
        """Mono clips [samples] with their rate in Hz."""
        for file in self.files[first:end]:
            yield read_clip(self.path / file)

    def videos(self, first: int, end: int) -> Iterator[np.ndarray]:
        """Videos uint8 [T, H, W, 3]."""
        for index in range(first, end):
            if self.files:
                yield read_video(self.path / self.files[index])
            else:
                assert self._array is not None
                yield self._array[index]

    def write_npz(self, path: Path) -> None:
        """Write the pictures as ADM's evaluator takes them, chunk by chunk: `arr_0`, uint8 [N, H, W, 3]."""
        shape = (len(self), *self.pictures(0, 1).shape[1:])
        with whole_file(path) as part:
            with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
                with archive.open(f"{_ARRAYS}.npy", "w", force_zip64=True) as file:
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)  # pyright: ignore[reportArgumentType]
                    for first in range(0, len(self), CHUNK):
                        pictures = self.pictures(first, min(first + CHUNK, len(self)))
                        if pictures.shape[1:] != shape[1:]:
                            raise ValueError(f"{self.path} holds pictures of several sizes; pass --size N")
                        file.write(pictures.tobytes())


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Arrays [N] or [N, D] in one, D being the largest."""
    if parts[0].ndim == 2:
        widest = max(part.shape[1] for part in parts)
        parts = [np.pad(part, ((0, 0), (0, widest - part.shape[1]))) for part in parts]
    return np.concatenate(parts)


def _medium(ending: str) -> str:
    return next(medium for medium, endings in MEDIA.items() if ending.lower() in endings)


# What this library writes beside samples.
_OWN = ("comparison.png", "comparison.html", "comparison.json", "comparison.gif")


def _is_none(file: Path) -> bool:
    """Whether a file of a folder is no sample: hidden (copies of notebooks, of macOS), or ours."""
    return any(part.startswith(".") for part in file.parts) or file.name in _OWN


class FeatureFolder:
    """Features of sets, in chunks that processes share.

    Args:
        path: of the folder.
        name: of the extractor.
        extract: (set, first, end) -> {name: features [N, D]}.
        weights: networks whose weights the features depend on, or their checksum.
        variant: anything else that they depend on.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        extract: Callable[[SampleFiles, int, int], dict[str, Tensor]],
        weights: Sequence[nn.Module] | str,
        variant: str = "",
    ) -> None:
        self.path, self.extract = path, extract
        # A parser has no weights, and no hash of nothing.
        self.hash = weights if isinstance(weights, str) else fingerprint(weights) if weights else ""
        self.key = "-".join(filter(None, [name, self.hash, variant]))

    def chunks(self, samples: SampleFiles) -> list[tuple[int, int]]:
        return [(first, min(first + CHUNK, len(samples))) for first in range(0, len(samples), CHUNK)]

    def extract_share(
        self, samples: SampleFiles, rank: int, shards: int, report: Callable[[str], object]
    ) -> None:
        """Extract every `shards`-th chunk that is not there, from chunk `rank`. What is not finite is refused."""
        mine = self.chunks(samples)[rank::shards]
        for number, (first, end) in enumerate(mine, 1):
            if self._read(samples, first, end) is None:
                arrays = {name: rows.numpy() for name, rows in self.extract(samples, first, end).items()}
                for name, rows in arrays.items():
                    if len(rows) != end - first or not np.isfinite(rows).all():
                        raise ValueError(
                            f"{samples.path}: {self.key} gave {name} {list(rows.shape)} for {end - first} samples, or "
                            "nan; its network is damaged or another one"
                        )
                buffer = io.BytesIO()
                np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
                write_atomically(self._file(samples, first), buffer.getvalue(), overwrite=True)
                report(f"{samples.path}: features of {end} samples; chunk {number} of {len(mine)}")

    def read(self, samples: SampleFiles) -> dict[str, Tensor] | None:
        """All features [N, D] by name; None as long as a chunk is missing. Shorter rows are filled up with zeros.

        Raises:
            ValueError: chunks of different forms.
        """
        parts = [self._read(samples, *bounds) for bounds in self.chunks(samples)]
        whole = [part for part in parts if part is not None]
        if not whole or len(whole) < len(parts):
            return None
        # Rows differ in length only where their number is said beside them.
        forms = [{name: rows.shape[1:] for name, rows in part.items()} for part in whole]
        if any(form.keys() != forms[0].keys() or (form != forms[0] and "rows" not in form) for form in forms):
            raise ValueError(
                f"{self.path} keeps features of {samples.path} in different forms; remove {self.key}-*.npz there, or "
                "choose another folder"
            )
        return {name: torch.from_numpy(_joined([part[name] for part in whole])) for name in forms[0]}

    def _read(self, samples: SampleFiles, first: int, end: int) -> dict[str, np.ndarray] | None:
        """A chunk; None where there is none, or a damaged one."""
        try:
            arrays = read_npz(self._file(samples, first))
        except (OSError, ValueError):
            return None
        whole = all(
            rows.ndim in (1, 2)
            and len(rows) == end - first
            and rows.dtype.kind == "f"
            and np.isfinite(rows).all()
            for rows in arrays.values()
        )
        return arrays if arrays and whole else None

    def _file(self, samples: SampleFiles, first: int) -> Path:
        return self.path / f"{self.key}-{samples.fingerprint}-{first:06d}.npz"
