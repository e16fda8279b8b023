"""A set of samples as files: pictures or clips named by index, with what each was asked for and how it was drawn.

    000000.png 000001.png ...   the samples; GenEval's layout has folders of its own, DPG-Bench's grids are under grids/
                                and VBench's videos under vbench/
    manifest.jsonl              one line a sample: index, file, prompt, seed, sampler, law, promise, calls, checksum
    seconds.jsonl               one line a batch: its first sample, its seconds, and what else was measured of it
    run.json                    all that fixes the samples
    batches/                    the lines of every batch that is done, from which the two files above are joined
    rollouts/                   where they are asked for, tokens and log-probabilities of every batch (`rollouts`)

Sample i has prompt i and seed `seed + i`, and is drawn in the batch that i lies in. So the samples are the same bit for
bit however many processes share the work, and however often they are interrupted. A batch counts as done when its lines
are there and all its files have the checksums that they name; otherwise it is drawn again. All files are written whole
or not at all.
"""

from __future__ import annotations

import io
import os
import platform
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from einops import rearrange
from PIL import Image

from visual_spec.eval import draws
from visual_spec.eval.media import show
from visual_spec.eval.quality.media_files import read_picture, read_video
from visual_spec.eval.quality.prompt_files import FLAT, GENEVAL, VBENCH, PromptSet
from visual_spec.eval.quality.rollouts import FOLDER as ROLLOUTS
from visual_spec.eval.quality.rollouts import shard_bytes, shard_name
from visual_spec.eval.quality.set_files import BATCH_FACTS, MANIFEST, RUN, TIMES, read_manifest, read_times
from visual_spec.eval.settings import Setting, check_samplers
from visual_spec.files.documents import json_text
from visual_spec.files.pictures import png_bytes
from visual_spec.files.reading import (
    flags,
    inside,
    lines_of,
    parse,
    read_object,
    read_regular,
    read_text,
    refuse_link,
)
from visual_spec.files.whole import ready_folder, write_atomically
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.pipelines.audio_files import audio_bytes
from visual_spec.pipelines.video_files import check_format, video_bytes
from visual_spec.records import MEDIA

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline

Report = Callable[[str], object]
_MINUTE = 60.0  # seconds
BATCHES = "batches"
_VBENCH_RATE = 8.0  # frames per second, as VBench's guide writes its videos


