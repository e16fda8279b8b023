"""What `visual-spec serve` refuses before anything is loaded, and what a folder for vLLM holds. Needs no vLLM."""

import json
import re
import sys
from pathlib import Path

import pytest

import visual_spec
from tests.helpers.refusals import refuses
from visual_spec.cli import main
from visual_spec.commands.serve import build_parser
from visual_spec.pipelines.placing import load
from visual_spec.samplers.core.history import RepetitionPenalty
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.serving.request import PictureRequest, settings_of
from visual_spec.serving.vllm.engine import engine_arguments
from visual_spec.serving.vllm.folder import PromptIds, save_for_vllm


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["shapes", "--host", "0.0.0.0"], "--host 0.0.0.0 without a key"),
        (["shapes", "--queue", "0"], "--queue 0"),
        (["shapes", "--max-n", "-1"], "--max-n -1"),
        (["shapes", "--window", "0"], "--window 0"),
    ],
)
def test_bad_arguments_are_named(arguments, named, capsys, monkeypatch):
    monkeypatch.delenv("VISUAL_SPEC_API_KEY", raising=False)
    assert main(["serve", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_the_limits_and_routes_of_the_guide_are_those_of_the_command():
    guide = (Path(__file__).parents[2] / "docs" / "SERVING.md").read_text()
    rows = re.findall(r"^\| (\d+) [^|]*\| `(--[a-z-]+)` \|", guide, re.MULTILINE)
    options = {one.option_strings[0]: one.default for one in build_parser()._actions if one.option_strings}
    assert {option: int(number) for number, option in rows} == {
        name: value
        for name, value in options.items()
        if isinstance(value, int) and name not in ("--port", "--window")
    }
    http = (Path(__file__).parents[2] / "visual_spec" / "serving" / "http.py").read_text()
    for path in ("/health", "/live", "/ready", "/metrics", "/version", "/v1/models"):
        assert f'"{path}":' in http and f"`{path}`" in guide.replace("`GET ", "`")


@pytest.mark.parametrize("given", ["variable", "option"])
def test_an_empty_key_does_not_open_the_server(given, capsys, monkeypatch):
    monkeypatch.setenv("VISUAL_SPEC_API_KEY", " " if given == "variable" else "")
    more = ["--api-key", ""] if given == "option" else []
    assert main(["serve", "shapes", "--host", "0.0.0.0", *more]) == 2
    assert "without a key" in capsys.readouterr().err


def test_the_engine_computes_in_the_type_of_the_folder(tmp_path):
    """vLLM's own choice for a float32 folder is bfloat16."""
    pipe = load("shapes", "cpu", "float32")
    folder = save_for_vllm(pipe, tmp_path)
    assert engine_arguments(folder)["dtype"] == "float32"
    assert engine_arguments(folder, dtype="bfloat16")["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["fastapi", "uvicorn", "prometheus_client"])
def test_what_is_missing_is_named(name, capsys, monkeypatch):
    for module in [one for one in sys.modules if one.startswith("visual_spec.serving.") or one == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["serve", "shapes"]) == 2
    assert f"serve needs {name}; see docs/SERVING.md" in capsys.readouterr().err


def test_a_folder_says_what_vllm_and_the_windows_read(tmp_path):
    pipe = load("shapes", "cpu", "float32")
    config = json.loads((save_for_vllm(pipe, tmp_path) / "config.json").read_text())
    assert config["visual_spec"]["grid"] == [16, 16] and config["visual_spec"]["image_ids"] == [0, 1024]
    # Heads of 48 channels get more, of a size that vLLM has; no token of a prompt or a picture ends a request.
    assert config["head_dim"] == 64 and config["eos_token_id"] == config["vocab_size"] - 1
    ids = PromptIds(pipe.transformer, pipe.text_encoder)
    words, none = ids.of("a large red circle")
    assert len(words) == len(none) == 20 and max(words + none) < config["eos_token_id"]
    assert words[:16] == none[:16] == [ids.padding] * 16 and len(set(none[16:])) == 4
    assert ids.of("Red, CIRCLE!")[0][-2:] == words[-2:]
    for prompt in ("!!!", 3):
        refuses(ValueError, repr(prompt), ids.of, prompt)


def test_other_models_are_refused(tmp_path):
    for name in ("shapes_nar", "shapes_var"):
        refuses(ValueError, "LlamaGen", save_for_vllm, load(name, "cpu", "float32"), tmp_path)


def test_the_settings_of_a_picture_are_read_as_they_were_written():
    law = TokenLaw(guidance_scale=2.5, temperature=0.7, top_k=5, top_p=0.9, guidance_until=7)
    both = [PictureRequest.of(settings) for settings in settings_of(law, 2**63, "a")]
    assert [one and one.role for one in both] == ["conditional", "unconditional"]
    assert all(one is not None and one.law == law and one.pair == "a" for one in both)
    (alone,) = settings_of(TokenLaw(), 1)
    assert PictureRequest.of(alone) == PictureRequest.of({"seed": 1})


@pytest.mark.parametrize("more", [{"end": 5}, {"allowed": (0, 4)}, {"history": (RepetitionPenalty(1.3),)}])
def test_a_law_that_a_request_cannot_say_is_refused(more):
    refuses(ValueError, next(iter(more)), settings_of, TokenLaw(temperature=0.7, **more), 1)


def test_the_names_are_offered():
    assert callable(visual_spec.custom_generate) and callable(visual_spec.save_custom_generate)


def test_the_type_is_read_from_what_transformers_writes(tmp_path):
    """`dtype` since its fifth version, `torch_dtype` before."""
    pipe = load("shapes", "cpu", "float32")
    folder = save_for_vllm(pipe, tmp_path / "served")
    config = json.loads((folder / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        own = {key: one for key, one in config.items() if key not in ("dtype", "torch_dtype")}
        (folder / "config.json").write_text(json.dumps(own | {name: "bfloat16"}))
        assert engine_arguments(folder, window=4, requests=2)["dtype"] == "bfloat16"
