"""Saving and loading ImagePipeline, where diffusers has undocumented exceptions for classes defined outside of it.

Each exception has its test here, so that a new diffusers release that changes one is noticed.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from tests.tiny import seeded, tiny_pipeline, tiny_text_encoder, tiny_transformer, tiny_vq_model
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.drafters.mulo import MultiscaleDrafter
from visual_spec.pipelines import embedded
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.registry import SAMPLERS, sampler_class

ROOT = Path(__file__).parents[2]
PROMPT = "a red circle"


@pytest.fixture
def pipe() -> Any:
    return tiny_pipeline()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_pipeline(SpeculativeJacobiSampler(window=4)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_round_trip(folder):
    pipe = tiny_pipeline(SpeculativeJacobiSampler(window=4))
    loaded = ImagePipeline.from_pretrained(folder)
    for name in ("transformer", "vq_model", "text_encoder"):
        ours, theirs = getattr(pipe, name).state_dict(), getattr(loaded, name).state_dict()
        assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)
    assert loaded.sampler.config["window"] == 4
    assert (folder / "sampler" / "sampler_config.json").exists()
    assert loaded(PROMPT, generator=seeded(1)).tokens.equal(pipe(PROMPT, generator=seeded(1)).tokens)


@pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated:FutureWarning")  # users still type it
def test_components_and_dtype_can_be_chosen_at_loading(folder):
    assert (
        ImagePipeline.from_pretrained(folder, torch_dtype=torch.bfloat16).transformer.dtype == torch.bfloat16
    )
    assert ImagePipeline.from_pretrained(folder, dtype=torch.float64).transformer.dtype == torch.float64
    swapped = ImagePipeline.from_pretrained(folder, sampler=AutoregressiveSampler())
    assert isinstance(swapped.sampler, AutoregressiveSampler)
    assert ImagePipeline.from_pretrained(folder, text_encoder=None).text_encoder is None
    assert set(swapped.components) == {"transformer", "vq_model", "text_encoder", "sampler", "drafter"}
    assert isinstance(ImagePipeline.from_pipe(swapped), ImagePipeline)


def test_bfloat16_draws(folder):
    pipe = ImagePipeline.from_pretrained(folder, dtype=torch.bfloat16)
    assert np.isfinite(pipe(PROMPT, output_type="np").images).all()


def test_embedded_models_load_by_name(folder, monkeypatch):
    monkeypatch.setattr(embedded, "WEIGHTS_FOLDER", folder.parent)
    assert embedded.embedded_models() == ["tiny"]
    assert isinstance(ImagePipeline.from_pretrained("tiny"), ImagePipeline)
    facts = embedded.describe(folder)
    assert facts["image_size"] == 8 and facts["components"]["sampler"] == "SpeculativeJacobiSampler"
    for name, count in facts["parameters"].items():
        assert count == sum(parameter.numel() for parameter in getattr(tiny_pipeline(), name).parameters())
    with pytest.raises(
        ValueError, match="unknown model 'shape'; embedded models are tiny. Pass one of them, a folder"
    ):
        ImagePipeline.from_pretrained("shape")


def test_trap_1_hub_ids_load(folder, tmp_path):
    """diffusers' own download refuses repositories with classes that are neither its own nor transformers'."""
    commit = "0" * 40
    repository = tmp_path / "cache" / "models--me--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / commit)
    loaded = ImagePipeline.from_pretrained("me/tiny", cache_dir=tmp_path / "cache", local_files_only=True)
    assert loaded.sampler.config["window"] == 4


def test_trap_2_the_generic_class_does_not_find_ours(folder):
    """A folder of ours is loaded by ImagePipeline: DiffusionPipeline looks its class up in diffusers only."""
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] == "ImagePipeline"
    with pytest.raises(AttributeError, match="ImagePipeline"):
        DiffusionPipeline.from_pretrained(folder)


def test_trap_3_a_fresh_process_knows_every_component(folder):
    """diffusers looks components up in modules that are imported already, so the pipeline imports all of them."""
    load = f"visual_spec.ImagePipeline.from_pretrained({str(folder)!r})"
    code = f"import visual_spec; print({load}.sampler.config['window'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "4", done.stderr


def test_traps_4_and_5_modules_are_recorded_whole_and_bind_their_base_class(folder):
    """A class is found again only if its module is recorded whole, and binds the name of the base class."""
    index = json.loads((folder / "model_index.json").read_text())
    components = {name: value for name, value in index.items() if isinstance(value, list)}
    assert components.pop("drafter") == [None, None]
    assert set(components) == {"transformer", "vq_model", "text_encoder", "sampler"}
    for name, (library, class_name) in components.items():
        assert library.startswith("visual_spec."), name
        base = "SchedulerMixin" if name == "sampler" else "ModelMixin"
        assert hasattr(sys.modules[library], base) and hasattr(sys.modules[library], class_name)
    for sampler in map(sampler_class, SAMPLERS):
        assert hasattr(sys.modules[sampler.__module__], "SchedulerMixin"), sampler
    for drafter in (EagleDrafter, MultiscaleDrafter):
        assert hasattr(sys.modules[drafter.__module__], "ModelMixin"), drafter


def test_trap_6_components_that_would_not_be_saved_are_refused(pipe):
    """diffusers drops a plain nn.Module at saving without a word."""
    linear: Any = torch.nn.Linear(2, 2)
    function: Any = lambda: None  # noqa: E731
    with pytest.raises(
        TypeError, match="transformer is a Linear, which cannot be saved with the pipeline; pass a"
    ):
        ImagePipeline(linear, tiny_vq_model(), None, AutoregressiveSampler())
    with pytest.raises(TypeError, match="sampler is a function"):
        ImagePipeline(tiny_transformer(), tiny_vq_model(), None, function)


def test_trap_7_a_component_that_began_as_none_is_saved(tmp_path):
    pipe = ImagePipeline(tiny_transformer(), tiny_vq_model(), None, AutoregressiveSampler())
    assert list(pipe.config["text_encoder"]) == [None, None]
    pipe.text_encoder = tiny_text_encoder()
    pipe.save_pretrained(tmp_path)
    assert ImagePipeline.from_pretrained(tmp_path).text_encoder is not None
    pipe.text_encoder = None
    pipe.save_pretrained(tmp_path / "without")
    assert ImagePipeline.from_pretrained(tmp_path / "without").text_encoder is None


def test_trap_8_samplers_hold_no_tensors(pipe):
    """`pipe.to(device)` does not move what a sampler holds."""
    for sampler in (AutoregressiveSampler(), SpeculativeJacobiSampler(window=4)):
        pipe.sampler = sampler
        pipe(PROMPT)
        held = {**vars(sampler), **sampler.config}
        assert not [name for name, value in held.items() if isinstance(value, torch.Tensor)]


def test_trap_9_casting_gives_no_false_alarm(pipe, caplog, monkeypatch):
    """diffusers 0.42 warns about an empty list of modules at each cast; a list that is not empty is still told."""
    logger = logging.getLogger("diffusers.models.modeling_utils")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        pipe.to(torch.float64)
    assert pipe.transformer.dtype == torch.float64
    assert "should be kept in float32" not in caplog.text
    monkeypatch.setattr(type(pipe.transformer), "_keep_in_fp32_modules", ["norm"])
    with caplog.at_level(logging.WARNING):
        pipe.to(torch.float32)
    assert "should be kept in float32: ['norm']" in caplog.text
    assert pipe.sampler.compatibles == []  # ours swap through from_config, see above
