"""The page of `visual-spec app`: what it draws, and, where Gradio is installed, what its server answers."""

import re
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.pipelines import KINDS
from tests.helpers.tiny import seeded, tiny_pipeline
from visual_spec import cli
from visual_spec.commands import app
from visual_spec.commands.app import draw, fitting_samplers, known_words, make_page, unknown_words
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

ENLARGED = app._enlarged


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visual_spec.commands.app._PAUSE", -1.0)
    monkeypatch.setattr("visual_spec.commands.app._enlarged", lambda picture: picture)


def test_both_sides_grow_and_end_equal() -> None:
    pipe = tiny_pipeline(AutoregressiveSampler())
    pipe.set_progress_bar_config(disable=True)
    *growing, last = draw(lambda name: pipe, "tiny", "a red circle", "", 7)
    wanted = np.asarray(pipe("a red circle", generator=seeded(7)).images[0])
    assert np.array_equal(np.asarray(last[0]), wanted) and np.array_equal(np.asarray(last[1]), wanted)
    assert last[2] is not None and re.search(
        r"plain: 16 calls, 16 tokens, 1.00 a call, \d+\.\d\d s\n", last[3]
    )
    assert "the same picture, token for token" in last[3]
    grey = [[int((np.asarray(side) == 128).all(-1).sum()) for side in shown[:2]] for shown in growing]
    assert len(growing) >= 16 and grey[0][0] == 60 and grey == sorted(grey, reverse=True)
    assert any(fast < plain for plain, fast in grey)
    assert isinstance(pipe.sampler, AutoregressiveSampler)  # as it was
    *_, named = draw(lambda name: pipe, "tiny", "a red circle", "speculative-jacobi:window=2", 7)
    assert np.array_equal(np.asarray(named[1]), wanted)


def test_small_pictures_are_enlarged_pixel_by_pixel() -> None:
    pixels = np.arange(128 * 100 * 3, dtype=np.uint32).reshape(128, 100, 3).astype(np.uint8)
    large = np.asarray(ENLARGED(Image.fromarray(pixels)))
    assert np.array_equal(large, pixels.repeat(4, 0).repeat(4, 1))
    assert ENLARGED(Image.new("RGB", (640, 700))).size == (640, 700)


def test_what_the_model_knows_stands_on_the_page() -> None:
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    *_, last = draw(lambda name: pipe, "tiny", "a red cat on a fence", "", 0)
    assert last[3].startswith("the model does not know 'cat', 'fence'\n")
    examples, line = known_words(pipe)
    assert (
        line.startswith("**Words**: ") and "red" in line and not any(unknown_words(pipe, p) for p in examples)
    )
    names = fitting_samplers(pipe)
    assert (
        names[0] == pipe.fast_sampler and {"autoregressive", "zipar"} < set(names) and "masked" not in names
    )
    before = type(pipe.sampler)
    for name in names:
        drawn: Any = draw(lambda name: pipe, "tiny", "a red circle", name, 0)
        next(drawn)
        drawn.close()
    assert type(pipe.sampler) is before


@pytest.mark.parametrize("name", ["masked captions", "bits"])
def test_other_kinds(name: str) -> None:
    pipe = KINDS[name].make()
    *_, last = draw(lambda name: pipe, name, "a red circle", "", 1)
    assert last[1] is not None and (last[0] is None) == (not pipe.comparable)


def test_refusals_and_a_page_that_is_left() -> None:
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    asked = partial(draw, lambda name: pipe, "tiny")
    refused: list[tuple[tuple[Any, ...], str]] = [
        (("x" * 3000, "", 0), "3000 letters"),
        (("a red circle", "no-such", 0), "no-such"),
        (("a red circle", "masked", 0), "MaskedSampler"),
        (("a red circle", "", None), "seed=None"),  # the field is empty
        (("a red circle", "", 0.5), "seed=0.5"),
    ]
    for arguments, wrong in refused:
        with pytest.raises((ValueError, TypeError), match=wrong):
            next(asked(*arguments))
    before = threading.active_count()
    left: Any = asked("a red circle", "", 0)
    next(left)
    left.close()
    assert threading.active_count() == before


def test_the_command_refuses_other_media(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["app", "--model", "tunes"]) == 2 and "tunes makes audio" in capsys.readouterr().err


def test_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    client = pytest.importorskip("gradio_client")
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    monkeypatch.setattr("visual_spec.pipelines.placing.load", lambda *_: pipe)
    page = make_page(["tiny"])
    page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, share=False)
    try:
        asked = client.Client(page.local_url, verbose=False)
        *_, words = asked.predict("tiny", "a red circle", "", 3, api_name="/draw")
        assert "the same picture, token for token" in words
        for model in ("other", "../secret", "/etc"):
            with pytest.raises(Exception, match="unknown model|not in the list"):
                asked.predict(model, "a red circle", "", 3, api_name="/draw")
    finally:
        page.close()
