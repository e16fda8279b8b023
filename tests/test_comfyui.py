"""The nodes for ComfyUI, by the contract of its documentation: a workflow is run as its executor runs it."""

import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchFeature

import visual_spec
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline, tiny_video_pipeline
from tests.helpers.tiny_audio import tiny_audio_pipeline
from tests.models.next_token import tiny_transformers as tiny
from visual_spec.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

ROOT = Path(__file__).parents[1]


def execute(name: str, **inputs: Any) -> tuple:
    """As ComfyUI does: an instance of the class, its FUNCTION by keywords, one value for each of RETURN_TYPES."""
    kind = NODE_CLASS_MAPPINGS[name]
    declared = kind.INPUT_TYPES()
    for key, value in inputs.items():  # a menu takes what it shows
        menu = ({} | declared["required"] | declared.get("optional", {}))[key][0]
        assert not isinstance(menu, list) or value in menu
    usual = {
        key: spec[1]["default"] for key, spec in declared["required"].items() if "default" in (*spec, {})[1]
    }
    assert set(inputs) <= {*declared["required"], *declared.get("optional", {})}
    answer = getattr(kind(), kind.FUNCTION)(**usual | inputs)
    assert isinstance(answer, tuple) and len(answer) == len(kind.RETURN_TYPES)
    return answer


def test_every_node_declares_what_comfyui_reads() -> None:
    assert NODE_CLASS_MAPPINGS.keys() == NODE_DISPLAY_NAME_MAPPINGS.keys()
    made = {kind.RETURN_TYPES[0] for kind in NODE_CLASS_MAPPINGS.values()}
    for kind in NODE_CLASS_MAPPINGS.values():
        declared = kind.INPUT_TYPES()
        function = inspect.signature(getattr(kind, "draw", getattr(kind, kind.FUNCTION)))
        for section in declared.values():
            for name, (sort, *options) in section.items():
                assert name in function.parameters
                assert sort in ("STRING", "INT", "FLOAT", *made) or (isinstance(sort, list) and all(sort))
                assert all(isinstance(one, dict) for one in options)


def test_pictures_are_those_of_the_pipeline(tmp_path: Path) -> None:
    tiny_pipeline().save_pretrained(tmp_path / "tiny")
    (model,) = execute("VisualSpecLoadModel", path=str(tmp_path / "tiny"), device="cpu", dtype="float32")
    plain = {"model": model, "prompt": "a red circle", "seed": 5, "batch_size": 3}
    (image,) = execute("VisualSpecGenerateImage", **plain)
    wanted = tiny_pipeline()(["a red circle"] * 3, generator=seeded(5, 6, 7), output_type="np").images
    assert image.dtype == torch.float32 and image.shape == (3, 8, 8, 3)
    assert 0 <= image.min() and image.max() <= 1 and np.allclose(image.numpy(), wanted, atol=1e-6)
    (sampler,) = execute("VisualSpecSampler", sampler="speculative-jacobi", settings="window=3")
    before = model.sampler
    (again,) = execute("VisualSpecGenerateImage", sampler=sampler, **plain)
    assert model.last_trace.sampler == "SpeculativeJacobiSampler" and model.sampler is before
    assert torch.equal(again, image)
    (other,) = execute("VisualSpecGenerateImage", temperature=0.0, guidance_scale=-1.0, **plain)
    assert not torch.equal(other, image)


def test_clips_and_music() -> None:
    pipe = tiny_video_pipeline(AutoregressiveSampler())
    (frames,) = execute("VisualSpecGenerateImage", model=pipe, prompt="a red circle", seed=1, batch_size=2)
    wanted = pipe(["a red circle"] * 2, generator=seeded(1, 2), output_type="np").frames
    assert np.allclose(frames.numpy(), wanted.reshape(-1, *wanted.shape[2:]), atol=1e-6)
    pipe = tiny_audio_pipeline()
    (audio,) = execute("VisualSpecGenerateAudio", model=pipe, prompt="a slow sad organ", seed=1, batch_size=2)
    heard = pipe(["a slow sad organ"] * 2, generator=seeded(1, 2))
    assert np.array_equal(audio["waveform"].numpy(), heard.audios) and audio["waveform"].dim() == 3
    assert audio["sample_rate"] == heard.sampling_rate and isinstance(audio["sample_rate"], int)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="makes audio"):
        execute("VisualSpecGenerateImage", model=tiny_audio_pipeline(), prompt="x", seed=0)
    for setting in ("guidance_scale", "temperature"):
        for number in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{setting}={number}"):
                execute(
                    "VisualSpecGenerateImage", model=tiny_pipeline(), prompt="x", seed=0, **{setting: number}
                )
    for sampler, settings, message in (("tree", "dept=3", "dept"), ("plain", "window=3", "by its name")):
        refuses(ValueError, message, execute, "VisualSpecSampler", sampler=sampler, settings=settings)


class Interrupted(Exception):
    """As ComfyUI's own: Cancel was pressed."""


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """What the nodes ask of ComfyUI's modules, by the signatures of its sources; `cancel_at`: calls until Cancel."""
    seen = SimpleNamespace(bar=[], checks=0, cancel_at=None)

    class ProgressBar:
        def __init__(self, total: int) -> None:
            pass

        def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
            seen.bar.append((value, total))

    def check() -> None:
        seen.checks += 1
        if seen.checks == seen.cancel_at:
            raise Interrupted

    management = dict(
        get_torch_device=lambda: torch.device("cpu"), throw_exception_if_processing_interrupted=check
    )
    monkeypatch.setitem(sys.modules, "comfy.model_management", SimpleNamespace(**management))
    monkeypatch.setitem(sys.modules, "comfy.utils", SimpleNamespace(ProgressBar=ProgressBar))
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(models_dir=str(tmp_path)))
    return seen


