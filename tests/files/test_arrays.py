"""NumPy's files are read as NumPy reads them, and what is wrong with one is one `ValueError`."""

import io
import os
import resource
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.refusals import refuses
from visual_spec.files.arrays import read_npy, read_npz


def header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(  # pyright: ignore[reportArgumentType]
        buffer, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


def archived(path: Path, content: bytes, name: str = "arr_0.npy") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24.0).reshape(4, 6)),
        np.array('{"a": "é"}'),
        np.array(1.5),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.arange(5, dtype=">i4"),
    ],
)
def test_arrays_are_read_as_numpy_reads_them(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", first=array, second=array)
    np.savez_compressed(tmp_path / "b.npz", first=array)
    for found in (
        read_npy(tmp_path / "a.npy"),
        read_npz(tmp_path / "a.npz")["second"],
        read_npz(tmp_path / "b.npz", ("first",))["first"],
    ):
        assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)
    assert set(read_npz(tmp_path / "a.npz", ("second", "third"))) == {"second"}


def test_what_says_more_than_it_holds_is_refused_without_memory(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for shape in ((10**14,), (10**7, 10**7), (2**62, 8), (-5,)):
        content = header(shape) + b"x" * 10
        (tmp_path / "a.npy").write_bytes(content)
        refuses(ValueError, r"a.npy", read_npy, tmp_path / "a.npy")
        refuses(ValueError, r"a.npz", read_npz, archived(tmp_path / "a.npz", content))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_what_is_no_array_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.save(tmp_path / "named.npy", np.zeros(3, [("a", "f4")]))
    np.save(tmp_path / "fine.npy", np.zeros(30))
    whole = (tmp_path / "fine.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-8])
    (tmp_path / "deep.npy").write_bytes(whole[:10] + b"(" * 118 + whole[128:])
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("objects", "named", "cut", "deep"):
        refuses(ValueError, f"{name}.npy", read_npy, tmp_path / f"{name}.npy")
    for name in ("pipe", "text"):
        refuses(ValueError, f"{name}.npz", read_npz, tmp_path / f"{name}.npz")
