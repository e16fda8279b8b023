"""The pages as they stand: their links lead somewhere, their snippets run, and the site builds without a warning."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.modular_pipelines.minimax_music3.modular_pipeline import MiniMaxMusic3ModularPipeline
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from transformers import BatchEncoding

import visual_spec
from tests.helpers.diffusers_video import tiny_pipeline
from tests.helpers.musicgen import IDS, MASK
from tests.helpers.tiny_audio import tiny_musicgen
from tests.helpers.tiny_depth import tiny_csm, tiny_minimax_music, tiny_moshi
from tests.helpers.tiny_speech import IDS as SPEECH
from tests.helpers.tiny_speech import tiny_vibevoice
from tests.helpers.tiny_wan import prompts
from tests.helpers.transformers_models import INPUTS
from tests.models.next_token import tiny_transformers as tiny
from visual_spec.models.next_token.chameleon_vq import ChameleonVQDecoder
from visual_spec.models.next_token.movq import MoVQDecoder

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted(DOCS.rglob("*.md")),
]
CODE = re.compile(r"^```.*?^```\n", flags=re.M | re.S)


def python_blocks(page: str, section: str = "") -> list[str]:
    """The Python snippets of a page, or of one of its sections."""
    text = (DOCS / page).read_text()
    if section:
        text = re.split(rf"^#+ {re.escape(section)}\n", text, flags=re.M)[1]
        text = re.split(r"^#+ ", CODE.sub(lambda found: found[0].replace("\n#", "\n #"), text), flags=re.M)[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_internal_links_and_anchors_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text()))
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def numbers_of(content: Any) -> list[float]:
    """All numbers of a stored result, with the shares and the speeds of what it counted or timed."""
    if isinstance(content, dict):
        further = []
        if {"right", "pictures"} <= set(content):
            further = [content["right"] / content["pictures"]]
        elif set(content) == {"public", "accelerated"}:  # seconds, in turn
            further = [sum(content["public"]) / sum(content["accelerated"])]
        content = [*content.values(), *further]
    if isinstance(content, list):
        return [number for one in content for number in numbers_of(one)]
    return [content] if isinstance(content, int | float) and not isinstance(content, bool) else []


def claims() -> list[tuple[str, str, str]]:
    """Rows of METHODS with figures: (what, what was measured, files of results)."""
    lines = (DOCS / "METHODS.md").read_text().split("\n## Measures")[0].splitlines()
    rows = [line[2:-2].split(" | ") for line in lines]
    return [(row[0], row[2], row[3]) for row in rows if len(row) == 5 and row[0] != "system"]


@pytest.mark.parametrize(("name", "measured", "files"), claims(), ids=lambda text: text[:20])
def test_a_speed_or_accuracy_stands_in_a_file_that_its_row_names(
    name: str, measured: str, files: str
) -> None:
    """Printed as stored, or as a percentage of it, at the digits that are printed."""
    known = [
        number
        for file in re.findall(r"`([\w-]+)`", files)
        for number in numbers_of(json.loads((ROOT / f"benchmarks/results/{file}.json").read_text()))
    ]
    for figure in re.findall(
        r"(?<![\w.,-])(\d+(?:\.\d+)?)(?=x\b| %| tokens a call| columns a call)", measured
    ):
        half = 0.5 * 10 ** -len(figure.partition(".")[2]) + 1e-9
        assert any(abs(scale * one - float(figure)) <= half for one in known for scale in (1, 100)), figure


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert set(re.findall(r"\S+\.md", navigation)) == {
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    }


def test_the_site_builds_without_a_warning_and_asks_no_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = (
        r"<(?:script|img|iframe)[^>]* src=\"?https?:|<link[^>]* rel=\"?(?:stylesheet|preconnect)[^>]*https?:"
    )
    for page in tmp_path.rglob("*.html"):
        assert not re.search(loaded, page.read_text()), page.name
    # What search needs where pages are opened as files.
    assert (tmp_path / "iframe-worker.js").exists() and (tmp_path / "search" / "search_index.js").exists()
    api = (tmp_path / "API.html").read_text()
    missing = [name for name in visual_spec.__all__ if f'id="visual_spec.{name}"' not in api]
    assert set(missing) <= {"__version__"}


def test_the_snippets_of_the_embedded_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for snippet in python_blocks("index.md", "No model at hand: `things`"):
        exec(snippet, names)
    assert (tmp_path / "fox.png").stat().st_size > 1000
    assert (names["out"].trace.target_calls < names["plain"].trace.target_calls / 2).all()


class Loaded:
    """What `from_pretrained` loads in a snippet, tiny and random; a processor that returns its inputs."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = BatchEncoding(inputs)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.inputs

    apply_chat_template = __call__


