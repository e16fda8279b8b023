"""Settings survive `from_config` however they were given."""

import inspect
from typing import Any

import pytest

from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.registry import by_name, names, sampler_class


@pytest.mark.parametrize("name", names())
def test_a_setting_given_by_position_is_kept(name):
    kind = sampler_class(by_name(name))
    settings = list(inspect.signature(kind).parameters)
    if not settings:
        return
    default = inspect.signature(kind).parameters[settings[0]].default
    other = not default if isinstance(default, bool | str) else default + 1  # "auto" becomes False
    sampler = kind(other)
    assert sampler.config[settings[0]] == other
    assert type(sampler).from_config(sampler.config).config[settings[0]] == other


def test_what_was_not_given_is_left_to_the_other_class():
    first = SpeculativeJacobiSampler(8, "maximal", acceptance="exact")
    changed: Any = SpeculativeJacobiSampler.from_config(first.config, initial_draft="up")
    settings = {key: changed.config[key] for key in ("window", "coupling", "acceptance", "initial_draft")}
    assert settings == {"window": 8, "coupling": "maximal", "acceptance": "exact", "initial_draft": "up"}


def test_arguments_that_are_none_are_refused():
    with pytest.raises(TypeError, match="bogus"):
        SpeculativeJacobiSampler(8, bogus=1)  # pyright: ignore
    with pytest.raises(TypeError):
        SpeculativeJacobiSampler(8, window=9)  # pyright: ignore
