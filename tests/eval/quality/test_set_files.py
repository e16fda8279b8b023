"""Sets that somebody sent: no file outside of them is read or written, and every edited record is one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.helpers.command import check_refused
from tests.helpers.networks import make_pictures
from tests.helpers.sample_sets import scored
from visual_spec.cli import main
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.sample_set import held


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    return scored(tmp_path_factory.mktemp("set") / "drawn", 10.0)


def commands(folder: Path, out: Path) -> list[list[str]]:
    score = ["score", str(folder), "--reference", str(folder)]
    return [
        ["report", str(folder), "--out", str(out / "page.html")],
        [*score, "--out", str(out / "scores")],
        [*score, "--compare-to", str(folder), "--out", str(out / "beside")],
    ]


def edit_lines(path: Path, entry: str, value: Any) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, entry: value}) + "\n" for line in lines))


@pytest.mark.parametrize("way", ["../secret.png", "absolute", "a link", "a linked folder"])
def test_files_outside_of_the_set_are_not_read(tmp_path, drawn, capsys, way):
    folder = Path(shutil.copytree(drawn, tmp_path / "drawn"))
    secret = tmp_path / "secret.png"
    shutil.copy(folder / "000000.png", secret)
    if way == "a link":
        (folder / "000003.png").unlink()
        (folder / "000003.png").symlink_to(secret)
    elif way == "a linked folder":
        (folder / "away").symlink_to(tmp_path)
        edit_lines(folder / "manifest.jsonl", "file", "away/secret.png")
    else:
        edit_lines(folder / "manifest.jsonl", "file", str(secret) if way == "absolute" else way)
    for command in commands(folder, tmp_path):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and ("is a link to" in said or "no file below" in said), said
    assert not (tmp_path / "page.html").exists()


def test_a_folder_is_its_samples_and_what_is_left_is_said(tmp_path):
    """Copies of notebooks, our own comparison and notes are no samples; pictures of other kinds are."""
    make_pictures(tmp_path, 6, 1)
    for number, ending in enumerate((".tif", ".ppm", ".TIFF")):
        with Image.open(tmp_path / f"{number:03d}.png") as picture:
            picture.save(tmp_path / f"{number:03d}{ending}")
        (tmp_path / f"{number:03d}.png").unlink()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    shutil.copy(tmp_path / "004.png", tmp_path / ".ipynb_checkpoints" / "004-checkpoint.png")
    shutil.copy(tmp_path / "004.png", tmp_path / "comparison.png")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other.pcx").write_bytes(b"a picture that is not read")
    with pytest.warns(
        UserWarning, match=r"6 samples; .*004-checkpoint.png, comparison.png, other.pcx are none"
    ):
        files = SampleFiles.open(tmp_path)
    assert [Path(name).stem for name in files.files] == [f"{number:03d}" for number in range(6)]
    assert files.pictures(0, 6).shape == (6, 24, 24, 3)


def test_links_in_folders_without_a_manifest_are_not_read(tmp_path, drawn, capsys):
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "a.png").symlink_to(drawn / "000000.png")
    assert main(["score", str(tmp_path / "loose"), "--reference", str(drawn)]) == 2
    assert "is a link to" in capsys.readouterr().err


@pytest.mark.parametrize("made", ["link", "hard link", "pipe"])
def test_a_lock_does_not_write_into_other_files(tmp_path, made):
    other, lock = tmp_path / "other.txt", tmp_path / ".lock-0"
    other.write_text("keep")
    if made == "link":
        lock.symlink_to(other)
    elif made == "hard link":
        os.link(other, lock)
    else:
        os.mkfifo(lock)
    with pytest.raises(ValueError, match="lock-0"), held(lock):
        pass
    assert other.read_text() == "keep"


def test_a_lock_that_is_left_is_taken_again(tmp_path):
    for _ in range(2):
        with held(tmp_path / ".lock-0"):
            assert (tmp_path / ".lock-0").read_text() == f"process {os.getpid()} on {os.uname().nodename}"
            with pytest.raises(OSError, match=f"process {os.getpid()}"), held(tmp_path / ".lock-0"):
                pass


EDITS: list[tuple[str, str, Any]] = [
    ("manifest.jsonl", "file", 3),
    ("manifest.jsonl", "file", "000000"),
    ("manifest.jsonl", "file", "000000.exe"),
    ("manifest.jsonl", "calls", "x"),
    ("manifest.jsonl", "calls", 10**400),
    ("manifest.jsonl", "calls", 0),
    ("manifest.jsonl", "prompt", []),
    ("manifest.jsonl", "sampler", None),
    ("manifest.jsonl", "promise", {}),
    ("seconds.jsonl", "seconds", "x"),
    ("seconds.jsonl", "samples", 0),
    ("run.json", "sampler", []),
    ("run.json", "model", {"a": 1}),
    ("scores/scores.json", "figures", [1]),
    ("scores/scores.json", "figures", {"fid": {"value": "x"}}),
    ("scores/scores.json", "figures", {"fid": None}),
]


@pytest.mark.parametrize(("file", "entry", "value"), EDITS)
def test_edited_records_are_refused_by_their_name(tmp_path, drawn, capsys, file, entry, value):
    folder = Path(shutil.copytree(drawn, tmp_path / "drawn"))
    if file.endswith("jsonl"):
        edit_lines(folder / file, entry, value)
    else:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, entry: value}))
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and file in said and (entry in said or "fid" in said), said


@pytest.mark.parametrize("file", ["manifest.jsonl", "seconds.jsonl", "run.json", "scores/scores.json"])
@pytest.mark.parametrize("text", ["[" * 50_000, "", "null", '{"a":' * 70 + "1" + "}" * 70])
def test_nested_and_empty_records_are_refused(tmp_path, drawn, capsys, file, text):
    folder = Path(shutil.copytree(drawn, tmp_path / "drawn"))
    (folder / file).write_text(text)
    check_refused(main(["report", str(folder), "--out", str(tmp_path / "page.html")]), file, capsys)


@pytest.mark.parametrize("entry", ["index", "file", "prompt", "seed", "bytes", "crc32"])
def test_lines_without_an_entry_are_refused_before_any_feature(tmp_path, drawn, capsys, entry):
    folder = Path(shutil.copytree(drawn, tmp_path / "drawn"))
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    del lines[4][entry]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for command in commands(folder, tmp_path):
        check_refused(main(command), f"line 5 has no {entry}", capsys)


def test_a_damaged_record_of_the_drawing_is_refused_before_any_feature(tmp_path, drawn, capsys):
    folder = Path(shutil.copytree(drawn, tmp_path / "drawn"))
    (folder / "run.json").write_text('{"sampler": []}')
    for command in commands(folder, tmp_path):
        check_refused(main(command), "run.json says sampler=[]", capsys)
