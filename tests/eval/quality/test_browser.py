"""The pages in a real browser: headless Chromium, wide and narrow, light and dark, without any request to elsewhere."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.pages import row as comparison_row
from tests.helpers.sample_sets import PromptSet, scored
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.sets_page import ScoredSet, write_sets_page
from visual_spec.eval.report.pages import write_html
from visual_spec.files.pictures import png_bytes

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)"),
]
WIDTHS, SCHEMES, HEIGHT = (1280, 390), ("light", "dark"), 900
ROWS = 500  # of two pictures each


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=200_000)
        yield found
        found.close()


@pytest.fixture(scope="module")
def thousand(tmp_path_factory) -> Path:
    """A page of two sets of 500 pictures of 128 x 128 pixels."""
    folder = tmp_path_factory.mktemp("sets")
    for name, text in (("plain", "autoregressive"), ("fast", "speculative-jacobi:window=4")):
        scored(folder / name, 10.0, text=text, num=2, prompts=PromptSet(("a red circle", "blue " * 30)))
        lines = [json.loads(line) for line in (folder / name / "manifest.jsonl").read_text().splitlines()]
        rng = np.random.default_rng(0)
        manifest = []
        for index in range(ROWS):
            picture = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).resize((128, 128), 0)
            (folder / name / f"{index:06d}.png").write_bytes(png_bytes(picture))
            file = {"index": index, "seed": index, "file": f"{index:06d}.png"}
            manifest.append(json.dumps(lines[index % 2] | file) + "\n")
        (folder / name / "manifest.jsonl").write_text("".join(manifest))
        assert len(SampleFiles.open(folder / name)) == ROWS
    return write_sets_page(
        [ScoredSet.read(folder / name) for name in ("plain", "fast")],
        folder / "page.html",
        "A thousand pictures",
        shown=ROWS,
    )


@pytest.fixture(scope="module")
def pages(thousand, tmp_path_factory) -> dict[str, Path]:
    """One page of every kind that needs no model."""
    folder = tmp_path_factory.mktemp("pages")
    long = comparison_row(prompt="a very_long_word_" * 12)
    comparison = write_html(
        [comparison_row(), long], folder / "comparison.html", facts={"sampler": "x" * 200}
    )
    found = {"sets": thousand, "comparison": comparison}
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    try:
        from visual_spec.eval.report import frontier

        for name in ("shapes-quality", "tunes-quality"):
            documents = frontier.read_results([results / f"{name}.json"])
            found[name] = frontier.write_page(documents, folder / f"{name}.html", "Speed against quality")
    except ImportError:
        pass  # matplotlib is not there
    return found


def opened(browser, path: Path, width: int, scheme: str):
    """A page, and what it asked for and complained of."""
    page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
    page.set_default_timeout(200_000)
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    return page, asked, complaints


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_screen_and_ask_for_nothing(browser, pages, width, scheme):
    for name, path in pages.items():
        page, asked, complaints = opened(browser, path, width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (
            f"{name} is wider than the screen"
        )
        # What is wider than its box must be scrolled within it, not cut off.
        cut = page.evaluate(
            """() => [...document.querySelectorAll('main *')].filter(e => {
                const box = e.getBoundingClientRect();
                if (box.width === 0 || box.right <= innerWidth + 1) return false;
                for (let p = e; p; p = p.parentElement)
                    if (['auto', 'scroll'].includes(getComputedStyle(p).overflowX)) return false;
                return true;
            }).map(e => e.outerHTML.slice(0, 120))"""
        )
        assert not cut, f"{name}: {cut[:3]}"
        assert {url.split(":")[0] for url in asked} <= {"file", "data"}, name
        assert [url for url in asked if url.startswith("file:")] == [path.as_uri()], name
        assert complaints == [], name
        paper, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        light = [sum(map(int, colour[4:-1].split(","))) / 3 for colour in (paper, ink)]
        assert (light[0] > light[1] + 150) if scheme == "light" else (light[1] > light[0] + 150), name
        page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_thousand_pictures_are_read_as_they_come_into_view(browser, thousand, width):
    page, _, _ = opened(browser, thousand, width, "light")
    count = "[...document.images].filter(one => one.complete && one.naturalWidth > 0).length"
    assert page.evaluate("document.images.length") == 2 * ROWS
    first = page.evaluate(count)
    assert first < 0.2 * 2 * ROWS
    height = page.evaluate("document.documentElement.scrollHeight")
    page.evaluate("[...document.images].at(-1).scrollIntoView()")
    page.wait_for_function(
        "() => { const last = [...document.images].at(-1); return last.complete && last.naturalWidth > 0 }"
    )
    seen = page.evaluate(count)
    assert first < seen < 0.5 * 2 * ROWS
    # The page was as long before its pictures were read, so the scroll bar does not jump.
    assert page.evaluate("document.documentElement.scrollHeight") == pytest.approx(height, rel=0.2)
    wide = page.evaluate("[...document.images].at(-1).getBoundingClientRect().width")
    assert wide == 128
    page.close()


def test_the_pixels_on_the_screen_are_those_of_the_file(browser, thousand):
    page, _, _ = opened(browser, thousand, 1280, "light")
    image = page.locator(".sample img").first
    image.scroll_into_view_if_needed()
    page.wait_for_function("() => document.images[0].complete && document.images[0].naturalWidth > 0")
    box = image.bounding_box()
    stored = Image.open(thousand.parent / "plain" / "000000.png").convert("RGB")
    assert (box["width"], box["height"]) == stored.size
    # Fonts may put the picture at a fraction of a pixel; the browser draws it at a whole one.
    place = {"x": round(box["x"]), "y": round(box["y"]), "width": stored.width, "height": stored.height}
    shown = Image.open(io.BytesIO(page.screenshot(clip=place))).convert("RGB")
    apart = torch.from_numpy(np.asarray(shown).astype(int) - np.asarray(stored).astype(int)).abs()
    middle = apart[12:-12, 12:-12]  # corners are round
    assert middle.float().mean() < 1
    page.close()
