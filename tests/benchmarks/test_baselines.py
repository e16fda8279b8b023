"""Baselines: that they draw what the samplers' law says, and that what is timed is what is said to be timed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.sizes import baselines
from benchmarks.sizes.baselines import Marks, baselines_of, time_baseline
from tests.helpers.official_sizes import tiny
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

FAMILIES = ["janus", "chameleon", "emu3"]
LAW = TokenLaw(guidance_scale=3.0, top_k=5)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_sharp_law_every_baseline_draws_the_tokens_of_our_plain_sampler(family):
    """At a low temperature there is one token to draw, whatever the noise."""
    official = tiny(family)
    model: Any = official.module
    for parameter in model.parameters():
        parameter.data *= 1.5  # laws far from a tie
    law = TokenLaw(guidance_scale=3.0, temperature=1e-4)
    condition, first_row = official.condition(1), official.model.grid.width
    wanted = AutoregressiveSampler()(official.model, condition, law=law).tokens[:, :first_row]
    known = baselines_of(official)
    assert known
    for baseline in known:
        drawn = baseline.draw(official, condition, torch.zeros(1, 0, dtype=torch.long), law, first_row)
        found = drawn[:, -first_row:]
        assert found.equal(official.model.ids(wanted)), baseline.name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_baseline_is_timed_between_forwards_in_the_middle_of_the_picture(family, monkeypatch):
    official = tiny(family)
    clock = iter(range(10**6))
    monkeypatch.setattr(baselines.time, "perf_counter", lambda: float(next(clock)))
    lengths: list[int] = []

    def note(module, args, kwargs):
        given = [kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args]
        lengths.append(next(tensor for tensor in given if tensor is not None).shape[1])

    handle = official.model.decoder.register_forward_pre_hook(note, with_kwargs=True)
    for baseline in baselines_of(official):
        lengths.clear()
        # One tick of the clock a token, and one at the start.
        seconds, calls, prefill = time_baseline(baseline, official, LAW, batch_size=1, slots=6)
        assert (seconds, calls, prefill) == (4.0, 4, 2.0)
        each, begun = baseline.forwards, (official.length - 6) // 2
        assert len(lengths) == each * (2 + 6)
        prompts = [official.prefix, 1 if family == "emu3" else 3][:each]
        assert lengths[: 2 * each] == [*prompts, *[1] * each]
        assert lengths[2 * each : 3 * each] == [length + begun for length in prompts]
        assert set(lengths[3 * each :]) == {1}
    handle.remove()


def test_row_ends_are_drawn_where_they_belong():
    """transformers' generate pays a forward for every row end; so many are among its tokens."""
    official = tiny("emu3")
    condition = official.condition(2)
    (baseline,) = baselines_of(official)
    drawn = baseline.draw(official, condition, torch.zeros(2, 0, dtype=torch.long), LAW, official.length)
    picture = drawn[:, official.prefix :].view(2, 3, 6)
    assert (picture[..., -1] == 9).all() and ((picture[..., :-1] >= 20) & (picture[..., :-1] < 44)).all()


def test_janus_keeps_its_number_of_tokens_even_when_drawing_fails(monkeypatch):
    official = tiny("janus")
    model: Any = official.module
    config = model.model.vision_model.config
    baselines.generate_janus(official, official.condition(1), torch.zeros(1, 4, dtype=torch.long), LAW, 3)
    assert config.num_image_tokens == 16

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(official.module, "generate", fail)
    with pytest.raises(RuntimeError):
        baselines.generate_janus(official, official.condition(1), torch.zeros(1, 4, dtype=torch.long), LAW, 3)
    assert config.num_image_tokens == 16


def test_hooks_are_taken_off_and_tokens_counted():
    decoder = torch.nn.Linear(2, 2)
    with Marks(decoder, 2) as marks:
        for _ in range(6):
            decoder(torch.zeros(1, 2))
    decoder(torch.zeros(1, 2))
    assert marks.tokens == 3 and not decoder._forward_pre_hooks
    assert marks.between(None, 0) <= marks.between(None, 2)


def test_llamagen_has_none():
    official: Any = SimpleNamespace(model=object())
    assert baselines_of(official) == []
