"""Side by side decoding on a tiny real model."""

import pytest

from tests.tiny import tiny_pipeline
from visual_spec.eval.comparison import compare
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

PROMPT = "a red circle"


def test_compare_finds_equality_and_leaves_the_pipeline_as_it_was():
    pipe = tiny_pipeline()
    sampler = pipe.sampler
    rows = compare(
        pipe, SpeculativeJacobiSampler(window=4), [(PROMPT, 9), (PROMPT, 10)], {"guidance_scale": 2.0}
    )
    assert pipe.sampler is sampler
    assert len(rows) == 2
    for row in rows:
        assert row.identical and row.commit_call.shape == (16,)
        assert row.fast_calls < row.plain_calls == 16
        assert row.plain_seconds > 0 < row.fast_seconds


def test_compare_finds_a_difference():
    pipe = tiny_pipeline()
    independent = SpeculativeJacobiSampler(window=4, coupling="independent", acceptance="exact")
    (row,) = compare(pipe, independent, [(PROMPT, 3)], {})
    assert not row.identical


def test_the_sampler_is_put_back_after_an_error():
    pipe = tiny_pipeline()
    sampler = pipe.sampler
    with pytest.raises(ValueError, match="no words"):
        compare(pipe, SpeculativeJacobiSampler(window=4), [("", 0)], {})
    assert pipe.sampler is sampler