def test_the_bar_ends_with_the_tokens_and_cancel_ends_a_sample(
    comfy: SimpleNamespace, tmp_path: Path
) -> None:
    pipe = tiny_pipeline()
    pipe.save_pretrained(tmp_path / "visual_spec" / "mine")  # a folder of ComfyUI's `models` is in the menu
    (model,) = execute("VisualSpecLoadModel", model="mine")
    wanted = {"model": model, "prompt": "a red circle", "seed": 5}
    (image,) = execute("VisualSpecGenerateImage", **wanted)
    total, calls = model.transformer.grid.num_tokens, int(model.last_trace.target_calls[0])
    done = [value for value, _ in comfy.bar]
    assert done == sorted(done) and comfy.bar[-1] == (total, total) and comfy.checks == calls
    before = model.sampler
    comfy.checks, comfy.cancel_at = 0, 2
    with pytest.raises(Interrupted):
        execute("VisualSpecGenerateImage", **wanted)
    comfy.cancel_at = None
    assert model.sampler is before
    assert torch.equal(execute("VisualSpecGenerateImage", **wanted)[0], image)


def test_a_janus_draws_what_it_draws_without_the_nodes(
    comfy: SimpleNamespace, tmp_path: Path, monkeypatch
) -> None:
    janus, asked = tiny.janus(), {}
    janus.save_pretrained(tmp_path / "visual_spec" / "janus")

    class Processor:
        def __call__(self, text: list[str], generation_mode: str, **_: Any) -> BatchFeature:
            asked.update(text=text, mode=generation_mode)
            ids = torch.tensor([[3, 5, 7, 9]]).repeat(len(text), 1)
            return BatchFeature({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda folder: Processor())
    (model,) = execute("VisualSpecLoadModel", model="janus")
    drawn = {}
    for sampler in ("plain", "default"):
        (chosen,) = execute("VisualSpecSampler", sampler=sampler)
        law = dict(temperature=1.0, guidance_scale=2.0, seed=4, batch_size=2, sampler=chosen)
        (drawn[sampler],) = execute("VisualSpecGenerateImage", model=model, prompt="a cat", **law)
    assert asked == {"text": ["a cat"] * 2, "mode": "image"}
    assert (
        torch.equal(drawn["plain"], drawn["default"])
        and 0 <= drawn["plain"].min() <= drawn["plain"].max() <= 1
    )
    janus = janus.float()
    visual_spec.accelerate(janus, "autoregressive")
    inputs = Processor()(["a cat"] * 2, "image")
    ids = janus.generate_images(
        **inputs, generator=seeded(4, 5), do_sample=True, temperature=1.0, guidance_scale=2.0
    )
    pixels = (janus.decode_images(ids).permute(0, 2, 3, 1) + 1) / 2
    assert torch.allclose(pixels, drawn["plain"], atol=1e-5)
    (folder := tmp_path / "visual_spec" / "other").mkdir()
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    refuses(ValueError, "GPT2LMHeadModel.*Janus", execute, "VisualSpecLoadModel", model="other")


def test_a_clone_in_custom_nodes_is_loaded(tmp_path: Path) -> None:
    """As ComfyUI loads it: the file `__init__.py` of a folder, by its path, where the package is not installed."""
    load = """
import importlib.util, sys
root = sys.argv[1]
sys.path = [path for path in sys.path if not path.startswith(root) or "site-packages" in path]
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
where = dict(submodule_search_locations=[root])
spec = importlib.util.spec_from_file_location("clone", root + "/__init__.py", **where)
module = sys.modules["clone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(sys.modules["visual_spec"].__file__.removeprefix(root), sorted(module.NODE_CLASS_MAPPINGS))
"""
    ran = subprocess.run(
        [sys.executable, "-c", load, str(ROOT)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert ran.stdout.strip().splitlines()[-1] == f"/visual_spec/__init__.py {sorted(NODE_CLASS_MAPPINGS)}"


def test_the_example_workflow_connects_the_nodes() -> None:
    workflow = json.loads((ROOT / "example_workflows" / "visual_spec.json").read_text())
    for node in workflow.values():
        if node["class_type"] not in NODE_CLASS_MAPPINGS:
            assert node["class_type"] in ("SaveImage", "PreviewImage")
            continue
        declared = NODE_CLASS_MAPPINGS[node["class_type"]].INPUT_TYPES()
        assert declared["required"].keys() <= node["inputs"].keys()
        for name, value in node["inputs"].items():
            sort = ({} | declared["required"] | declared.get("optional", {}))[name][0]
            if isinstance(value, list):
                other, slot = value
                assert NODE_CLASS_MAPPINGS[workflow[other]["class_type"]].RETURN_TYPES[slot] == sort
            elif isinstance(sort, list):
                assert value in sort


def test_requirements_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    listed = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line[:1] != "#"]
    assert sorted(listed) == sorted(one for one in declared if not one.startswith("torch"))
