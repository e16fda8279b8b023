"""One writer of files and folders, and one sweep that knows what killed runs leave."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import visual_spec
from visual_spec.files.whole import HOST, scratch_folder, sweep, whole_file, write_atomically
from visual_spec.pipelines.folders import check_replaceable, write_folder


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_sweep_removes_what_dead_processes_left_and_nothing_else(tmp_path, dead):
    (tmp_path / f".a.pt.{HOST}-{dead}-x.tmp").write_text("half")
    (tmp_path / f".out.{HOST}-{dead}-x.tmp" / "new").mkdir(parents=True)
    keep = [f".b.{HOST}-{os.getpid()}-x.tmp", f".b.other-{dead}-x.tmp", "c.tmp", ".d.tmp", "e"]
    for name in keep:
        (tmp_path / name).write_text("keep")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(keep)
    sweep(tmp_path / "none")


def test_a_folder_that_was_moved_away_is_put_back(tmp_path, dead):
    """The run was killed when neither the former conversion nor the new one stood at its place."""
    scratch = tmp_path / f".out.{HOST}-{dead}-x.tmp"
    for part in ("old", "new"):
        (scratch / part).mkdir(parents=True)
        (scratch / part / "which").write_text(part)
    sweep(tmp_path)
    assert (tmp_path / "out" / "which").read_text() == "old" and not scratch.exists()


def test_the_first_file_in_a_folder_sweeps_it(tmp_path, dead):
    left = tmp_path / "batches" / f".000.jsonl.{HOST}-{dead}-x.tmp"
    left.parent.mkdir()
    left.write_text("half")
    write_atomically(tmp_path / "batches" / "001.jsonl", "whole")
    assert [path.name for path in left.parent.iterdir()] == ["001.jsonl"]


def test_an_error_leaves_the_former_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, "one")
    with pytest.raises(KeyError), whole_file(path) as part:
        part.write_text("half")
        raise KeyError
    with pytest.raises(KeyError), scratch_folder(path) as part:
        (part / "x").write_text("half")
        raise KeyError
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError):
        write_atomically(path, "two")
    assert path.read_text() == "one"
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_conversion_that_is_killed_leaves_what_the_next_one_sweeps(tmp_path):
    """Its scratch folder holds all weights."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom visual_spec.pipelines.folders import write_folder\n"
        "def save(folder):\n    (folder / 'weights').write_bytes(bytes(1000))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_folder(save, Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert [path.name for path in tmp_path.rglob("weights")] == ["weights"] and not (
        tmp_path / "out"
    ).exists()
    check_replaceable(tmp_path / "out", overwrite=False)
    assert list(tmp_path.iterdir()) == []
    write_folder(lambda folder: (folder / "weights").write_bytes(b"x"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_else_in_the_package_makes_temporary_names():
    """`os.replace`, `mkstemp` and `mkdtemp` belong to the one writer."""
    root = Path(visual_spec.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "os.replace",
                "os.rename",
                "tempfile.mkstemp",
                "tempfile.mkdtemp",
                "tempfile.TemporaryDirectory",
                "tempfile.NamedTemporaryFile",
            ):
                found.add(path.relative_to(root).as_posix())
    # An engine reads its model from a folder of the system's, once, and nothing is renamed.
    assert found == {"files/whole.py", "serving/vllm/painter.py"}
