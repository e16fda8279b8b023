"""Maps drawn by flow matching beside the loop written out, and how such a decode is stopped and refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny import seeded
from tests.models.continuous.tiny import tiny_flowar
from visual_spec.prototype.flowar.sampler import FlowScaleSampler, noise_shares
from visual_spec.samplers.core.base import STOP
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHAIN, CounterNoise, draw_keys

LABELS = torch.tensor([1, 4])


def test_the_levels_are_the_released_ones():
    assert noise_shares(2) == pytest.approx([1, 0.25, 0])
    assert noise_shares(8) == pytest.approx(
        [1, 1 - 0.7 / 3, 1 - 1.4 / 3, 0.3, 0.25, 0.1875, 0.125, 0.0625, 0]
    )
    assert [len(noise_shares(count)) - 1 for count in (25, 26, 49, 50, 51)] == [24, 26, 48, 50, 50]
    assert noise_shares(50) == pytest.approx([1 - step / 50 for step in range(51)])


def straight(model: Any, guidance: float, levels: list[int], guided_from: float, heat: float) -> Tensor:
    """Every map anew from all maps before it, without a cache; both kinds of rows at every level."""
    noise, maps = CounterNoise(draw_keys(seeded(5, 6), 2), "cpu"), []
    for scale, (side, count) in enumerate(zip(model.scales, levels, strict=True)):
        open_maps = [torch.zeros(2, 3, other, other, dtype=torch.float64) for other in model.scales[scale:]]
        here = slice(model.offsets[scale], model.offsets[scale] + side * side)
        with_class, without = (
            model.teacher_forced([*maps, *open_maps], LABELS, torch.tensor([drop] * 2))[:, here]
            for drop in (False, True)
        )
        slots = torch.arange(here.start, here.stop).expand(2, -1)
        x = heat * noise.normal(slots, 3, CHAIN, 0, torch.float64)
        shares = noise_shares(count)
        for share, later in zip(shares, shares[1:], strict=False):
            time = torch.tensor([share])
            yes, no = (model.flownet(x, time, model.flownet.inputs(z, side)) for z in (with_class, without))
            strength = 1 + (guidance - 1) * scale / (len(levels) - 1)
            x = x + (later - share) * (no + strength * (yes - no) if share <= guided_from else yes)
        maps.append(x.transpose(1, 2).reshape(2, 3, side, side))
    return x


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("last", [None, 3])
def test_it_is_the_loop_written_out(cross, last):
    model: Any = tiny_flowar(cross=cross).double()
    sampler = FlowScaleSampler(7, last, guided_from=0.6)
    law = TokenLaw(guidance_scale=2.5, temperature=0.9)
    drawn: Any = sampler(model, LABELS, law=law, generator=seeded(5, 6), batch_size=2)
    levels = [7, 7, 7] if last is None else [7, 5, 3]
    with torch.no_grad():
        expected = straight(model, 2.5, levels, 0.6, 0.9)
    torch.testing.assert_close(drawn.tokens, expected, rtol=1e-9, atol=1e-9)
    steps = sum(2 * (count // 2) for count in levels)
    assert drawn.trace.head_calls.tolist() == [steps, steps]
    assert drawn.trace.target_calls.tolist() == [3, 3] and (drawn.trace.commit_call == 2).all()
    assert f"; {steps} head calls" in drawn.trace.summary()


def test_unguided_velocities_take_no_unconditional_rows(monkeypatch):
    model: Any = tiny_flowar().double()
    rows: list[tuple[int, float]] = []
    forward = type(model.flownet).forward

    def watched(self: Any, x: Tensor, times: Tensor, inputs: Any) -> Tensor:
        rows.append((len(x), times.item()))
        return forward(self, x, times, inputs)

    monkeypatch.setattr(type(model.flownet), "forward", watched)
    FlowScaleSampler(4, guided_from=0.5)(model, LABELS, law=TokenLaw(guidance_scale=3.0), batch_size=2)
    # The first map has no guidance.
    assert rows[:4] == [(2, share) for share in (1.0, pytest.approx(0.3), 0.25, 0.125)]
    assert [count for count, _ in rows[4:]] == 2 * [2, 4, 4, 4]


def test_a_decode_that_is_stopped_returns_the_last_map_enlarged():
    model: Any = tiny_flowar().double()
    seen: list[list[int]] = []

    def stop(call: int, places: Tensor) -> Any:
        seen.append(places.tolist())
        return STOP if call == 1 else None

    drawn = FlowScaleSampler(2)(
        model, LABELS, law=TokenLaw(), generator=seeded(1, 2), batch_size=2, callback=stop
    )
    assert seen == [[1, 1], [4, 4]] and drawn.trace.stopped and (drawn.trace.commit_call == 1).all()
    whole = FlowScaleSampler(2)(model, LABELS, law=TokenLaw(), generator=seeded(1, 2), batch_size=2)
    assert drawn.tokens.shape == whole.tokens.shape and not torch.equal(drawn.tokens, whole.tokens)


def test_what_vectors_have_no_use_for_is_refused():
    for law, said in ((TokenLaw(top_k=5), "top_k=5"), (TokenLaw(guidance_until=2), "guidance_until=2")):
        with pytest.raises(ValueError, match=f"{said} given"):
            FlowScaleSampler()(tiny_flowar(), LABELS, law=law, batch_size=2)
    broken = tiny_flowar()
    broken.flownet.final_layer.linear.bias.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="sample 0.*0.*0"):
        FlowScaleSampler(2)(broken, LABELS, law=TokenLaw(), batch_size=2)
