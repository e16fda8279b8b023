"""ACDiT without its cache draws the same clips, and rows hold what the parser reads."""

from typing import Any

import pytest
import torch

from benchmarks.block_sizes_clips import Recomputing, clips_by_class, draw, read, timings
from scripts.train.acdit import new_model
from scripts.train.clips import class_of_clip
from visual_spec.data.motion import render
from visual_spec.prototype.acdit.model import ACDiTTransformer


@pytest.fixture(scope="module")
def models() -> dict[bool, Any]:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        key: value for key, value in new_model(None, 16, "v_prediction", 3).config.items() if key[0] != "_"
    }
    made: dict[bool, Any] = {True: ACDiTTransformer(**dict(config, dim=32, num_layers=2, num_heads=2))}
    made[False] = Recomputing(**dict(config, dim=32, num_layers=2, num_heads=2))
    made[False].load_state_dict(made[True].state_dict())
    return {cached: model.double() for cached, model in made.items()}


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_without_the_cache_the_clips_are_the_same(models, guidance):
    labels = torch.tensor([3, 17])
    held, again = (draw(models[cached], 3, guidance, labels, 5) for cached in (True, False))
    assert held.tokens.shape == (2, 48, 48) and held.trace.target_calls.tolist() == [9, 9]
    assert (held.tokens - again.tokens).abs().max() < 1e-10


def test_times_are_taken_in_turn(models):
    turns = {("small", 2, cached): model for cached, model in models.items()}
    (row,) = timings(turns, 2.0, 2)
    assert row["processor_seconds"]["value"] > 0 and row["without_cache"]["value"] > 0
    assert row["furthest_apart"] < 1e-10


def test_rows_count_what_is_right():
    clips = clips_by_class(34)
    assert [class_of_clip(clip) for clip in clips] == [*range(32), 0, 1]
    shown = [render(clip, 8) for clip in clips[:4]]
    row = read("true", "", None, [*shown[:3], shown[0]])  # the last is of another class
    assert row["class_right"]["hits"] == 3 and row["everything_right"]["total"] == 4
    assert row["one_object"]["hits"] == 4 and row["direction"]["hits"] == 3
