"""Files of any kind: what is read, what is refused, and what becomes of the tensors in them."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.official import CLASS_SHAPES, random_weights
from visual_spec.models.core.checkpoints import read_checkpoint


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


class Bomb:
    """What unpickling would run."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def damaged(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def cut(path: Path) -> bytes:
    return path.read_bytes()[: path.stat().st_size // 2]


def test_a_truncated_file_is_told(tmp_path):
    new = write(tmp_path / "new.pt", {"model": random_weights(CLASS_SHAPES)})
    torch.save(random_weights(CLASS_SHAPES), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(random_weights(CLASS_SHAPES), tmp_path / "other.safetensors")
    for path in (new, tmp_path / "old.pt", tmp_path / "other.safetensors"):
        part = damaged(tmp_path / f"cut-{path.name}", cut(path))
        with pytest.raises(ValueError, match=rf"{part.name} is truncated or damaged.* download it again"):
            read_checkpoint(part)


def test_pickles_are_refused_and_nothing_in_them_runs(tmp_path):
    touched = tmp_path / "touched"
    for path in (
        write(tmp_path / "new.pt", {"model": random_weights(CLASS_SHAPES), "other": Bomb(touched)}),
        damaged(tmp_path / "old.pkl", pickle.dumps({"model": Bomb(touched)}, protocol=2)),
    ):
        with pytest.raises(
            ValueError, match="would need pickle, which can run any code; it is refused.*save its tensors"
        ):
            read_checkpoint(path)
    assert not touched.exists()


def test_other_kinds_of_files_are_named(tmp_path):
    page = damaged(tmp_path / "page.pt", b"<!DOCTYPE html><html>Sign in</html>")
    with pytest.raises(ValueError, match="it begins with b'<!DOCTYPE ht'.*may be a web page"):
        read_checkpoint(page)
    pointer = damaged(
        tmp_path / "lfs.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(ValueError, match="Git LFS pointer, not the weights; run `git lfs pull`"):
        read_checkpoint(pointer)
    with pytest.raises(ValueError, match="is no checkpoint"):
        read_checkpoint(damaged(tmp_path / "empty.pt", b""))
    with zipfile.ZipFile(tmp_path / "archive.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ValueError, match="no PyTorch checkpoint"):
        read_checkpoint(tmp_path / "archive.pt")
    with pytest.raises(IsADirectoryError, match="is a folder; name the checkpoint file in it"):
        read_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "nowhere.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "loss": torch.zeros(1)}, "holds no weights: .* but 'epoch', 'loss'"),
        ({"model": {}}, "holds no weights"),
        ([torch.zeros(1)], "holds a list; pass a file with a dict of weights"),
    ],
)
def test_files_without_weights_are_told(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_checkpoint(write(tmp_path / "weights.pt", content))
