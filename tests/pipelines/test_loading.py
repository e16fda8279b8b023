"""Saving and loading ImagePipeline, where diffusers has undocumented exceptions for classes defined outside of it.

Each exception has its test here, so that a new diffusers release that changes one is noticed.
"""

import inspect
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin

import visual_spec
from tests.helpers.refusals import refuses
from tests.helpers.tiny import (
    seeded,
    tiny_pipeline,
    tiny_text_encoder,
    tiny_transformer,
    tiny_video_pipeline,
    tiny_vq_model,
)
from visual_spec import cli
from visual_spec.eval.quality.features import load_shapes_features
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import one_by_one
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.t5_features import T5Features
from visual_spec.pipelines import components, embedded
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.loading import load_drafter, load_pipeline, read_facts
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.samplers.core.acceptance import Relaxation
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler
from visual_spec.samplers.registry import ANY_ORDER, all_samplers, sampler_class
from visual_spec.samplers.scales.scales import ScaleWiseSampler

ROOT = Path(__file__).parents[2]
PROMPT = "a red circle"


@pytest.fixture
def pipe() -> Any:
    return tiny_pipeline()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_pipeline(SpeculativeJacobiSampler(window=4)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


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


@pytest.mark.parametrize("make", [tiny_pipeline, tiny_video_pipeline])
def test_from_pipe_hands_on_a_drafter_of_a_new_class(make):
    class OwnDrafter(SavedModel):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(1, 1)

    pipe = make()
    pipe.drafter = OwnDrafter()
    assert type(pipe).from_pipe(pipe).drafter is pipe.drafter


def test_bfloat16_draws(folder):
    pipe = ImagePipeline.from_pretrained(folder, dtype=torch.bfloat16)
    assert np.isfinite(pipe(PROMPT, output_type="np").images).all()


def test_embedded_models_load_by_name(folder, monkeypatch):
    monkeypatch.setattr(embedded, "weights_folder", lambda: folder.parent)
    assert embedded.embedded_models() == ["tiny"]
    assert isinstance(ImagePipeline.from_pretrained("tiny"), ImagePipeline)
    facts = embedded.describe(folder)
    assert facts["image_size"] == 8 and facts["components"]["sampler"] == "SpeculativeJacobiSampler"
    for name, count in facts["parameters"].items():
        assert count == sum(parameter.numel() for parameter in getattr(tiny_pipeline(), name).parameters())
    refuses(ValueError, "unknown.*'shape'", ImagePipeline.from_pretrained, "shape")


def test_without_the_package_of_weights_the_message_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(embedded, "weights_folder", lambda: tmp_path / "none")
    install = re.escape("pip install ./weights in a checkout")
    for load in (ImagePipeline.from_pretrained, load_pipeline):
        refuses(ValueError, f"'shapes'.*{install}", load, "shapes")
    refuses(ValueError, f"'shapes_drafter'.*{install}", load_drafter, "shapes_drafter")
    refuses(FileNotFoundError, install, load_shapes_features)
    assert cli.main(["models"]) == 0
    assert re.search(install, capsys.readouterr().out)


@pytest.mark.parametrize("checkout", [True, False])
def test_weights_are_those_of_the_checkout_or_else_of_the_installed_package(tmp_path, checkout):
    (tmp_path / "visual_spec").symlink_to(Path(visual_spec.__file__).parent)
    for folder in ("weights", "installed") if checkout else ("installed",):
        (tmp_path / folder / "visual_spec_models").mkdir(parents=True)
        (tmp_path / folder / "visual_spec_models" / "__init__.py").touch()
    code = "from visual_spec.pipelines.embedded import weights_folder; print(weights_folder())"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'installed'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    wanted = tmp_path / ("weights" if checkout else "installed") / "visual_spec_models"
    assert Path(done.stdout.strip()) == wanted, done.stderr


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
    """DiffusionPipeline looks a class up in diffusers only, unless the folder holds a script that names it."""
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == ["pipeline", "ImagePipeline"]  # see test_saving.py
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "ImagePipeline"}))
    refuses(AttributeError, "ImagePipeline", DiffusionPipeline.from_pretrained, folder)
    assert isinstance(ImagePipeline.from_pretrained(folder), ImagePipeline)


def test_trap_3_a_fresh_process_knows_every_component(folder):
    """diffusers looks components up in modules that are imported already; ours are imported when they are asked for."""
    load = f"visual_spec.ImagePipeline.from_pretrained({str(folder)!r})"
    code = f"import visual_spec; print({load}.sampler.config['window'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "4", done.stderr


