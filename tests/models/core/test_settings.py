"""Settings that are declared once: what a declaration refuses, and what it makes of a value."""

import inspect
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest

from tests.helpers.refusals import refuses
from visual_spec.models.continuous.causal import CausalContinuousTransformer
from visual_spec.models.continuous.mar import MARTransformer
from visual_spec.models.core.settings import (
    DeclaredSetting,
    Within,
    of_settings,
    one_by_one,
    settings_of,
    whole,
)
from visual_spec.models.masked.frames import FrameMaskedTransformer
from visual_spec.models.masked.mage import MageTransformer
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.prototype.students.llamagen import LlamaGenStudent
from visual_spec.prototype.students.var import VARStudent
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.masked.frames import FrameMaskedSampler
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, Schedule
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.registry import all_samplers, sampler_class

CLASSES = {entry.name: sampler_class(entry) for entry in all_samplers()}


def declared(kind: Any) -> dict[str, DeclaredSetting]:
    return settings_of(inspect.unwrap(kind.__init__))


PAIRS = [(name, setting) for name, kind in CLASSES.items() for setting in declared(kind).values()]
WRONG: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    1 + 2j,
    object(),
    b"x",
    {1, 2},
    [[1]],
    [],
    "no such word",
    -(10**9),
]


@pytest.mark.parametrize("name", CLASSES)
def test_every_setting_is_declared(name: str) -> None:
    init = inspect.unwrap(CLASSES[name].__init__)
    usual = {name: one.default for name, one in inspect.signature(init).parameters.items() if name != "self"}
    assert set(declared(CLASSES[name])) == set(one_by_one(init, usual))


@pytest.mark.parametrize(("name", "setting"), PAIRS, ids=lambda one: getattr(one, "name", one))
def test_a_wrong_value_is_refused_by_the_name_of_the_setting(name: str, setting: DeclaredSetting) -> None:
    kind = CLASSES[name]
    fits = {bool: [True], int: [3], float: [0.5], str: ["x"], type(None): [None]}
    others = [one for kinds, values in fits.items() if kinds not in setting.kinds for one in values]
    if float in setting.kinds:
        others.remove(3)  # a number too
    for value in [*WRONG, *others]:
        with pytest.raises(ValueError) as refusal:
            of_settings(kind, **{setting.name: value})
        said = str(refusal.value)
        assert said.startswith(f"{setting.name}=") and "; pass " in said and "\n" not in said, said


@pytest.mark.parametrize(
    ("kind", "given", "plain"),
    [
        (MaskedSampler, {"steps": np.int64(4), "measure": np.bool_(True)}, {"steps": 4, "measure": True}),
        (MaskedSampler, {"steps": np.array([4, 2])}, {"steps": [4, 2]}),
        (MaskedSampler, {"steps": (np.int32(4), 2)}, {"steps": (4, 2)}),
        (FrameMaskedSampler, {"history_hidden": np.float32(0.5)}, {"history_hidden": 0.5}),
        (
            ContinuousSampler,
            {"eta": np.float64(0.25), "order": [np.int64(0), 1]},
            {"eta": 0.25, "order": [0, 1]},
        ),
        (SpeculativeJacobiSampler, {"window": np.uint8(8), "coupling": np.str_("gumbel")}, {"window": 8}),
        (
            SpeculativeJacobiSampler,
            {"acceptance": "lantern", "relaxation": {"delta": np.float64(0.2)}},
            {"relaxation": {"delta": 0.2}},
        ),
    ],
)
def test_numbers_of_numpy_are_saved_as_python_has_them(
    kind: Any, given: Any, plain: Any, tmp_path: Any
) -> None:
    sampler = kind(**given)
    sampler.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    for name, value in plain.items():
        assert sampler.config[name] == value and type(sampler.config[name]) is type(value)
        assert again.config[name] == (list(value) if isinstance(value, tuple) else value)


