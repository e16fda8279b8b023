"""The table of families: what reads it finds all it names, and a saved folder is of the right family."""

import ast
import importlib
import json
from pathlib import Path

import pytest

import visual_spec
from scripts import write_stub
from tests.helpers.refusals import refuses
from visual_spec import families
from visual_spec.eval.settings import parse_setting
from visual_spec.families import all_families, all_pipelines, family_of
from visual_spec.pipelines import components
from visual_spec.pipelines.embedded import embedded_folder, embedded_models
from visual_spec.pipelines.sampler_text import write_sampler
from visual_spec.samplers.core.law import TokenLaw

ROOT = Path(__file__).parents[1]


def test_names_are_said_once_and_every_pipeline_has_a_family():
    names = [family.name for family in all_families()]
    assert len(names) == len(set(names))
    assert {pipeline for family in all_families() for pipeline in family.pipelines} == set(all_pipelines())
    parts = [part for family in all_families() for part in family.parts]
    assert len(parts) == len(set(parts))


@pytest.mark.parametrize("name", [*families.component_homes(), *all_pipelines()])
def test_every_class_is_where_the_table_says(name):
    found = getattr(components, name)
    home = all_pipelines()[name].module if name in all_pipelines() else families.component_homes()[name]
    assert (found.__name__, found.__module__) == (name, home)


def test_a_class_that_no_saved_pipeline_names_is_told_the_others():
    with pytest.raises(AttributeError, match="'Nobody'.*AcousticCodec"):
        components.Nobody  # noqa: B018


def test_every_saved_class_of_a_public_pipeline_file_is_in_the_table():
    """A pipeline that the table lacks would be refused when it is loaded."""
    classes = set()
    for path in (
        *(ROOT / "visual_spec/pipelines").glob("*.py"),
        *(ROOT / "visual_spec/prototype").rglob("*.py"),
    ):
        tree = ast.parse(path.read_text())
        classes |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    ours = {name for name in classes if name.endswith("Pipeline")}
    assert ours - {"VisualPipeline", "TokenImagePipeline", "NextScalePipeline", "StudentPipeline"} == set(
        all_pipelines()
    )


def test_the_stub_for_editors_is_up_to_date():
    assert write_stub.STUB.read_text() == write_stub.stub(), "run python scripts/write_stub.py"
    assert set(visual_spec.HOMES) | {"__version__"} == set(visual_spec.__all__)


@pytest.mark.parametrize(
    ("name", "family"),
    {
        "things": "LlamaGen",
        "shapes": "LlamaGen",
        "shapes_nar": "NAR, FlashAR, PAR",
        "shapes_any": "RandAR, ARPG, LPD",
        "shapes_shuffle": "Token-Shuffle",
        "shapes_control": "ControlAR",
        "shapes_var": "VAR",
        "shapes_flexvar": "FlexVAR, SAR",
        "shapes_mar": "MAR",
        "shapes_masked": "MaskGIT",
        "tunes": "MusicGen",
        "tunes_masked": "MAGNeT",
        "motion": "LlamaGen of clips",
        "motion_masked": "frame-masked",
        "motion_causal": "Self-Forcing",
    }.items(),
)
def test_a_saved_folder_is_of_its_family(name, family):
    assert name in embedded_models()
    folder = embedded_folder(name)
    index = components.resolved(json.loads((folder / "model_index.json").read_text()))
    sampler = folder / "sampler" / "sampler_config.json"
    config = json.loads(sampler.read_text()) if sampler.exists() else {}
    assert family_of(index["_class_name"], index, config).name == family


def test_every_card_names_a_task_of_the_hub():
    """The Hub lists a model under its task only, and knows no others than these."""
    tasks = {
        "text-to-image",
        "unconditional-image-generation",
        "text-to-audio",
        "text-to-speech",
        "text-to-video",
    }
    assert {entry.hub_tag for entry in all_pipelines().values()} == tasks
    for entry in all_pipelines().values():
        assert (entry.condition == "text") == entry.hub_tag.startswith("text-to-"), entry


def test_a_class_of_no_family_is_refused():
    refuses(ValueError, "Nobody.*ImagePipeline", family_of, "Nobody", {}, {})


def test_what_measures_a_family_exists():
    for measured in filter(None, (family.measured for family in all_families())):
        if isinstance(measured, str):
            module, _, name = measured.partition(":")
            assert callable(getattr(importlib.import_module(f"visual_spec.{module}"), name))
            continue
        for row in measured:
            first = {
                name: getattr(values[0], "otherwise", values[0]) for name, values in row.settings.items()
            }
            assert parse_setting(write_sampler(row.sampler, first), TokenLaw(), 0)