def saved_classes(folder: Path) -> dict[str, list[str]]:
    index = json.loads((folder / "model_index.json").read_text())
    return {name: value for name, value in index.items() if isinstance(value, list)}


def test_trap_4_modules_are_recorded_whole(folder):
    """diffusers records a class of its own or of transformers by its library, and every other one by its module.

    Ours are recorded by the one module that finds them all, so that `DiffusionPipeline` needs no other.
    """
    classes = saved_classes(folder)
    assert classes.pop("drafter") == [None, None] and classes.pop("_class_name")[0] == "pipeline"
    assert set(classes) == {"transformer", "vq_model", "text_encoder", "sampler"}
    for library, class_name in classes.values():
        assert library == components.__name__ and getattr(components, class_name).__name__ == class_name


def test_trap_5_a_module_without_its_base_class_is_no_trap(folder, monkeypatch):
    """diffusers finds how a class is loaded by the names of base classes in its module; ours need not be there."""
    monkeypatch.delattr("visual_spec.samplers.raster.jacobi.SchedulerMixin", raising=False)
    assert not hasattr(import_module("visual_spec.models.next_token.llamagen"), "ModelMixin")
    loaded = ImagePipeline.from_pretrained(folder)
    assert isinstance(loaded.sampler, SpeculativeJacobiSampler) and loaded.sampler.config["window"] == 4
    swapped = ImagePipeline.from_pretrained(folder, sampler=AutoregressiveSampler())
    assert isinstance(swapped.sampler, AutoregressiveSampler)


def test_classes_are_found_by_name_wherever_they_lived_when_they_were_saved(folder, tmp_path):
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"][0] = "visual_spec.models.llamagen"
    index["vq_model"][0] = "visual_spec.models.no_such_module"
    index["sampler"][0] = "visual_spec.samplers.rows"
    (folder / "model_index.json").write_text(json.dumps(index))
    loaded = ImagePipeline.from_pretrained(folder)
    assert isinstance(loaded.sampler, SpeculativeJacobiSampler)
    loaded.save_pretrained(tmp_path / "again")
    places = {name: module for name, (module, _) in saved_classes(tmp_path / "again").items()}
    assert places["transformer"] == places["sampler"] == "visual_spec.pipelines.components"
    swapped = ImagePipeline.from_pretrained(folder, sampler=AutoregressiveSampler())
    assert isinstance(swapped.sampler, AutoregressiveSampler)
    index["transformer"][1] = "NoSuchTransformer"
    (folder / "model_index.json").write_text(json.dumps(index))
    refuses(ValueError, "visual_spec.models.llamagen", ImagePipeline.from_pretrained, folder)


class OwnSampler(SchedulerMixin, ConfigMixin):
    """A sampler of a user, in a module of theirs."""

    config_name = "sampler_config.json"
    lossless = True

    @register_to_config
    def __init__(self, pace: int = 1):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return AutoregressiveSampler()(*args, **kwargs)


def test_a_sampler_of_a_user_is_saved_loaded_and_draws(pipe, tmp_path):
    pipe.sampler = OwnSampler(pace=3)
    expected = pipe(PROMPT, generator=seeded(1)).tokens
    pipe.save_pretrained(tmp_path)
    loaded = ImagePipeline.from_pretrained(tmp_path)
    assert type(loaded.sampler) is OwnSampler and loaded.sampler.config["pace"] == 3
    assert loaded(PROMPT, generator=seeded(1)).tokens.equal(expected)


@pytest.mark.parametrize(
    ("calls", "fits"),
    [("raster", True), (("raster", "tree"), True), ("scales", False), (("raster", "columns"), False)],
)
def test_a_sampler_of_a_user_has_to_fit_if_it_declares_its_calls(pipe, monkeypatch, calls, fits):
    monkeypatch.setattr(OwnSampler, "calls", calls, raising=False)
    pipe.sampler = OwnSampler()
    if fits:
        pipe.check_sampler()
        return
    refuses(TypeError, "OwnSampler.*AutoregressiveSampler", pipe.check_sampler)


def test_a_sampler_of_a_user_calls_as_its_parent(pipe):
    class Derived(SpeculativeJacobiSampler):
        pass

    pipe.sampler = Derived()
    pipe.check_sampler()

    class Scales(ScaleWiseSampler):
        pass

    pipe.sampler = Scales()
    refuses(TypeError, "Scales", pipe.check_sampler)


