"""The promise of a run, with every setting of every sampler changed alone, beside plain decoding with its seeds."""

from typing import Any

import pytest
import torch

from tests.helpers.sampler_kinds import CHANGED, KINDS, Kind, decode
from tests.helpers.sampler_settings import settings_of
from tests.models.continuous.tiny import calm, tiny_mar
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core.trace import IDENTICAL, LOSSLESS, LOSSY, OTHER
from visual_spec.samplers.registry import (
    CHUNKS,
    CONTINUOUS,
    DENOISED,
    DISTILLED,
    FLOW_SCALES,
    FRAMES,
    MASKED,
    all_samplers,
    by_class,
    by_name,
    sampler_class,
)

OWN_LAW = (CHUNKS, DENOISED, DISTILLED, FLOW_SCALES, FRAMES, MASKED)
SAMPLES = range(2)
# In place of those of `CHANGED` that are the default ones, or not for a MAR; and what some settings need beside them.
VALUES: dict[str, Any] = {"steps": 4, "order": "raster", "reuse": 1, "num_draft_scales": "all"}
EXACT = {"acceptance": "exact"}  # relaxed rules are lossy, whatever their numbers
BESIDE: dict[str, dict[str, Any]] = {
    "coupling": EXACT,
    "num_drafters": {"cache_share": "off"},
    "order": {"allow_approximate": True},
    "reuse_from": {"reuse": 1},
    "local_levels": {"reuse": 1},
    "schedule": {"steps": 3},
    "repulsion": {"steps": 3, "order": "locality"},
}
# Settings by which another sample of the same law is drawn. `tests/exactness` enumerates what they do; what is neither
# here nor a setting of the law must keep every token.
REDRAWS = {
    "acceptance", "coupling", "window", "rule", "num_drafts", "tolerance", "prefill", "levels",
}  # fmt: skip


@pytest.fixture(autouse=True)
def masked_vectors(monkeypatch):
    """A MAR, whose order and number of calls can be chosen; and a drafter near it."""

    def model(head: float) -> Any:
        return calm(tiny_mar(head_kind="velocity", head_steps=4, eta=1.0, final_noise=0.4), head)

    condition = KINDS[CONTINUOUS].condition
    monkeypatch.setitem(KINDS, CONTINUOUS, Kind(model(0.1), condition, model(0.11)))


def plainly(kind: type, **settings: Any) -> Any:
    """The sampler with the rule that keeps most."""
    known = settings_of(kind())
    rule = {"acceptance": "identical", "coupling": "gumbel"}
    return kind(
        **{name: value for name, value in (rule | settings).items() if name in known and value is not None}
    )


def plain_of(sampler: Any) -> Any:
    """The plain decoding of its kind of calls, with the same settings of the law."""
    entry = by_class(type(sampler).__name__)
    if sampler.keeps in (LOSSY, OTHER) or entry.plain:
        return sampler
    plain = next(
        (one for one in all_samplers() if one.plain and KINDS[one.calls] is KINDS[entry.calls]),
        by_name("ordered"),
    )
    if not set(sampler.law_names) <= set(sampler_class(plain).law_names):
        return sampler  # its law has no other plain decoding
    return plainly(sampler_class(plain), **sampler.law_settings)


def changed_value(entry: Any, name: str) -> Any:
    # FreeDave's acceptance has one value.
    rules = {} if entry.class_name == "FreeDaveSampler" else EXACT
    value = (CHANGED[entry.class_name] | rules)[name]
    default = settings_of(sampler_class(entry)())[name]
    return VALUES.get(name, value) if entry.calls == CONTINUOUS or value == default else value


def same(one: Any, other: Any) -> bool:
    """Ids are equal; vectors in float64 as far as products of other widths round alike."""
    if one.tokens.shape != other.tokens.shape:
        return False
    if one.tokens.is_floating_point():
        return torch.allclose(one.tokens, other.tokens, rtol=1e-9, atol=1e-9)
    return torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("entry", all_samplers(), ids=lambda entry: entry.name)
def test_a_run_gives_what_it_promises_whatever_the_settings(entry):
    kind, own_law = sampler_class(entry), entry.calls in OWN_LAW
    plain = decode(entry, plain_of(plainly(kind)), SAMPLES)
    if plainly(kind).keeps == LOSSY and not own_law:
        return  # how far it is from plain decoding is measured, whatever the settings
    usually = decode(entry, plainly(kind), SAMPLES)
    for name in CHANGED[entry.class_name]:
        if name == "relaxation" or (usually.trace.keeps == LOSSY and name in kind.law_names):
            continue  # of a relaxed rule; of a law that has no other plain decoding
        needed, value = BESIDE.get(name, {}), changed_value(entry, name)
        if value == settings_of(plainly(kind, **needed))[name]:
            continue  # of those that have no other value here
        sampler = plainly(kind, **needed, **{name: value})
        usual = decode(entry, plainly(kind, **needed), SAMPLES) if needed else usually
        found = decode(entry, sampler, SAMPLES)
        trace = found.trace
        alone = trace.beside(usual.trace.law_settings)
        assert not trace.identical or same(found, plain), name
        assert not (alone.identical and usual.trace.keeps == IDENTICAL) or same(found, usual), name
        if name in kind.law_names:
            assert (alone.promise == trace.promise == OTHER) == (name != "num_draft_scales"), name
        elif trace.keeps == LOSSLESS or (own_law and usual.trace.keeps == LOSSY):
            assert name in REDRAWS or same(found, usual), name
        if trace.promise == OTHER:
            assert not (trace.lossless or trace.identical or sampler.lossless or sampler.identical), name
            assert f"another law than plain decoding's ({name}=" in alone.summary()
            if trace.beside(trace.law_settings).identical:  # the promise stays beside the same law, and holds
                beside = decode(entry, plain_of(sampler), SAMPLES)
                assert trace.beside(beside.trace.law_settings).identical and same(found, beside), name


@pytest.mark.parametrize(
    "settings",
    [
        {
            "steps": 16,
            "order": "random",
            "head_steps": 4,
            "last_head_steps": 4,
            "eta": 1.0,
            "final_noise": 0.4,
        },
        {"guidance": "constant"},
        {"reuse_from": 0.5, "local_levels": 0.5},
    ],
)
def test_settings_that_change_nothing_in_this_model_withdraw_nothing(settings):
    from visual_spec.samplers.core.law import TokenLaw

    entry = by_name("reusing-continuous" if "reuse_from" in settings else "continuous")
    plain, found = (
        decode(entry, of_settings(sampler_class(entry), **one), SAMPLES, law=TokenLaw())
        for one in ({}, settings)
    )
    assert found.trace.identical and same(found, plain)
    exact = decode(entry, sampler_class(by_name("head-speculation"))(steps=16), SAMPLES).trace
    assert exact.promise == LOSSLESS
