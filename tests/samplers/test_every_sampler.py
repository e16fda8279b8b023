"""What holds for all samplers, asked of each one that is registered."""

import inspect
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.sampler_kinds import CHANGED, KINDS, LAW, REFUSED, REFUSED_BY, decode
from tests.helpers.sampler_settings import settings_of
from visual_spec.models.core.settings import in_groups, of_settings, one_by_one
from visual_spec.samplers.core.acceptance import RELAXED
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.registry import (
    CHUNKS,
    CONTINUOUS,
    DENOISED,
    DISTILLED,
    FLOW_SCALES,
    FRAMES,
    MASKED,
    SCALES,
    SamplerEntry,
    all_samplers,
    sampler_class,
)

pytestmark = pytest.mark.every_set

EVERY = pytest.mark.parametrize("entry", all_samplers(), ids=lambda entry: entry.name)


def defaults_of(kind: Any) -> dict[str, Any]:
    """Settings of a class, those of groups one by one."""
    parameters = inspect.signature(kind).parameters.items()
    return one_by_one(
        inspect.unwrap(kind.__init__), {name: parameter.default for name, parameter in parameters}
    )


def changed(entry: SamplerEntry) -> Any:
    """A sampler whose settings are none of the defaults, but for one."""
    return of_settings(sampler_class(entry), **CHANGED[entry.class_name])


def same_tokens(one: Tensor, other: Tensor) -> bool:
    """Ids have to be equal; vectors of models in float64 as far as products of other widths round alike."""
    if one.is_floating_point():
        return one.dtype == torch.float64 and torch.allclose(one, other, rtol=1e-9, atol=1e-9)
    return torch.equal(one, other)


@EVERY
def test_the_changed_settings_are_all_there_and_changed(entry):
    defaults, settings = defaults_of(sampler_class(entry)), CHANGED[entry.class_name]
    assert set(settings) == set(defaults)
    same = {name for name in settings if settings[name] == defaults[name]}
    # "k-seq" is not for acceptance "identical", "exact_width" for no other; steps and order not for causal models;
    # reuse not with an entropy bound; of the rules by which draws decide one. FreeDave has one acceptance.
    alone = {"sibling_rule", "exact_width", "reuse", "entropy_bound", "threshold", "factor", "commit_gaps"}
    one = {"freedave": {"acceptance"}}.get(entry.name, set())
    assert same <= alone | one | ({"steps", "order"} if entry.calls == CONTINUOUS else set())


@EVERY
def test_every_setting_survives_its_file(entry, tmp_path):
    sampler = changed(entry)
    sampler.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "sampler_config.json").read_text())
    assert saved["_class_name"] == entry.class_name
    loaded = sampler_class(entry).from_pretrained(tmp_path)
    assert type(loaded) is type(sampler)
    assert settings_of(loaded) == settings_of(sampler) == CHANGED[entry.class_name]
    promises = ("lossless", "identical", "needs_codebook")
    assert [getattr(loaded, name) for name in promises] == [getattr(sampler, name) for name in promises]


@EVERY
def test_settings_given_by_position_are_kept(entry):
    kind, settings = sampler_class(entry), CHANGED[entry.class_name]
    given = in_groups(inspect.unwrap(kind.__init__), settings)
    keyed = {name for name, one in inspect.signature(kind).parameters.items() if one.kind is one.KEYWORD_ONLY}
    by_name = {name: given.pop(name) for name in keyed}
    sampler = kind(
        *[given[name] for name in inspect.signature(kind).parameters if name not in keyed], **by_name
    )
    assert settings_of(sampler) == settings
    assert settings_of(kind.from_config(sampler.config)) == settings


@EVERY
def test_samplers_swap_through_their_configurations(entry):
    """As users change a sampler: `pipe.sampler = Kind.from_config(pipe.sampler.config)`."""
    config = sampler_class(entry)().config
    for other in (other for other in all_samplers() if other.calls == entry.calls):
        assert type(sampler_class(other).from_config(config)) is sampler_class(other)


@EVERY
def test_defaults_are_those_of_the_signature(entry):
    assert settings_of(sampler_class(entry)()) == defaults_of(sampler_class(entry))


@EVERY
def test_every_setting_refuses_what_it_cannot_be(entry):
    """One setting at a time; the message names the setting and the value. A new setting has to be in the table."""
    kind, own = sampler_class(entry), REFUSED_BY.get(entry.class_name, {})
    assert set(own) <= set(defaults_of(kind))
    for name in defaults_of(kind):
        for value in [*REFUSED[name], *own.get(name, [])]:
            refuses(ValueError, re.escape(f"{name}={value!r}; pass "), of_settings, kind, **{name: value})


@EVERY
@pytest.mark.parametrize("settings", ["defaults", "changed"])
def test_a_sample_is_what_it_is_alone(entry, settings):
    """In a batch whose complete samples leave: the same tokens, in the same calls."""
    sampler = sampler_class(entry)() if settings == "defaults" else changed(entry)
    if entry.calls == "columns" and sampler.needs_codebook:
        sampler = type(sampler).from_config(
            sampler.config, relaxation={**sampler.config.relaxation, "code_distance": None}
        )
    together = decode(entry, sampler)
    by_batch = sampler.config.get("window", 0) is None  # a window that follows the batch: only tokens do not
    for sample in (0, 2, 4):
        alone = decode(entry, sampler, [sample])
        assert same_tokens(alone.tokens[0], together.tokens[sample])
        if by_batch:
            continue
        assert torch.equal(alone.trace.commit_call[0], together.trace.commit_call[sample])
        assert alone.trace.target_calls[0] == together.trace.target_calls[sample]