@dataclass(frozen=True)
class SampleSet:
    """What is drawn, and where it goes.

    Attributes:
        pipe: draws; its sampler is left as it was. Where nothing is drawn, `PipelineFacts` are enough.
        setting: how.
        prompts: for what.
        folder: where the files go.
        num: samples. It may be raised later, not lowered.
        batch_size: samples decoded together. The last batch is whole too, so a longer run has the same samples.
        model: its name, for the record.
        weights: fingerprint of the pipeline's weights, where it is known already.
        negative_prompt: what guidance leads away from, in place of no prompt.
        logprobs: keep tokens and their log-probabilities, too (`visual_spec.eval.quality.rollouts`).
    """

    pipe: Any
    setting: Setting
    prompts: PromptSet
    folder: Path
    num: int
    batch_size: int
    model: str = ""
    weights: str = ""
    negative_prompt: str | None = None
    logprobs: bool = False

    @property
    def batches(self) -> range:
        """The first sample of every batch."""
        return range(0, self.num, self.batch_size)

    def facts(self) -> dict[str, object]:
        """All that fixes the samples; JSON types only."""
        return {
            "model": self.model,
            "weights": self.weights or weights_of(self.pipe),
            "medium": self.pipe.medium,
            "prompts": self.prompts.fingerprint,
            "layout": self.prompts.layout,
            "batch_size": self.batch_size,
            "dtype": str(self.pipe.transformer.dtype).removeprefix("torch."),
            "device": self.pipe.device.type,
            **self.setting.describe(),
            **self._asked,
        }

    @property
    def _asked(self) -> dict[str, str | bool]:
        """What a call is asked beside prompts and law."""
        negative = {} if self.negative_prompt is None else {"negative_prompt": self.negative_prompt}
        return negative | ({"output_logprobs": True} if self.logprobs else {})

    def open(self) -> None:
        """Make the folder ready, before anything is drawn.

        Raises:
            ValueError: sizes out of range, a sampler that does not fit, or a folder of samples drawn otherwise, or of
                more of them.
            OSError: nothing can be written there.
        """
        if self.num < 1 or self.batch_size < 1:
            raise ValueError(f"num={self.num}, batch_size={self.batch_size}; pass at least 1 of each")
        medium = "video" if self.prompts.layout == VBENCH else "image"
        if self.prompts.layout != FLAT and self.pipe.medium != medium:
            raise ValueError(
                f"the prompts of {self.prompts.layout} are for {MEDIA[medium].samples}; this model makes "
                f"{MEDIA[self.pipe.medium].samples}."
            )
        if self.prompts.layout == VBENCH:
            check_format("mp4")
        check_samplers(self.pipe, [self.setting])
        if self.logprobs:
            with self.setting.on(self.pipe):
                self.pipe.check_logprobs(True)
        ready_folder(self.folder)
        for name in (RUN, TIMES, MANIFEST, BATCHES, ROLLOUTS):
            self._place(name)
        if (there := self._drawn_before()) > self.num:
            raise ValueError(
                f"{self.folder} holds {there} samples, and num={self.num} would leave some of them beside the set; "
                f"pass --num {there} or more, or another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        settle(self.folder / RUN, self.facts())

    def _drawn_before(self) -> int:
        """Return how many samples the lines of batches in the folder go up to."""
        indices = []
        for path in (self.folder / BATCHES).glob("*.jsonl"):
            with suppress(ValueError, LookupError, TypeError):  # a damaged one is drawn again
                line = lines_of(read_text(path))[-1]
                indices.append(int(parse(line, path.name)["index"]))
        return max(indices, default=-1) + 1

    # -- one batch ----------------------------------------------------------------------------------------------------

    def draw(self, first: int) -> None:
        """Draw one batch and write its files, its lines last."""
        indices = range(first, first + self.batch_size)
        prompts = [self.prompts.asked(index) for index in indices]
        arrays = draws.draw(self.pipe, self.setting, prompts, first, **self._asked)
        shown = show(self.pipe, arrays[draws.stored_name(arrays)])
        lines = []
        for index in (index for index in indices if index < self.num):
            content, name = file_bytes(self.pipe, shown[index - first]), self.file_of(index)
            write_atomically(self._place(name), content, overwrite=True)
            lines.append(
                {
                    "index": index,
                    "file": name,
                    "prompt": self.prompts.texts[self.prompts.of(index)],
                    "seed": self.setting.seed + index,
                    "sampler": self.setting.text,
                    "law": self.setting.pipeline_law,
                    "calls": int(arrays["calls"][index - first]),
                    "promise": str(arrays["promise"]),
                    "own_promise": str(arrays["own_promise"]),
                    "law_settings": parse(str(arrays["law_settings"]), name),
                    **_sample_facts(arrays, index - first),
                    "bytes": len(content),
                    "crc32": zlib.crc32(content),
                }
            )
        facts = {name: arrays[name].item() for name in BATCH_FACTS if name in arrays}
        facts = {name: fact for name, fact in facts.items() if fact == fact}  # a divergence of nan is none
        if self.logprobs:
            kept = indices[: len(lines)]
            seeds, texts = [self.setting.seed + index for index in kept], [line["prompt"] for line in lines]
            content = shard_bytes(arrays, kept, seeds, texts, read_object(self.folder / RUN))
            write_atomically(self._place(shard_name(first)), content, overwrite=True)
            facts |= {"rollouts_bytes": len(content), "rollouts_crc32": zlib.crc32(content)}
        seconds = json_text({"first": first, "samples": self.batch_size, **facts})
        write_atomically(self._place(self._batch(first, "seconds")), seconds + "\n", overwrite=True)
        text = "".join(json_text(line) + "\n" for line in lines)
        write_atomically(self._place(self._batch(first, "jsonl")), text, overwrite=True)

    def done(self, first: int) -> list[dict[str, Any]] | None:
        """The lines of a batch, if all its files are there and whole; else None."""
        try:
            lines = read_manifest(self.folder, self._batch(first, "jsonl"), whole=True)
            whole = len(lines) >= min(self.batch_size, self.num - first) and all_whole(self.folder, lines)
            (time,) = read_times(self.folder, self._batch(first, "seconds"))
            if self.logprobs:
                shard = {
                    "file": shard_name(first),
                    "bytes": time["rollouts_bytes"],
                    "crc32": time["rollouts_crc32"],
                }
                whole = whole and all_whole(self.folder, [shard])
        except (OSError, ValueError, KeyError):
            return None
        return lines if whole else None

    def _place(self, name: str) -> Path:
        """Return where a file of the set is written: in its folder, through no link."""
        return inside(self.folder, name, self.folder)

    def file_of(self, index: int) -> str:
        """The file of a sample, below the folder."""
        if self.prompts.layout == GENEVAL:
            turn, place = divmod(index, self.prompts.per_prompt)
            return f"{turn:05d}/samples/{place:05d}.png"
        return f"{index:06d}.{MEDIA[self.pipe.medium].ending}"

    def _batch(self, first: int, kind: str) -> str:
        return f"{BATCHES}/{first:06d}.{kind}"

    # -- all of them --------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, object] | None:
        """Join the lines once all batches are there, and return what they sum up to; None as long as some are not."""
        manifest: list[dict[str, Any]] = []
        for first in self.batches:
            lines = self.done(first)
            if lines is None:
                return None
            manifest += lines
        manifest = manifest[: self.num]
        if self.prompts.layout != FLAT:
            self._write_layout()
        times = [
            time for first in self.batches for time in read_times(self.folder, self._batch(first, "seconds"))
        ]
        write_atomically(
            self.folder / TIMES, "".join(json_text(time) + "\n" for time in times), overwrite=True
        )
        text = "".join(json_text(line) + "\n" for line in manifest)
        write_atomically(self.folder / MANIFEST, text, overwrite=True)
        drawn = sum(time["samples"] for time in times)
        return {
            "folder": str(self.folder),
            "samples": self.num,
            "calls_mean": sum(line["calls"] for line in manifest) / len(manifest),
            "seconds_per_sample": sum(time["seconds"] for time in times) / drawn,
        }

    def _write_layout(self) -> None:
        """Return what the scorers of GenEval, DPG-Bench and VBench read beside the samples."""
        for turn in range(self.num // self.prompts.per_prompt):
            prompt = self.prompts.of(turn * self.prompts.per_prompt)
            if self.prompts.layout == GENEVAL:
                record = self.prompts.records[prompt] + "\n"
                write_atomically(self._place(f"{turn:05d}/metadata.jsonl"), record, overwrite=True)
            elif turn >= len(self.prompts.texts):
                break
            elif self.prompts.layout == VBENCH:
                first = int(self.prompts.names[prompt])
                for place in range(self.prompts.per_prompt):
                    frames = read_video(self.folder / self.file_of(turn * self.prompts.per_prompt + place))
                    name = f"vbench/{self.prompts.texts[prompt]}-{first + place}.mp4"
                    write_atomically(self._place(name), video_bytes(frames, _VBENCH_RATE), overwrite=True)
            else:
                four = [read_picture(self.folder / self.file_of(turn * 4 + place)) for place in range(4)]
                grid = rearrange(np.stack(four), "(a b) h w c -> (a h) (b w) c", a=2)
                name = self.prompts.names[prompt]
                write_atomically(
                    self._place(f"grids/{name}.png"), png_bytes(Image.fromarray(grid)), overwrite=True
                )


def sample(
    work: SampleSet, *, rank: int = 0, shards: int = 1, report: Report = lambda text: None
) -> dict[str, object] | None:
    """Draw a set, or go on where a run stopped.

    Args:
        rank, shards: this process takes every `shards`-th batch, from batch `rank`.

    Returns:
        What the set sums up to (`SampleSet.finish`), or None as long as other processes have batches to draw.

    Raises:
        ValueError, OSError: as `SampleSet.open`; a rank out of range; another process at the same share.
    """
    if not 0 <= rank < shards:
        raise ValueError(f"rank={rank} of {shards}; pass a rank from 0 to shards - 1")
    work.open()
    with held(work.folder / f".lock-{rank}"):
        draw_share([work], rank, shards, report)
    return work.finish()


def draw_share(
    sets: Sequence[SampleSet],
    rank: int,
    shards: int,
    report: Report,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Draw what is missing of a process's share of sets of one size, batch by batch of all in turn.

    Args:
        before: is called once where something is missing, before it is drawn.
    """
    who, one = f"process {rank + 1} of {shards}: " if shards > 1 else "", sets[0]
    mine = one.batches[rank::shards]
    missing = [first for first in mine if any(each.done(first) is None for each in sets)]
    if len(missing) < len(mine):
        report(f"{who}{len(mine) - len(missing)} of {len(mine)} batches are there already")
    if missing and (more := one.batches[-1] + one.batch_size - one.num):
        report(
            f"{who}the last batch is drawn whole, {one.batch_size} samples, of which {more} are not kept; so a "
            "longer run has the same ones. --batch-size sets its size"
        )
    if missing:
        before()
    started = time.monotonic()
    for number, first in enumerate(missing, 1):
        with _told(report, f"{who}batch {number} of {len(missing)}"):
            # Every second batch runs backwards, so that no setting always follows the same one.
            for each in sets[:: 1 if number % 2 else -1]:
                if each.done(first) is None:
                    each.draw(first)
        spent = time.monotonic() - started
        left = spent / number * (len(missing) - number)
        report(f"{who}batch {number} of {len(missing)}: {spent:.0f} s, about {left:.0f} s left")


@contextmanager
def _told(report: Report, what: str) -> Iterator[None]:
    """Tell every minute how long a batch has taken."""
    done, started = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_MINUTE):
            report(f"{what}: {time.monotonic() - started:.0f} s, being drawn")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _lock(file: IO[str]) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt  # Windows

        file.seek(2**20)  # a place that nobody reads
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock as long as this process lives, also where it is killed.

    Raises:
        OSError: another process holds it; says which.
        ValueError: there is a link, a pipe or a file with other names in its place.
    """
    how = flags("O_RDWR", "O_CREAT", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")
    descriptor = os.open(refuse_link(path), how, 0o666)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(descriptor)
        raise ValueError(
            f"{path} is no file of its own, but a pipe, a device or another name of a file; remove it"
        )
    with os.fdopen(descriptor, "r+") as file:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise OSError(
                f"{path.parent} is at work already, by {file.read().strip() or 'another process'}; wait for it, choose "
                "another folder, or share the work with --rank and --shards"
            ) from error
        file.seek(0)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _sample_facts(arrays: dict[str, np.ndarray], place: int) -> dict[str, float]:
    """What a lossy sampler measured of a sample, and of a token of its batch; the head's calls, where there is one."""
    moved = float(arrays["moved_mass"][place])
    measured = {} if np.isnan(moved) else {"moved_mass": moved, "divergence": float(arrays["divergence"])}
    return measured | ({"head_calls": int(arrays["head_calls"][place])} if "head_calls" in arrays else {})


def file_bytes(pipe: Pipeline, sample: np.ndarray) -> bytes:
    """The file that keeps a sample of a pipeline, as `media.show` gives it."""
    if pipe.medium == "image":
        return png_bytes(Image.fromarray(sample))
    if pipe.medium == "video":
        buffer = io.BytesIO()
        np.save(buffer, sample, allow_pickle=False)
        return buffer.getvalue()
    return audio_bytes(sample, pipe.sampling_rate)


def all_whole(folder: Path, lines: Sequence[dict[str, Any]]) -> bool:
    """Return whether the files of all lines of a manifest have their checksums; OSError or ValueError for no file."""
    contents = ((line, read_regular(folder / line["file"])) for line in lines)
    return all(
        len(content) == line["bytes"] and zlib.crc32(content) == line["crc32"] for line, content in contents
    )


def keep_true_samples(
    folder: Path,
    pipe: Pipeline,
    facts: dict[str, object],
    prompts: Sequence[str],
    make: Callable[[int], np.ndarray],
) -> None:
    """Write samples that no sampler drew as a set that scorers read, unless they are there whole.

    Args:
        facts: what fixes them, for `run.json`.
        make: (index) -> the sample, as `media.show` gives it.

    Raises:
        ValueError: the folder holds other samples.
    """
    ready_folder(folder)
    settle(folder / RUN, facts)
    with suppress(OSError, ValueError):
        lines = read_manifest(folder)
        if [line["prompt"] for line in lines] == list(prompts) and all_whole(folder, lines):
            return
    lines = []
    for index, prompt in enumerate(prompts):
        content, name = file_bytes(pipe, make(index)), f"{index:06d}.{MEDIA[pipe.medium].ending}"
        write_atomically(inside(folder, name, folder), content, overwrite=True)
        lines.append(
            {"index": index, "file": name, "prompt": prompt, "seed": index}
            | {"bytes": len(content), "crc32": zlib.crc32(content)}
        )
    text = "".join(json_text(line) + "\n" for line in lines)
    write_atomically(inside(folder, MANIFEST, folder), text, overwrite=True)


def weights_of(pipe: Pipeline) -> str:
    """The fingerprint of all weights of a pipeline."""
    return fingerprint(part for part in pipe.components.values() if hasattr(part, "state_dict"))


def settle(path: Path, settings: dict[str, object]) -> None:
    """Write the settings of a folder, or compare them with those its samples were drawn under.

    Raises:
        ValueError: they differ, which names where; or the file is damaged.
    """
    text = json_text(settings, indent=1) + "\n"
    if not path.exists():
        write_atomically(path, text, overwrite=True)
        return
    try:
        there = read_object(path)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}), so nothing tells what the samples beside it are; pass another folder"
        ) from error
    here = parse(text, str(path))
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if differing:
        changes = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise ValueError(f"{path.parent} holds samples of other settings ({changes}); pass another folder")
