"""Side by side decoding on a tiny real model."""

from typing import Any

import pytest

from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec.eval.report.comparison import compare
from visual_spec.pipelines.accelerate import accelerate, summary
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.continuous.head import HeadSpeculativeSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.scales.scales import ScaleWiseSampler

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
    refuses(ValueError, "no words", compare, pipe, SpeculativeJacobiSampler(window=4), [("", 0)], {})
    assert pipe.sampler is sampler


# -- settings of the law --


def test_a_faster_setting_of_another_law_promises_nothing_but_the_same_law_does():
    """As `generate --compare` and a call say it. The plain decoding is the one that the pipeline was saved with."""
    pipe: Any = tiny_latent_pipeline()
    (row,) = compare(pipe, ContinuousSampler(steps=4), [("3", 9)], {})
    assert not (row.identical or row.promised or row.lossless)
    assert row.output_law == "another law than plain decoding's (steps=4)"
    (row,) = compare(pipe, HeadSpeculativeSampler(steps=4), [("3", 9)], {})
    assert not row.lossless and "(steps=4)" in row.output_law
    (row,) = compare(pipe, HeadSpeculativeSampler(), [("3", 9)], {})
    assert row.lossless and row.output_law == "lossless"

    pipe.sampler = ContinuousSampler(steps=4)
    assert pipe("3").trace.output_law == "another law than plain decoding's (steps=4)"
    accelerate(pipe, "head-speculation:steps=4")
    pipe.last_trace = None
    assert summary(pipe) == "HeadSpeculativeSampler, another law; nothing decoded yet"
    pipe.sampler = ContinuousSampler(steps=4)
    (same,) = compare(pipe, ContinuousSampler(steps=4, graph=False), [("3", 9)], {})
    assert same.identical and same.promised
    (exact,) = compare(pipe, HeadSpeculativeSampler(steps=4), [("3", 9)], {})
    assert exact.lossless and not exact.promised


def test_a_saved_sampler_defines_the_plain_law(tmp_path):
    pipe: Any = tiny_latent_pipeline()
    pipe.sampler = ContinuousSampler(steps=4, head_steps=3)
    pipe.save_pretrained(tmp_path)
    loaded: Any = load_pipeline(tmp_path)
    assert loaded("3").trace.identical
    loaded.sampler = HeadSpeculativeSampler(steps=4, head_steps=3)
    assert loaded("3").trace.promise == "lossless"
    loaded.sampler = ContinuousSampler(head_steps=3)
    assert loaded("3").trace.output_law == "another law than plain decoding's (steps=16)"


# -- next-scale models --


def test_two_models_are_compared_with_the_first_one_alone():
    pipe: Any = tiny_scale_pipeline()
    sampler = ScaleWiseSampler(num_draft_scales=2, cache_share=0.7)
    rows = compare(pipe, sampler, [("3", 9), ("1", 10)], {"top_k": 5})
    assert pipe.sampler.config["num_draft_scales"] is None and pipe.budget is None
    for row, (label, seed) in zip(rows, [(3, 9), (1, 10)], strict=True):
        assert row.scales is not None
        plain = pipe(label, generator=seeded(seed), num_draft_scales=4, top_k=5)
        assert row.plain.tobytes() == plain.images[0].tobytes() != row.fast.tobytes()
        assert row.scales.plain_cache == plain.trace.cache_bytes[0] > row.scales.fast_cache
        assert (row.scales.sides, row.scales.drafted) == ((1, 2, 3, 4), 2)
        assert row.plain_calls == row.fast_calls == 4
        assert not row.identical and not row.promised
        assert row.headline == (f"{row.speed_up:.2f}x", "as fast")
        assert row.map_caption.startswith("2 of 4 scales; cache 7 -> ")
    (same,) = compare(pipe, ScaleWiseSampler(num_draft_scales="all", cache_share=1.0), [("3", 9)], {})
    assert same.identical and same.promised
    with pytest.raises(ValueError, match="num_draft_scales=9"):
        compare(pipe, ScaleWiseSampler(num_draft_scales=9), [("3", 9)], {})


def test_a_broken_promise_is_seen():
    pipe = tiny_pipeline()
    (row,) = compare(pipe, SpeculativeJacobiSampler(window=4), [(PROMPT, 9)], {})
    assert row.promised
    independent = SpeculativeJacobiSampler(window=4, coupling="independent", acceptance="exact")
    assert not compare(pipe, independent, [(PROMPT, 3)], {})[0].promised