@EVERY
def test_complete_samples_leave_the_batch(entry, monkeypatch):
    """The rows that a model is fed are those of samples that are not complete, at every call."""
    kind, sampler = KINDS[entry.calls], sampler_class(entry)()
    if entry.calls in (CHUNKS, DENOISED, DISTILLED, FLOW_SCALES, FRAMES, MASKED, SCALES):
        return  # all samples take the same calls
    fed: list[int] = []
    forward = type(kind.model).forward

    def watched(self: Any, state: Any, tokens: Tensor, *rest: Any, **named: Any) -> Tensor:
        if self is kind.model:
            fed.append(len(tokens))
        return forward(self, state, tokens, *rest, **named)

    monkeypatch.setattr(type(kind.model), "forward", watched)
    calls = decode(entry, sampler).trace.target_calls
    after = [int((calls - 1 > call).sum()) for call in range(int(calls.max()) - 1)]
    assert fed == after


@EVERY
def test_a_sampler_holds_no_tensors_and_no_state(entry):
    sampler = sampler_class(entry)()
    before = dict(vars(sampler))
    first = decode(entry, sampler)
    assert vars(sampler) == before
    assert not any(isinstance(value, Tensor) for value in vars(sampler).values())
    assert not hasattr(sampler, "state")
    assert same_tokens(decode(entry, sampler).tokens, first.tokens)


def _set_in(sampler: Any) -> list[str]:
    return [name for name, value in sampler.config.items() if value is True]


@EVERY
@pytest.mark.parametrize("settings", ["defaults", "changed"])
def test_log_probabilities_change_nothing_and_cost_no_call(entry, settings):
    """Of each token that a call drew. Tests of each kind compute them anew."""
    sampler = sampler_class(entry)() if settings == "defaults" else changed(entry)
    if entry.calls == "columns" and sampler.needs_codebook:
        relaxation = {**sampler.config.relaxation, "code_distance": None}
        sampler = type(sampler).from_config(sampler.config, relaxation=relaxation)
    if not sampler.gives_logprobs:
        with pytest.raises(ValueError, match=f"output_logprobs of a {entry.class_name}"):
            decode(entry, sampler, output_logprobs=True)
        return
    plain, result = decode(entry, sampler), decode(entry, sampler, output_logprobs=True)
    assert same_tokens(result.tokens, plain.tokens)
    assert torch.equal(result.trace.target_calls, plain.trace.target_calls)
    for found in (result.trace.logprobs, result.trace.model_logprobs):
        assert found.shape == result.tokens.shape and found.dtype == torch.float32
        assert found.isfinite().all() and (found <= 0).all() and (found < 0).any()
    moved = sampler.config.get("acceptance") in RELAXED or bool({"greedy", "smooth"} & set(_set_in(sampler)))
    assert result.trace.logprobs_law == ("target" if moved else "drawn")
    assert plain.trace.logprobs is plain.trace.model_logprobs is plain.trace.logprobs_law is None


@EVERY
def test_unknown_parts_are_refused_by_name_before_any_compute(entry, monkeypatch):
    kind, sampler = KINDS[entry.calls], sampler_class(entry)()
    monkeypatch.setattr(type(kind.model), "prefill", None, raising=False)
    monkeypatch.setattr(type(kind.model), "prepare", None, raising=False)
    takes = ", ".join(sampler.takes) or "nothing else"
    with pytest.raises(TypeError, match=f"{entry.class_name}.*drafters, colour.*takes {takes}"):
        decode(entry, sampler, drafters=1, colour=2)


@EVERY
def test_requests_that_no_model_serves_are_refused_before_any_compute(entry, monkeypatch):
    kind, sampler = KINDS[entry.calls], sampler_class(entry)()
    monkeypatch.setattr(type(kind.model), "prefill", None, raising=False)
    monkeypatch.setattr(type(kind.model), "prepare", None, raising=False)
    for batch_size in (0, -1, 1.5, True):
        refuses(ValueError, f"batch_size={batch_size};", decode, entry, sampler, batch_size=batch_size)
    refuses(ValueError, "1 generators.*5", decode, entry, sampler, generator=[torch.Generator()])
    if entry.calls not in (
        CHUNKS,
        CONTINUOUS,
        DENOISED,
        DISTILLED,
        FLOW_SCALES,
    ):  # which have no ids to allow
        refuses(ValueError, r"allowed=\(0, 99\)", decode, entry, sampler, law=TokenLaw(allowed=(0, 99)))


@EVERY
def test_the_trace_says_what_the_sampler_promises(entry):
    sampler = sampler_class(entry)()
    unfiltered = entry.calls in (CHUNKS, MASKED, CONTINUOUS, DENOISED, DISTILLED, FLOW_SCALES)
    trace = (decode(entry, sampler) if unfiltered else decode(entry, sampler, law=LAW)).trace
    assert trace.sampler == entry.class_name
    assert (trace.lossless, trace.identical) == (sampler.lossless, sampler.identical)
    assert (entry.needs == "drafter") == sampler.needs_drafter == ("drafter" in sampler.takes)
    if sampler.identical:
        plain: Any = next(
            (other for other in all_samplers() if other.plain and _same_text(other, entry)), None
        )
        expected = decode(entry, sampler_class(plain)() if plain else OrderedSampler())
        if entry.calls == MASKED:  # its plain decoding is one token a call in the same order
            expected = decode(entry, sampler_class(entry)(num_drafts=0))
        assert torch.equal(decode(entry, sampler).tokens, expected.tokens)


def _same_text(one: SamplerEntry, other: SamplerEntry) -> bool:
    return KINDS[one.calls] is KINDS[other.calls]