def test_settings_of_groups_are_saved_one_by_one_and_single_ones_still_serve(tmp_path: Any) -> None:
    choice = Choice(choice_temperature=2.0, greedy=True)
    sampler = MaskedSampler(4, schedule=Schedule("linear"), choice=choice)
    sampler.save_pretrained(tmp_path)
    known = json.loads((tmp_path / "sampler_config.json").read_text())
    assert (known["schedule"], known["choice_temperature"], known["greedy"]) == ("linear", 2.0, True)
    assert "choice" not in known and known["score"] == "log_probability"

    single: dict[str, Any] = dict(schedule="linear", choice_temperature=2.0, greedy=True)
    with pytest.warns(DeprecationWarning, match="choice=Choice"):
        former = MaskedSampler(4, **single)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = MaskedSampler.from_pretrained(tmp_path)
        changed: Any = MaskedSampler.from_config(sampler.config, greedy=False, steps=3)
        whole: Any = MaskedSampler.from_config(sampler.config, choice=Choice(score="entropy"))
        frames = FrameMaskedSampler.from_config(FrameMaskedSampler(9).config, falls="before")
    values = {name: value for name, value in sampler.config.items() if not name.startswith("_")}
    assert all(values.items() <= one.config.items() for one in (former, again))
    assert (changed.config.steps, changed.config.greedy, changed.config.choice_temperature) == (3, False, 2.0)
    assert (whole.config.score, whole.config.greedy, whole.config.schedule) == ("entropy", False, "linear")
    assert isinstance(frames, FrameMaskedSampler)
    assert (frames.config.falls, frames.config.choice_temperature) == ("before", 1.0)
    refuses(TypeError, "stepz", MaskedSampler, stepz=3)


@pytest.mark.parametrize("count", [10**9, 65537])
def test_no_plan_is_made_of_more_calls_than_a_decode_can_have(count: int) -> None:
    for name, setting in PAIRS:
        if setting.name == "steps":
            refuses(ValueError, f"steps={count}", CLASSES[name], steps=count)


def test_both_ends_of_a_range_are_allowed() -> None:
    for steps in (1, 65536):
        assert MaskedSampler(steps=steps).config["steps"] == steps
    for share in (0, 0.0, 1, 1.0):
        assert FrameMaskedSampler(history_hidden=share).config["history_hidden"] == share
    for refused in (-0.001, 1.001):
        refuses(ValueError, f"history_hidden={refused}", FrameMaskedSampler, history_hidden=refused)
    refuses(ValueError, "score_temperature=0", Choice, score_temperature=0)


OF_CLASSES = (
    CausalContinuousTransformer,
    FrameMaskedTransformer,
    LlamaGenStudent,
    LlamaGenTransformer,
    MageTransformer,
    MARTransformer,
    MaskedImageTransformer,
    VARStudent,
    VARTransformer,
)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "10"])
@pytest.mark.parametrize("model", OF_CLASSES)
def test_fewer_than_one_class_is_refused_before_anything_is_built(model: Any, count: Any) -> None:
    refuses(ValueError, f"num_classes={count!r}.*1", model, num_classes=count)


@pytest.mark.parametrize("name", ["dim", "num_heads", "vocab_size", "token_dim"])
@pytest.mark.parametrize("student", [LlamaGenStudent, VARStudent])
def test_a_student_of_no_width_heads_or_codes_is_refused(student: Any, name: str) -> None:
    refuses(ValueError, f"{name}=-1.*1", student, **{name: -1})


def test_an_argument_of_a_function_is_read_as_a_setting() -> None:
    assert type(whole("steps", np.int64(3))) is int
    assert whole("seed", 2**64 - 1, Within(0, 2**64 - 1)) == 2**64 - 1
    for value in (0, 9, True, 2.0, "2", None):
        refuses(ValueError, f"steps={value!r}.*1 to 8", whole, "steps", value, Within(1, 8), ", the scales")
