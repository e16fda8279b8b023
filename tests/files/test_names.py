"""Names that a folder brings with it stay inside, and only regular files are opened."""

import os
import time
from pathlib import Path

import pytest

from tests.helpers.refusals import refuses
from visual_spec.files.reading import inside, open_regular, read_text


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "", ".", "a\0b", None, 3, ["x"], "..", "a" * 300]
)
def test_names_that_are_none_below_the_folder_are_refused(tmp_path, name):
    with pytest.raises(ValueError):
        inside(tmp_path, name, "manifest")


def test_links_are_refused_at_any_depth(tmp_path):
    (tmp_path / "set" / "real").mkdir(parents=True)
    (tmp_path / "set" / "real" / "x.png").write_bytes(b"x")
    (tmp_path / "set" / "away").symlink_to(tmp_path)
    (tmp_path / "set" / "x.png").symlink_to("real/x.png")
    (tmp_path / "set" / "gone.png").symlink_to("nowhere")
    assert inside(tmp_path / "set", "real/x.png", "m").read_bytes() == b"x"
    assert inside(tmp_path / "set", "new/x.png", "m") == tmp_path / "set" / "new" / "x.png"  # to be written
    for name in ("away/x.png", "x.png", "gone.png", "away"):
        refuses(ValueError, "link to", inside, tmp_path / "set", name, "m")


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"12345")
    started = time.monotonic()
    for name, said in (("pipe", "regular file"), ("zero", "regular file"), ("large", "at most 4")):
        refuses(ValueError, said, open_regular, tmp_path / name, most=4)
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(kind):
            open_regular(path)
    assert time.monotonic() - started < 5
    assert open_regular(tmp_path / "large").read() == b"12345"


def test_text_is_utf_8(tmp_path: Path):
    (tmp_path / "a").write_bytes("﻿Bär".encode())
    assert read_text(tmp_path / "a") == "Bär"
    (tmp_path / "b").write_bytes(b"B\xe4r")
    refuses(ValueError, "not UTF-8", read_text, tmp_path / "b")