class GlmPipeline:
    """The token stage of diffusers' pipeline."""

    def __init__(self) -> None:
        self.components = {"vision_language_encoder": tiny.glm_image()}

    def __call__(self, prompt: str, **size: int) -> Any:
        (model,) = self.components.values()
        return SimpleNamespace(images=model.generate(**INPUTS["glm"], do_sample=True, max_new_tokens=22))


def wan() -> dict[str, Any]:
    pipe = tiny_pipeline()
    return {"WanTransformer3DModel": pipe.transformer, "WanPipeline": pipe}


IMAGES = {name: {key: INPUTS[name][key] for key in ("input_ids", "attention_mask")} for name in INPUTS}
DECODER = ChameleonVQDecoder(32, (1, 2), 1, 8, 24, 8).double()


def janus() -> dict[str, Any]:
    return {"JanusForConditionalGeneration": tiny.janus(), "JanusProcessor": Loaded(IMAGES["janus"])}


def chameleon() -> dict[str, Any]:
    processor = Loaded(IMAGES["chameleon"])
    return {"ChameleonForConditionalGeneration": tiny.chameleon(), "ChameleonProcessor": processor}


def second_lumina() -> dict[str, Any]:
    """The words of the prompt are not looked at; the tokenizer has a token for the end of the text only."""
    tokenizer = Loaded(IMAGES["chameleon"])
    vars(tokenizer).update(bos_token=None, eos_token="</s>")
    model = tiny.chameleon(vocab_size=171384, hidden_size=16)
    return {"ChameleonForConditionalGeneration": model, "AutoTokenizer": tokenizer}


def emu3() -> dict[str, Any]:
    return {"Emu3ForConditionalGeneration": tiny.emu3(), "Emu3Processor": Loaded(INPUTS["emu3"])}


def musicgen() -> dict[str, Any]:
    processor = Loaded(dict(input_ids=IDS, attention_mask=MASK))
    return {"MusicgenForConditionalGeneration": tiny_musicgen(), "AutoProcessor": processor}


def vibevoice() -> dict[str, Any]:
    processor = Loaded(dict(input_ids=SPEECH, attention_mask=torch.ones_like(SPEECH)))
    return {"VibeVoiceForConditionalGeneration": tiny_vibevoice(), "AutoProcessor": processor}


def csm() -> dict[str, Any]:
    ids = torch.tensor([[1, 5, 9, 2]])
    processor = Loaded(dict(input_ids=ids, attention_mask=torch.ones_like(ids)))
    return {"CsmForConditionalGeneration": tiny_csm(), "AutoProcessor": processor}


class MusicPipeline(MiniMaxMusic3ModularPipeline):
    """The stage of codes of diffusers' pipeline, for a tokenized prompt."""

    def load_components(self) -> None: ...

    def __call__(self, prompt: str, lyrics: str, output: str) -> Any:
        state = PipelineState()
        generator = torch.Generator().manual_seed(0)
        ids = torch.tensor([[5, 9, 2, 7], [5, 3, 2, 7]])
        for name, value in dict(text_ids=ids, audio_duration=0.2, generator=generator).items():
            state.set(name, value)
        assert self._blocks is not None
        self._blocks.sub_blocks["generate"](self, state)
        return state.get("frame_hiddens")


