"""What `save_pretrained` writes beside the weights: a script by which diffusers finds the class, and a model card."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from tests.helpers.pipelines import KINDS
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from visual_spec.families import all_pipelines
from visual_spec.pipelines import card
from visual_spec.pipelines.embedded import describe, embedded_folder
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.scale_image import ScaleImagePipeline

pytestmark = pytest.mark.every_set

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def modules_of_this_test_only(monkeypatch, tmp_path_factory):
    """diffusers copies the scripts that it runs into a cache."""
    folder = tmp_path_factory.mktemp("modules")
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(folder))


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_folder_is_loaded_by_the_generic_class(name, tmp_path):
    kind = KINDS[name]
    pipe = kind.make()
    want = kind.ask(pipe, seed=4)
    pipe.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded) is type(pipe) and type(loaded.sampler) is type(pipe.sampler)
    got = kind.ask(quiet(loaded), seed=4)
    assert torch.equal(*(out.codes if hasattr(out, "codes") else out.tokens for out in (got, want)))
    refuses(ValueError, "trust_remote_code", DiffusionPipeline.from_pretrained, tmp_path)


def test_custom_pipeline_names_the_folder(tmp_path):
    pipe = KINDS["captions"].make()
    pipe.save_pretrained(tmp_path / "one")
    loaded = DiffusionPipeline.from_pretrained(
        tmp_path / "one", custom_pipeline=str(tmp_path / "one"), trust_remote_code=True
    )
    assert isinstance(loaded, ImagePipeline)
    out = loaded("a red circle", generator=seeded(1), output_type="latent")
    assert torch.equal(out.tokens, pipe("a red circle", generator=seeded(1)).tokens)


def test_all_classes_can_be_imported_as_the_script_does():
    import visual_spec

    assert all(hasattr(visual_spec, name) for name in all_pipelines())


def test_the_class_is_saved_again_and_described(tmp_path):
    KINDS["scales"].make().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "model_index.json").read_text())
    assert saved["_class_name"] == ["pipeline", "ScaleImagePipeline"]
    assert describe(tmp_path)["pipeline"] == "ScaleImagePipeline"
    again = ScaleImagePipeline.from_pretrained(tmp_path)
    (tmp_path / "two").mkdir()
    again.save_pretrained(tmp_path / "two")
    other = json.loads((tmp_path / "two" / "model_index.json").read_text())
    assert {key: value for key, value in other.items() if key != "_name_or_path"} == saved
    # A folder that another class was saved in before: the script is that of the new one.
    KINDS["captions"].make().save_pretrained(tmp_path)
    assert "ImagePipeline" in (tmp_path / "pipeline.py").read_text()
    assert isinstance(DiffusionPipeline.from_pretrained(tmp_path, trust_remote_code=True), ImagePipeline)


def test_files_of_ones_own_stay(tmp_path):
    for name in ("README.md", "pipeline.py"):
        (tmp_path / name).write_text("mine")
    pipe = KINDS["captions"].make()
    pipe.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == (tmp_path / "pipeline.py").read_text() == "mine"
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "ImagePipeline"

    class Mine(ImagePipeline):
        pass

    Mine(**pipe.components).save_pretrained(tmp_path / "own")
    assert not (tmp_path / "own" / "pipeline.py").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def front_and_text(card_text: str) -> tuple[dict, str]:
    _, front, text = card_text.split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_says_what_the_pipeline_is(tmp_path):
    pipe = KINDS["captions"].make()
    pipe.save_pretrained(tmp_path)
    front, text = front_and_text((tmp_path / "README.md").read_text())
    assert front["library_name"] == "diffusers" and front["pipeline_tag"] == "text-to-image"
    assert "visual_spec" in front["tags"] and "license" not in front  # whose weights these are is not known
    count = sum(weight.numel() for weight in pipe.transformer.parameters())
    assert f"| transformer | LlamaGenTransformer | {count} |" in text and "| drafter" not in text
    assert "from visual_spec import ImagePipeline" in text and "## Measured" not in text
    for name, tag in [
        ("music", "text-to-audio"),
        ("bits", "text-to-image"),
        ("video", "text-to-video"),
        ("classes", "unconditional-image-generation"),
    ]:
        assert front_and_text(card.model_card(KINDS[name].make()))[0].get("pipeline_tag") == tag


def test_the_card_of_an_embedded_model_has_what_was_measured_of_it():
    pipe = ImagePipeline.from_pretrained("shapes")
    front, text = front_and_text(card.model_card(pipe))
    assert front["license"] == "apache-2.0" and "## Measured" in text
    results = json.loads((ROOT / "benchmarks" / "results" / "shapes-8-bits-quality.json").read_text())
    rows = {row["name"]: row for row in results["rows"]}
    for line in text.split("## Measured")[1].splitlines():
        if line.startswith("| `"):
            name, output, calls, accuracy = (cell.strip(" `") for cell in line.strip("|").split("|"))
            row = rows.pop(name)
            promise = "same tokens" if row["identical"] else "lossless" if row["lossless"] else "lossy"
            assert output == ("plain decoding" if row["kind"] == "plain" else promise)
            assert float(calls) == round(row["tokens_per_call"]["value"], 2)
            assert accuracy.split(" ")[0] == f"{100 * row['accuracy']['mean_attribute']['value']:.1f}"
    assert [row["kind"] for row in rows.values()] == ["control"] * 2
    # Not a figure of other weights.
    with torch.no_grad():
        next(pipe.transformer.parameters()).view(-1)[0] += 1
    assert "## Measured" not in card.model_card(pipe)


def test_embedded_models_do_not_need_their_own_script():
    assert not (embedded_folder("shapes") / "pipeline.py").exists()
