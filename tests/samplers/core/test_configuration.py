"""Settings that go from one sampler to another, and that are refused. Their files and places: test_every_sampler."""

from typing import Any

import pytest

from tests.helpers.refusals import refuses
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


def test_what_was_not_given_is_left_to_the_other_class():
    first = SpeculativeJacobiSampler(8, "maximal", acceptance="exact")
    changed: Any = SpeculativeJacobiSampler.from_config(first.config, initial_draft="up")
    settings = {key: changed.config[key] for key in ("window", "coupling", "acceptance", "initial_draft")}
    assert settings == {"window": 8, "coupling": "maximal", "acceptance": "exact", "initial_draft": "up"}


def test_arguments_that_are_none_are_refused():
    refuses(TypeError, "bogus", SpeculativeJacobiSampler, 8, bogus=1)
    with pytest.raises(TypeError):
        SpeculativeJacobiSampler(8, window=9)  # pyright: ignore
