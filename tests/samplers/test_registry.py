"""The one table of samplers: complete, right about each class, and enough to use it."""

import ast
from pathlib import Path

import pytest

from tests.helpers.refusals import refuses
from visual_spec.samplers import registry
from visual_spec.samplers.registry import RASTER, TREE, SamplerEntry, all_samplers, fit

PACKAGE = Path(__file__).parents[2] / "visual_spec"


def test_every_sampler_of_the_package_is_listed():
    """From the source: the classes with settings. The bases of families have none."""
    names = [
        node.name
        for path in (*(PACKAGE / "samplers").rglob("*.py"), *(PACKAGE / "prototype").rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
        and node.name.endswith("Sampler")
        and any(
            ast.unparse(decorator) == "register_to_config"
            for method in node.body
            if isinstance(method, ast.FunctionDef)
            for decorator in method.decorator_list
        )
    ]
    assert sorted(entry.class_name for entry in all_samplers()) == sorted(names)


def test_the_matrix_says_what_is_missing():
    tree = SamplerEntry("t", "m:T", TREE, "lossless", "drafter")
    assert fit((RASTER,), tree) == "-"
    assert fit((RASTER, TREE), tree) == "+ drafter"
    assert fit((RASTER,), all_samplers()[0]) == "yes"


def test_names_and_classes_are_unique():
    assert (
        len({entry.name for entry in all_samplers()})
        == len({entry.class_name for entry in all_samplers()})
        == len(all_samplers())
    )


@pytest.mark.parametrize("entry", all_samplers(), ids=lambda entry: entry.name)
def test_entries_are_found_by_name_and_by_class(entry):
    assert registry.by_name(entry.name) is registry.by_class(entry.class_name) is entry
    assert registry.sampler_class(entry).__name__ == entry.class_name


def test_unknown_names_list_the_known_ones():
    refuses(ValueError, "'fast'", registry.by_name, "fast")
    refuses(ValueError, "Fast.*AutoregressiveSampler", registry.by_class, "Fast")