HELD: dict[tuple[str, str], Any] = {
    ("index.md", "You hold a Janus"): janus,
    ("index.md", "You hold a MusicGen"): musicgen,
    ("index.md", "You hold a Wan"): wan,
    ("MODELS.md", "Janus, Janus-Pro"): janus,
    ("MODELS.md", "Chameleon, Anole"): chameleon,
    ("MODELS.md", "Lumina-mGPT"): chameleon,
    ("MODELS.md", "Lumina-mGPT 2.0"): second_lumina,
    ("MODELS.md", "Emu3"): emu3,
    ("MODELS.md", "GLM-Image"): lambda: {"GlmImagePipeline": GlmPipeline()},
    ("MODELS.md", "MusicGen, MusicGen Melody"): musicgen,
    ("MODELS.md", "Speech"): vibevoice,
    ("MODELS.md", "CSM, Qwen3-Omni"): csm,
    ("MODELS.md", "Moshi"): lambda: {"MoshiForConditionalGeneration": tiny_moshi()},
    ("MODELS.md", "MiniMax-Music 3"): lambda: {"ModularPipeline": tiny_minimax_music(MusicPipeline)},
    ("MODELS.md", "Wan"): wan,
}
# Sizes that tiny models have, and features in place of a text encoder.
SMALL = {
    "(48, 48)": "(4, 6)",
    "(96, 96)": "(4, 8)",
    "max_new_tokens=503": "max_new_tokens=20",
    "max_new_tokens=400": "max_new_tokens=4",
    '"a cat on a fence", num_frames=321': "prompt_embeds=embeds, num_frames=9, height=32, width=32",
}


@pytest.mark.parametrize(("page", "section"), HELD)
def test_the_snippet_of_a_model_that_is_held_runs(
    page: str, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiny random models in place of those that it loads: the call, what comes back, and the calls saved."""
    [snippet] = python_blocks(page, section)
    for large, small in SMALL.items():
        snippet = snippet.replace(large, small)
    loaded = HELD[page, section]()
    for name, thing in loaded.items():
        library = transformers if hasattr(transformers, name) else diffusers
        monkeypatch.setattr(getattr(library, name), "from_pretrained", lambda *_, thing=thing, **__: thing)
    monkeypatch.setattr(ChameleonVQDecoder, "from_file", lambda *_: DECODER)
    monkeypatch.setattr(MoVQDecoder, "from_file", lambda *_: MoVQDecoder(32, blocks_per_level=1))
    torch.manual_seed(0)
    names: dict[str, Any] = dict(embeds=prompts(1).float())
    exec(snippet, names)
    drawn = next(names[name] for name in ("pictures", "waves", "audio", "frames") if name in names)
    assert len(drawn) >= 1
    assert snippet.count("restore") or "not accelerated" not in visual_spec.summary(
        next(iter(loaded.values()))
    )


def test_every_model_that_accelerate_takes_is_on_the_page_of_models() -> None:
    with pytest.raises(TypeError) as refusal:
        visual_spec.accelerate(object())
    classes = re.findall(r"(\w+)ForConditionalGeneration", str(refusal.value))
    page = (DOCS / "MODELS.md").read_text().lower().replace("-", "").replace(" ", "")
    assert len(classes) >= 8
    assert [name for name in classes if name.lower() not in page] == []


@pytest.mark.parametrize("book", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda book: book.stem)
def test_a_notebook_runs(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own assertions hold; it is stored with the outputs of one run from top to bottom."""
    cells = json.loads(book.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code if "print(" in "".join(cell["source"]).partition("def ")[0])
    names: dict[str, Any] = {}
    for cell in code:
        exec("".join(cell["source"]), names)
    if book.stem == "first_picture":
        assert [same for _, _, same in names["rows"]] == [True, False, False]
    else:
        assert int(names["model"].config.vision_config.num_image_tokens) == names["plain"].shape[1]
    assert "call" in capsys.readouterr().out