def test_the_samplers_that_fit_are_those_of_the_registry(pipe):
    for entry in all_samplers():
        if entry.needs:
            continue
        pipe.sampler = sampler_class(entry)()
        if entry.calls == ANY_ORDER:  # a LlamaGen may be one; this one was trained in raster order
            refuses(ValueError, "'raster'", pipe.check_sampler)
            continue
        if entry.calls in pipe.calls:
            pipe.check_sampler()
            continue
        fitting = ", ".join(one.class_name for one in all_samplers() if one.calls in pipe.calls)
        refuses(TypeError, f"{entry.class_name}.*: {fitting}.", pipe.check_sampler)


def test_trap_6_components_that_would_not_be_saved_are_refused(pipe):
    """diffusers drops a plain nn.Module at saving without a word."""
    linear: Any = torch.nn.Linear(2, 2)
    function: Any = lambda: None  # noqa: E731
    refuses(TypeError, "Linear", ImagePipeline, linear, tiny_vq_model(), None, AutoregressiveSampler())
    with pytest.raises(TypeError, match="sampler.*function"):
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


def test_what_lies_under_the_name_of_an_embedded_model_hides_it_only_if_it_is_a_pipeline(
    folder, tmp_path, monkeypatch
):
    """`sample --model tiny --out tiny` makes such a folder."""
    monkeypatch.setattr(embedded, "weights_folder", lambda: folder.parent)
    here = tmp_path / "here"
    (here / "tiny").mkdir(parents=True)
    monkeypatch.chdir(here)
    wanted = load_pipeline(folder)(PROMPT, generator=seeded(0), output_type="latent").tokens
    (here / "tiny" / "000000.png").touch()

    def draw() -> Any:
        assert read_facts("tiny").medium == "image"
        pipes = load_pipeline("tiny"), ImagePipeline.from_pretrained("tiny")
        first, second = (pipe(PROMPT, generator=seeded(0), output_type="latent").tokens for pipe in pipes)
        assert torch.equal(first, second)
        return first

    assert torch.equal(draw(), wanted)
    shutil.rmtree(here / "tiny")
    (here / "tiny").touch()
    assert torch.equal(draw(), wanted)
    (here / "tiny").unlink()
    other = tiny_pipeline()
    torch.nn.init.zeros_(other.transformer.output.weight)
    other.save_pretrained("tiny")
    assert not torch.equal(draw(), wanted)


REUSE = ("reuse", "reuse_from", "reuse_by", "local_levels")


def test_folders_of_earlier_versions_load(tmp_path):
    """Tiny folders of each kind, as the code of 2026-11-24 and 25 wrote them but for their weights, which are zeros."""
    with tarfile.open(ROOT / "tests" / "pipelines" / "former_folders.tar.xz") as file:
        file.extractall(tmp_path, filter="data")
    kinds = set()
    for folder in sorted(tmp_path.iterdir()):
        if (folder / "model_index.json").exists():
            assert read_facts(folder).medium in ("image", "audio", "video")
            pipe = load_pipeline(folder)
            parts = {name: part for name, part in pipe.components.items() if part is not None}
            kinds.add(type(pipe).__name__)
        else:
            saved_as = json.loads((folder / "config.json").read_text())["_class_name"]
            parts = {"": getattr(components, saved_as).from_pretrained(folder)}
        for name, part in parts.items():
            written = [*(folder / name).glob("*_config.json"), *(folder / name).glob("config.json")]
            ours = written and isinstance(part, ConfigMixin)  # some are made anew
            settings = json.loads(written[0].read_text()) if ours else {}
            kept = {key: value for key, value in settings.items() if not key.startswith("_")}
            # Nothing was reused, and a sampler of the prototype has these settings now.
            if kept.get("reuse") == 0:
                kept = {key: value for key, value in kept.items() if key not in REUSE}
            assert kept == {key: part.config[key] for key in kept}, (folder.name, name)
            init = type(part).__init__
            taken = {one.name: one.default for one in inspect.signature(init).parameters.values()}
            known = one_by_one(inspect.unwrap(init), taken)  # those of groups are written one by one
            assert kept.keys() <= known.keys(), (folder.name, name)
    assert len(kinds) == 14 and "ContinuousImagePipeline" in kinds
    assert type(load_drafter(tmp_path / "LlamaGenTwoHeads")).__name__ == "LlamaGenNearToFar"


