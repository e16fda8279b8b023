"""Sets of samples as files: the same however they were drawn, whole after every interruption, and refused otherwise."""

import json
import multiprocessing
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tqdm import tqdm

from tests.helpers.refusals import refuses
from tests.helpers.sample_sets import TEXTS, content, work_in
from tests.helpers.tiny import tiny_pipeline, tiny_video_pipeline
from visual_spec.eval.quality import sample_set
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.media_files import read_video
from visual_spec.eval.quality.prompt_files import PromptSet
from visual_spec.eval.quality.sample_set import SampleSet
from visual_spec.pipelines.video_files import pixels_of

sample: Any = sample_set.sample  # one process finds a document, never None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert sample(work_in(folder)) is not None
    return folder


def test_pictures_are_those_that_the_pipeline_draws(whole):
    lines = [json.loads(line) for line in (whole / "manifest.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == [f"{index:06d}.png" for index in range(7)]
    pipe = tiny_pipeline()
    for line in lines:
        assert line["prompt"] == TEXTS[line["index"] % 3] and line["seed"] == line["index"]
        generator = torch.Generator().manual_seed(line["seed"])
        expected = pipe(line["prompt"], generator=generator, guidance_scale=2.0).images[0]
        assert np.array_equal(np.asarray(Image.open(whole / line["file"])), np.asarray(expected))
        assert line["calls"] == pipe.last_trace.target_calls[0]
    times = [json.loads(line) for line in (whole / "seconds.jsonl").read_text().splitlines()]
    assert [(time["first"], time["samples"]) for time in times] == [(0, 3), (3, 3), (6, 3)]


def test_videos_are_stored_as_they_are_drawn(tmp_path):
    pipe = tiny_video_pipeline()
    sample(work_in(tmp_path, num=2, batch_size=2, pipe=pipe))
    files = SampleFiles.open(tmp_path)
    assert files.medium == "video" and files.files == ("000000.npy", "000001.npy")
    for index, found in enumerate(files.videos(0, 2)):
        generator = torch.Generator().manual_seed(index)
        expected = pipe(TEXTS[index], generator=generator, guidance_scale=2.0).frames[0]
        assert found.shape[0] == pipe.num_frames and np.array_equal(found, pixels_of(expected))


def test_shares_in_any_order_give_the_same_files(whole, tmp_path):
    assert sample(work_in(tmp_path), rank=1, shards=2) is None
    assert not (tmp_path / "manifest.jsonl").exists()
    assert sample(work_in(tmp_path), rank=0, shards=2) is not None
    assert content(tmp_path) == content(whole)


def test_a_longer_run_goes_on(whole, tmp_path):
    sample(work_in(tmp_path, num=4))
    assert sample(work_in(tmp_path))["samples"] == 7
    assert content(tmp_path) == content(whole)


def test_a_shorter_run_is_refused_before_anything_is_drawn(whole, tmp_path):
    """Pictures of the longer one would stay in the folder, where scorers find them."""
    sample(work_in(tmp_path))
    refuses(ValueError, "7.*num=4.*--num 7", sample, work_in(tmp_path, num=4))
    assert content(tmp_path) == content(whole)


def test_a_run_tells_what_it_finds_draws_and_leaves_out(tmp_path, monkeypatch):
    told = []
    sample(work_in(tmp_path, num=3), report=told.append)
    assert [text.split(":")[0] for text in told] == ["batch 1 of 1"]
    told.clear()
    monkeypatch.setattr(sample_set, "_MINUTE", 1e-3)
    sample(work_in(tmp_path), rank=0, shards=2, report=told.append)
    assert told[0] == "process 1 of 2: 1 of 2 batches are there already"
    assert "is drawn whole, 3 samples, of which 2 are not kept" in told[1]
    assert any(text.endswith("being drawn") and text.startswith("process 1 of 2: batch 1") for text in told)
    assert "about 0 s left" in told[-1]


@pytest.mark.parametrize("damage", ["truncated", "removed", "changed", "lines", "deep", "seconds"])
def test_damage_is_noticed_and_drawn_again(whole, tmp_path, damage):
    sample(work_in(tmp_path))
    picture = tmp_path / "000004.png"
    data = picture.read_bytes()
    if damage == "truncated":
        picture.write_bytes(data[:-9])
    elif damage == "removed":
        picture.unlink()
    elif damage == "changed":
        picture.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    elif damage == "lines":
        (tmp_path / "batches" / "000003.jsonl").write_text('{"index": 3')
    elif damage == "deep":
        (tmp_path / "batches" / "000003.jsonl").write_text("[" * 100_000)
    else:
        (tmp_path / "batches" / "000003.seconds").unlink()
    work, drawn = work_in(tmp_path), []
    original = SampleSet.draw

    def draw(self, first):
        drawn.append(first)
        original(self, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleSet, "draw", draw)
        assert sample(work) is not None
    assert drawn == [3]
    assert content(tmp_path) == content(whole)


def test_other_samples_in_the_folder_are_refused(whole):
    cases: Any = (
        ({"text": "autoregressive:temperature=0.5"}, "law"),
        ({"seed": 1}, "seed"),
        ({"batch_size": 2}, "batch_size"),
        ({"prompts": PromptSet(TEXTS[::-1])}, "prompts"),
        ({"text": "speculative-jacobi:window=4"}, "sampler"),
    )
    for changes, name in cases:
        refuses(ValueError, f"other settings .*{name}", sample, work_in(whole, **changes))
    refuses(ValueError, "least 1", sample, work_in(whole, num=0))
    refuses(ValueError, "rank=2 of 2", sample, work_in(whole), rank=2, shards=2)


def _draw_and_wait(folder, ready, go):
    with sample_set.held(Path(folder) / ".lock-0"):
        ready.set()
        go.wait(60)


def test_two_processes_at_one_share_are_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    process = context.Process(target=_draw_and_wait, args=(tmp_path, ready, go))
    process.start()
    assert ready.wait(60)
    try:
        with pytest.raises(OSError, match=f"at work already, by process {process.pid} on"):
            sample(work_in(tmp_path, num=1, batch_size=1))
        with sample_set.held(tmp_path / ".lock-1"):  # another share is free
            pass
    finally:
        process.kill()
        process.join()
    assert sample(work_in(tmp_path, num=1, batch_size=1)) is not None


def test_a_full_disk_leaves_whole_files_only(whole, tmp_path, monkeypatch):
    written, original = [], sample_set.write_atomically

    def limited(path, *args, **kwargs):
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        written.append(path)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(sample_set, "write_atomically", limited)
    refuses(OSError, r"\[Errno 28\]", sample, work_in(tmp_path))
    monkeypatch.undo()
    assert sample(work_in(tmp_path)) is not None
    assert content(tmp_path) == content(whole)


def test_geneval_and_dpg_get_their_layouts(tmp_path):
    records = tuple(json.dumps({"tag": "colors", "prompt": text}) for text in TEXTS[:2])
    geneval = tmp_path / "geneval"
    sample(work_in(geneval, num=8, prompts=PromptSet(TEXTS[:2], "geneval", records=records)))
    for turn in range(2):
        folder = geneval / f"{turn:05d}"
        assert json.loads((folder / "metadata.jsonl").read_text())["prompt"] == TEXTS[turn]
        assert sorted(path.name for path in (folder / "samples").iterdir()) == [
            f"{k:05d}.png" for k in range(4)
        ]
    dpg = tmp_path / "dpg"
    sample(work_in(dpg, num=8, prompts=PromptSet(TEXTS[:2], "dpg", names=("x", "y"))))
    grid = np.asarray(Image.open(dpg / "grids" / "y.png"))
    parts = [np.asarray(Image.open(dpg / f"{index:06d}.png")) for index in range(4, 8)]
    assert np.array_equal(grid, np.vstack([np.hstack(parts[:2]), np.hstack(parts[2:])]))


def test_vbench_gets_its_videos_by_prompt_and_number(tmp_path):
    pytest.importorskip("av")
    texts, numbers = ("a cat", "a still cat", "a still cat"), ("0", "0", "5")
    prompts = PromptSet(texts, "vbench", names=numbers)
    sample(work_in(tmp_path, num=15, batch_size=5, pipe=tiny_video_pipeline(), prompts=prompts))
    expected = [f"a cat-{k}.mp4" for k in range(5)] + [f"a still cat-{k}.mp4" for k in range(10)]
    assert {path.name for path in (tmp_path / "vbench").iterdir()} == set(expected)
    drawn = SampleFiles.open(tmp_path)
    for index, name in enumerate(expected):
        video = read_video(tmp_path / "vbench" / name)
        (frames,) = drawn.videos(index, index + 1)
        factor = video.shape[1] // frames.shape[1]
        assert len(video) == len(frames) and factor > 1  # small videos are enlarged
        small = video.reshape(len(frames), frames.shape[1], factor, frames.shape[2], factor, 3).mean((2, 4))
        others = [np.abs(small - other).mean() for other in drawn.videos(0, 15)]
        assert int(np.argmin(others)) == index
    refuses(ValueError, "vbench", sample, work_in(tmp_path / "b", prompts=prompts))


def _draw(folder):
    torch.set_num_threads(1)
    # tqdm's own lock is shared by all children, and one that dies with it would stop all others.
    tqdm.set_lock(threading.RLock())
    sample(work_in(folder))


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_runs_that_go_on_give_the_same_files(whole, tmp_path, kills):
    """Killed at random moments of drawing and writing, until a run reaches its end; then from the start again."""
    context, rng = multiprocessing.get_context("fork"), random.Random(0)
    started = time.monotonic()
    _draw(tmp_path / "timed")
    full, killed, number = time.monotonic() - started, 0, 0
    while killed < kills:
        folder = tmp_path / str(number)
        number += 1
        while True:
            process = context.Process(target=_draw, args=(folder,))
            process.start()
            process.join(rng.uniform(0, full) if killed < kills else None)
            if not process.is_alive():
                break
            process.kill()
            process.join()
            killed += 1
        assert process.exitcode == 0
        assert content(folder) == content(whole)
