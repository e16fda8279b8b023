"""Malformed model_index.json and configurations: refused by the name of the file, before anything is built."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_pipeline
from tests.helpers.tiny_audio import tiny_audio_pipeline
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec import cli
from visual_spec.pipelines.loading import load_drafter, load_pipeline, read_facts

MAKE = {"pictures": tiny_pipeline, "scales": tiny_scale_pipeline, "music": tiny_audio_pipeline}
ABSENT = object()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    for name, make in MAKE.items():
        make().save_pretrained(folder / name)
    return {name: folder / name for name in MAKE}


@pytest.fixture
def folder(saved, tmp_path, monkeypatch) -> Any:
    """A copy by kind, and nothing may be built from it."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved[name], tmp_path / name))

    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", classmethod(built))
    return copy


def change(path: Path, **values: Any) -> None:
    settings = json.loads(path.read_text())
    for name, value in values.items():
        settings.pop(name, None) if value is ABSENT else settings.update({name: value})
    path.write_text(json.dumps(settings))


def refused(folder: Path, file: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_pipeline(folder)
    assert "\n" not in str(error.value) and file in str(error.value)


TEXTS = {
    "nothing": (b"", "JSON"),
    "half": (b'{"_class_name": "Ima', "JSON"),
    "bytes": (b"\xff\xfe\x00", "UTF-8"),
    "deep": (b"[" * 100_000, "JSON"),
    "list": (b"[]", "holds a list"),
    "null": (b"null", "holds a NoneType"),
    "string": (b'"ImagePipeline"', "holds a str"),
    "number": (b"3", "holds a int"),
}


@pytest.mark.parametrize(
    "file", ["model_index.json", "sampler/sampler_config.json", "transformer/config.json"]
)
@pytest.mark.parametrize("text", TEXTS)
def test_files_that_hold_no_settings(folder, file, text):
    for name in ("pictures", "music"):
        where = folder(name)
        (where / file).write_bytes(TEXTS[text][0])
        refused(where, file, TEXTS[text][1])


def test_what_is_no_file(folder):
    where = folder("pictures")
    for file in ("model_index.json", "vq_model/config.json"):
        text = (where / file).read_bytes()
        (where / file).unlink()
        os.mkfifo(where / file)  # reading it would wait for ever
        refused(where, file, "regular file")
        (where / file).unlink()
        (where / file).write_bytes(text)
    shutil.copy(where / "sampler" / "sampler_config.json", where / "model_index.json")
    refuses(ValueError, "AutoregressiveSampler", load_pipeline, where)


INDEX: dict[str, tuple[str, dict[str, Any], str]] = {
    "no class": ("pictures", dict(_class_name=ABSENT), "says _class_name=None"),
    "a class that is a list": ("pictures", dict(_class_name=["ImagePipeline"]), "says _class_name="),
    "another class": ("pictures", dict(_class_name="FluxPipeline"), "FluxPipeline"),
    "a component less": ("pictures", dict(vq_model=ABSENT), "vq_model"),
    "a word": ("pictures", dict(vq_model="VQModel"), "vq_model='VQModel'.*pair"),
    "a number": ("pictures", dict(transformer=3), "transformer=3.*pair"),
    "three": ("pictures", dict(transformer=["a", "b", "c"]), r"model_index\.json.*pair"),
    "numbers": ("pictures", dict(transformer=[1, 2]), r"model_index\.json.*pair"),
    "null": ("pictures", dict(text_encoder=None), "text_encoder=None.*pair"),
    "half null": ("pictures", dict(transformer=[None, "VQModel"]), r"model_index\.json.*pair"),
    "a module": ("pictures", dict(transformer=["antigravity", "x"]), "visual_spec"),
    "a function": ("pictures", dict(transformer=["transformers", "logging"]), "no class"),
    "unknown": ("pictures", dict(vq_model=["visual_spec.models.x", "Nothing"]), "no class"),
    "a path": ("pictures", dict(vq_model=["visual_spec.models.x", "../../x"]), "no class"),
    "swapped": (
        "pictures",
        dict(vq_model=["visual_spec.models.next_token.llamagen", "LlamaGenTransformer"]),
        "vq_model.*LlamaGenTransformer.*VQModel",
    ),
    "foreign": ("music", dict(codec=["transformers", "BertModel"]), "BertModel"),
    "guidance": ("pictures", dict(default_guidance_scale="high"), "default_guidance_scale='high'"),
    "huge guidance": ("pictures", dict(default_guidance_scale=10**400), "default_guidance_scale"),
    "negative": ("pictures", dict(default_guidance_scale=-1.0), r"guidance_scale=-1\.0"),
    "top k": ("pictures", dict(default_top_k=1.5), r"default_top_k=1\.5"),
    "a flag": ("pictures", dict(default_top_k=True), "default_top_k=True"),
    "top p": ("scales", dict(default_top_p=2.0), "top_p=2.0;"),
    "names": ("scales", dict(id2label="red"), "id2label='red'"),
    "names of numbers": ("scales", dict(id2label=[1, 2]), r"id2label=\[1, 2\]"),
    "budget": ("scales", dict(budget=0.5), "says budget=0.5"),
    "split": ("scales", dict(num_draft_scales="all"), "num_draft_scales='all'"),
    "length": ("music", dict(max_audio_length_in_s=None), "max_audio_length_in_s=None"),
    "masked": ("music", dict(masked="no"), "masked='no'"),
    "pattern": ("music", dict(pattern=["delay"]), r"pattern=\['delay'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEX)
def test_indexes_that_say_what_is_not_so(folder, case):
    name, values, message = INDEX[case]
    where = folder(name)
    change(where / "model_index.json", **values)
    refused(where, "" if case == "another class" else "model_index.json", message)


CONFIGS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "5000 letters": ("pictures", "vq_model/config", dict(codebook_dim="a" * 5000), r"='a{50,60}\.\.\.;"),
    "calls of a graph": ("pictures", "sampler/sampler_config", dict(graph=65), "AutoregressiveSampler: graph=65"),
    "class": ("pictures", "vq_model/config", dict(_class_name="VARTransformer"), "'VARTransformer'"),
    "quantised": ("pictures", "vq_model/config", dict(quantization_config=5), "quantization_config='5'"),
    "layers": ("pictures", "transformer/config", dict(num_layers=10**9), "says num_layers=1000000000"),
    "music layers": ("music", "transformer/config", dict(num_hidden_layers=10**9), "says num_hidden_layers=10"),
    "fewer": ("music", "transformer/config", dict(num_hidden_layers=1), "MusicgenForCausalLM"),
    "wide": ("music", "transformer/config", dict(hidden_size=10**15), "transformer/config.json"),
    "word": ("music", "transformer/config", dict(hidden_size="wide"), r"config\.json.*MusicgenForCausalLM"),
    "null": ("music", "transformer/config", dict(vocab_size=None), r"config\.json.*MusicgenForCausalLM"),
    "list": ("music", "transformer/config", dict(num_attention_heads=[4]), "transformer/config.json"),
    "table": ("music", "transformer/config", dict(max_position_embeddings=10**10), "tables of|makes no Musicgen"),
    "codebooks": ("music", "transformer/config", dict(num_codebooks=10**7), "says num_codebooks=10000000"),
    "filters": ("music", "codec/config", dict(num_filters=-1), r"config\.json.*EncodecModel"),
    "bandwidth": ("music", "codec/config", dict(target_bandwidths=[1e12]), "codec/config.json"),
    "long": ("music", "codec/config", dict(upsampling_ratios=[1] * 10**5), r"config\.json"),
    "ratios": ("music", "codec/config", dict(upsampling_ratios=["a"]), r"config\.json.*EncodecModel"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_the_weights_do_not_fit(folder, case):
    name, file, values, message = CONFIGS[case]
    where = folder(name)
    change(where / f"{file}.json", **values)
    refused(where, file.partition("/")[0], message)


def test_missing_configurations(folder):
    for file in ("transformer/config.json", "sampler/sampler_config.json"):
        where = folder("pictures")
        (where / file).unlink()
        refused(where, file, "is missing")
        shutil.rmtree(where)


def test_what_is_given_need_not_be_there(saved, tmp_path):
    where = Path(shutil.copytree(saved["pictures"], tmp_path / "pictures"))
    (where / "vq_model" / "config.json").write_text("[]")
    change(where / "model_index.json", default_top_k="many")
    parts = tiny_pipeline()
    pipe = load_pipeline(where, vq_model=parts.vq_model, default_top_k=3)
    assert pipe.vq_model is parts.vq_model and pipe.config["default_top_k"] == 3


def test_facts_and_drafters(folder, tmp_path):
    where = folder("music")
    change(where / "model_index.json", default_temperature={})
    (where / "sampler" / "sampler_config.json").write_text("[]")
    refuses(ValueError, r"sampler_config\.json.*list", read_facts, where)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("[1]")
    refuses(ValueError, r"config\.json.*list", load_drafter, tmp_path / "drafter")


def test_the_command_line_says_it_in_one_line(folder, tmp_path, capsys):
    where = folder("pictures")
    change(where / "model_index.json", default_guidance_scale=[3])
    assert cli.main(["generate", "a red circle", "--model", str(where), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("visual-spec: error: ") and "\n" not in error and "model_index.json" in error
    assert not (tmp_path / "out").exists()