def test_a_transformer_that_was_trained_on_goes_back_into_its_older_folder(tmp_path):
    """The folder names the class of all orders, as folders did, and the new weights that of their order."""
    parts = tiny_transformer(order="flashar"), tiny_vq_model(), tiny_text_encoder()
    pipe = ImagePipeline(*parts, make_sampler("ordered"))
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["transformer"][1] = "LlamaGenTransformer"
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert (
        json.loads((tmp_path / "transformer" / "config.json").read_text())["_class_name"]
        == "LlamaGenNearToFar"
    )
    assert type(load_pipeline(tmp_path).transformer).__name__ == "LlamaGenNearToFar"


def test_settings_of_the_first_days_load(tmp_path):
    """Of 21 November 2026: another number of groups in a decoder, numbers of a relaxed acceptance one by one."""
    sizes: dict[str, Any] = dict(
        base_channels=8, channel_multipliers=(1, 2), blocks_per_level=1, latent_channels=16
    )
    sizes |= dict(codebook_size=16, codebook_dim=4, image_size=8)
    one, other = VQModel(**sizes, norm_groups=4).eval(), VQModel(**sizes, norm_groups=1).eval()
    other.load_state_dict(one.state_dict())
    one.save_pretrained(tmp_path / "vq_model")
    path = tmp_path / "vq_model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder_norm_groups": 1}))
    saved = VQModel.from_pretrained(tmp_path / "vq_model")
    pictures, codes = torch.rand(2, 3, 8, 8), torch.rand(2, 4, 4, 4)
    with torch.no_grad():
        assert torch.equal(saved.encode_latents(pictures), one.encode_latents(pictures))
        assert torch.equal(saved.decode_latents(codes), other.decode_latents(codes))
        assert not torch.equal(saved.decode_latents(codes), one.decode_latents(codes))
    relaxed = dict(
        group_size=3, probability_gap=0.15, code_distance=0.5, delta=0.2, factor=None, neighbours=64
    )
    path = tmp_path / "sampler_config.json"
    for kind in (SpeculativeJacobiSampler, ColumnJacobiSampler, DraftedSampler, TreeSampler):
        for acceptance, relaxation in (("lantern", relaxed | {"bounded": True}), ("exact", None)):
            unit = {"unit": "codebook"} if kind is ColumnJacobiSampler else {}
            path.write_text(json.dumps({"acceptance": acceptance, **relaxed, "bounded": True, **unit}))
            sampler: Any = kind.from_pretrained(tmp_path)
            assert sampler.config.relaxation == relaxation
            assert sampler.relaxation == Relaxation.of(acceptance, relaxation)
            again: Any = kind.from_config(sampler.config)
            assert again.relaxation == sampler.relaxation


def test_a_hub_id_that_is_not_there_tells_of_the_embedded_models(monkeypatch):
    def fetch(*args, **kwargs):
        raise FileNotFoundError("no such repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    refuses(OSError, "'nosuch/model'.*shapes_var", ImagePipeline.from_pretrained, "nosuch/model")


@pytest.mark.parametrize("kind", [ImagePipeline, VQModel, SpeculativeJacobiSampler, T5Features])
def test_what_is_neither_a_folder_nor_a_reachable_id_is_refused_at_once(kind, tmp_path, monkeypatch):
    """Without a connection: huggingface_hub would try again and again, after naps."""

    def no_connection(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror("no connection")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", no_connection)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"a nap of {seconds} s"))
    for path in (tmp_path / "nofolder", "./nofolder", "a/b/c", Path("nofolder"), "~/nofolder", "no folder"):
        refuses(ValueError, "no folder|unknown model", kind.from_pretrained, path)
    for name in ("owner/nofolder", "nofolder"):
        with pytest.raises((OSError, ValueError), match=f"{name}.*a folder written by save_pretrained"):
            kind.from_pretrained(name)


def test_a_device_map_gives_no_false_alarm(caplog):
    logging.getLogger("diffusers").addHandler(caplog.handler)
    try:
        ImagePipeline.from_pretrained("shapes", device_map="balanced")
    finally:
        logging.getLogger("diffusers").removeHandler(caplog.handler)
    assert "should be kept in float32" not in caplog.text


@pytest.mark.parametrize("sampler", ["any-order", "ordered"])
def test_a_folder_of_a_model_in_any_order_says_what_its_pipeline_says(tmp_path, sampler):
    parts = tiny_transformer(order="any"), tiny_vq_model(), tiny_text_encoder()
    pipe = ImagePipeline(*parts, make_sampler(sampler))
    pipe.save_pretrained(tmp_path)
    assert embedded.describe(tmp_path)["calls"] == pipe.calls == ImagePipeline.from_pretrained(tmp_path).calls
    assert len(pipe.calls) == 1
