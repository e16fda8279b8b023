"""One writer of files and folders, and one sweep that knows what killed runs leave."""

import ast
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import visual_spec
from tests.helpers.refusals import refuses
from visual_spec.files.whole import HOST, sweep, whole_file, write_atomically, written_whole
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


def save(folder: Path, text: str, *names: str) -> None:
    """A model whose parts all say `text`."""
    with written_whole(folder, stale=r"part-\d+") as new:
        for name in ("transformer/weights", "config.json", "model_index.json", *names):
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("kind", ["folder", "link", "dangling link", "other file system"])
def test_a_folder_is_saved_to_where_it_is(tmp_path, kind):
    """A link stays a link, and the parent, where one may not be allowed to write, does not change."""
    shared = "/dev/shm" if kind == "other file system" and Path("/dev/shm").is_dir() else tmp_path
    with tempfile.TemporaryDirectory(dir=shared) as disk:
        real = folder = Path(disk) / "model"
        if kind != "folder":
            folder = tmp_path / "place" / "link"
            folder.parent.mkdir()
            folder.symlink_to(real)
        if kind != "dangling link":
            real.mkdir()
            (real / "transformer").symlink_to(tmp_path)  # a component may be one, too
            (real / "mine").write_text("mine")
        before = os.listdir(folder.parent), os.listdir(disk)
        for text, part in (("one", "part-1"), ("two", "part-2")):
            save(folder, text, part)
            wanted = dict.fromkeys(("transformer/weights", "config.json", "model_index.json", part), text)
            assert held(real) == wanted | ({} if kind == "dangling link" else {"mine": "mine"})
        assert os.listdir(folder.parent) == before[0] and (kind == "folder") != folder.is_symlink()
        assert os.listdir(disk) == (before[1] or ["model"]) and tmp_path.is_dir()


def test_an_error_at_any_rename_leaves_the_former_model(tmp_path, monkeypatch):
    folder, rename, left = tmp_path / "model", Path.rename, [0]
    save(folder, "one", "part-1")
    (folder / "mine").write_text("mine")
    before = held(folder)

    def failing(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("no space left")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    for turn in itertools.count(1):
        left[0] = turn
        try:
            save(folder, "two", "part-2", "more")
        except OSError:
            assert held(folder) == before, turn
            continue
        break
    assert turn > 8 and "part-2" in held(folder) and os.listdir(tmp_path) == ["model"]


def test_a_kill_at_any_rename_leaves_one_model_or_what_a_sweep_puts_back(tmp_path):
    code = """if True:
        import os, sys
        from pathlib import Path
        from tests.files.test_whole import held, save
        from visual_spec.files.whole import sweep
        folder, rename = Path(sys.argv[1]) / "model", Path.rename
        save(folder, "one", "part-1")
        before, ends = held(folder), []
        for turn in range(1, 99):
            def dying(path, target):
                global turn
                turn -= 1
                os._exit(1) if turn == 0 else None
                return rename(path, target)
            if not os.fork():
                Path.rename = dying
                save(folder, "two", "part-2", "more")
                os._exit(0)
            if os.wait()[1] == 0:
                break
            whole = (folder / "model_index.json").exists()
            parts = {text for name, text in held(folder).items() if not name.startswith(".")}
            assert not whole or len(parts) == 1, (turn, parts)
            sweep(folder)
            ends.append(held(folder) == before)
        assert len(ends) > 8 and all(ends), ends
        assert set(held(folder).values()) == {"two"}
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])


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
    with pytest.raises(KeyError), written_whole(tmp_path / "b") as part:
        (part / "x").write_text("half")
        raise KeyError
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError):
        write_atomically(path, "two")
    assert path.read_text() == "one"
    refuses(OSError, "is a device or a pipe", write_atomically, "/dev/null", "two", overwrite=True)


def test_files_have_the_modes_of_ordinary_ones_whatever_threads_do(tmp_path, monkeypatch):
    """The umask belongs to the process: who reads it by setting it opens what other threads write."""
    (tmp_path / "ordinary").touch()
    monkeypatch.setattr(os, "umask", None)
    name = tmp_path / ("ü" * 125 + ".wave")  # 255 bytes, which file systems take
    assert write_atomically(name, "one").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


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
                "secrets.token_hex",
                "tempfile.mkstemp",
                "tempfile.mkdtemp",
                "tempfile.TemporaryDirectory",
                "tempfile.NamedTemporaryFile",
            ):
                found.add(path.relative_to(root).as_posix())
    # An engine reads its model from a folder of the system's, once, and nothing is renamed.
    assert found == {"files/whole.py", "serving/vllm/painter.py"}
