"""Prompt accuracy against a plain count, and the default score on pictures that are right."""

from tests.helpers.refusals import refuses
from visual_spec.data import shapes, shapes_parser
from visual_spec.eval.quality.accuracy import accuracy_table, summarise


def test_the_summary_is_a_plain_count():
    hits = [{"a": True, "b": False}, {"a": True}, {"a": False, "b": True}, {"a": True, "b": True}]
    summary = summarise(hits)
    assert (summary["all_correct"]["hits"], summary["all_correct"]["value"]) == (2, 0.5)
    assert summary["mean_attribute"]["value"] == (0.5 + 1 + 0.5 + 1) / 4
    counts = {name: (found["hits"], found["total"]) for name, found in summary["attributes"].items()}
    assert counts == {"a": (3, 4), "b": (2, 3)}
    refuses(ValueError, "no samples", summarise, [])


def test_the_table_has_a_line_for_each_sampler_and_a_column_for_each_attribute():
    table = accuracy_table({"one": summarise([{"a": True}]), "two": summarise([{"a": False, "b": True}])})
    header, _, first, second = table.splitlines()
    cells = [cell.strip() for cell in header.split("|")[1:-1]]
    assert cells == ["sampler", "a", "b", "mean of these", "whole prompt"]
    assert "100.0 (20.7-100.0)" in first and "-" in first.split("|")[3]
    assert "50.0 (-19.3-119.3)" not in first and "0.0 (0.0-79.3)" in second


def test_true_scenes_are_right_in_every_attribute():
    scenes, pictures = shapes.sample_dataset(5, 5, held_out=True)
    hits = [shapes_parser.score(shapes.caption(s), p) for s, p in zip(scenes, pictures, strict=True)]
    assert summarise(hits)["all_correct"]["hits"] == 5


def test_captions_of_things_are_read_by_their_parser():
    from visual_spec.data import shapes, things
    from visual_spec.eval.quality.extractors import _parse

    scene = things.sample_scenes(1, 3)[0]
    assert all(_parse("image", things.caption(scene), things.render(scene)).values())
    other = shapes.sample_scenes(1, 3)[0]
    hits = _parse("image", shapes.caption(other), shapes.render(other))
    assert "texture" in hits and all(hits.values())
