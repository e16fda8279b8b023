"""FlowAR beside the code of DiSA, which loads the released weights; its maps, its cache, and its files."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.models.continuous.tiny import released_flowar, tiny_flowar
from visual_spec.models.continuous.mar_checkpoint import is_mar
from visual_spec.prototype.flowar import model as flowar
from visual_spec.prototype.flowar.model import PRESETS, FlowARTransformer, load_flowar_checkpoint
from visual_spec.prototype.flowar.sampler import FlowScaleSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise

LABELS = torch.tensor([3, 7])


def waves(rows: int, places: int, numbers: int) -> Tensor:
    """Numbers that another program can write too, the same in all rows."""
    index = torch.arange(1, places * numbers + 1, dtype=torch.float64)
    return (2 * torch.sin(1.7 * index)).float().view(1, places, numbers).expand(rows, -1, -1)


def same_weights(cross: bool) -> FlowARTransformer:
    """Each weight a wave of its own over its numbers, by the order of the released names."""
    model = FlowARTransformer(16, 16, 32, 1, 2, 128, 1, cross, scales=(1, 2, 4, 16))
    for number, (name, weight) in enumerate(sorted(model.named_parameters())):
        index = torch.arange(weight.numel(), dtype=torch.float64)
        wave = torch.cos(index * (1 + 0.1 * number) + number) * (0.25 if weight.ndim > 1 else 0.1)
        around = name.endswith(("_ln.weight", "norm.weight", "norm2_1.weight", "norm2_2.weight"))
        weight.data.copy_((wave + around).view(weight.shape))
    return model.eval()


# Of DiSA's FlowAR with these weights, its Attention, flow network and Euler sampler as they are: conditions of true
# maps, velocities of the third map at two times, and tokens of 8 levels that fall to 4, guidance 3 from 0.9. Number 2
# of places 0, 1, 7 and the last, in both rows; then the mean size of all and their deviation.
RECORDED: dict[bool, dict[str, tuple[list[float], float, float]]] = {
    False: {
        "conditions": ([-1.4521, -1.6748, 0.8195, 1.3062, -1.6013, -1.6788, 0.8085, 1.2905], 0.8624, 1.0181),
        "velocity": ([2.066, 2.1784, 2.2126, 2.2661, 0.3343, 0.637, 0.4463, 0.5781], 0.9475, 1.2339),
        "tokens": ([-4.5315, -1.2526, -1.2929, -4.1513, -4.5891, -1.2913, -1.3214, -4.1949], 2.0039, 2.459),
    },
    True: {
        "conditions": ([-1.4406, -1.5916, 0.8612, 1.1425, -1.5719, -1.5968, 0.8843, 1.2441], 0.8557, 1.0168),
        "velocity": ([-0.0504, -0.3367, -0.2728, -0.0347, 0.378, 0.0839, 0.1155, 0.4171], 0.2794, 0.318),
        "tokens": ([-2.1728, 1.5672, 1.352, -2.257, -2.1766, 1.5681, 1.3525, -2.2571], 1.3568, 1.5273),
    },
}


@pytest.mark.parametrize("cross", [False, True], ids=["S", "L and H"])
def test_it_is_what_third_party_code_makes_of_the_same_weights(cross, monkeypatch):
    model, recorded = same_weights(cross), RECORDED[cross]

    def check(name: str, made: Tensor) -> None:
        values, size, deviation = recorded[name]
        assert made[:, [0, 1, 7, -1], 2].flatten().tolist() == pytest.approx(values, abs=2e-4)
        assert (made.abs().mean().item(), made.std().item()) == pytest.approx((size, deviation), abs=1e-4)

    latents = waves(2, 16, 256).reshape(2, 16, 16, 16).clone()
    latents[1] *= -0.5
    with torch.no_grad():
        maps = [model.averaged(latents, side) for side in model.scales]
        z = model.teacher_forced(maps, LABELS)
        check("conditions", z)
        third = model.flownet.inputs(z[:, 5:21], 4)
        check("velocity", model.flownet(waves(2, 16, 16), torch.tensor([0.3, 0.71]), third))
    monkeypatch.setattr(CounterNoise, "normal", lambda self, slots, d, *_: waves(2, slots.shape[1], d))
    sampler, law = FlowScaleSampler(8, 4), TokenLaw(guidance_scale=3.0)
    drawn: Any = sampler(model, LABELS, law=law, batch_size=2)
    check("tokens", drawn.tokens)
    assert drawn.trace.levels == (8, 6, 4, 4)  # an odd number of levels is one step less


def random_maps(model: FlowARTransformer, rows: int = 2) -> list[Tensor]:
    """Of no common picture."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(rows, 3, side, side, generator=generator, dtype=torch.float64) for side in model.scales
    ]


@pytest.mark.parametrize("guided", [False, True])
def test_a_cached_decode_computes_what_one_call_on_all_maps_does(guided):
    model = tiny_flowar().double()
    maps, labels = random_maps(model), torch.tensor([1, 4])
    expected = model.teacher_forced(maps, labels)
    if guided:
        expected = torch.cat([expected, model.teacher_forced(maps, labels, torch.tensor([True, True]))])
    state = model.prefill(labels, batch_size=2, guided=guided)
    parts = [state.conditions, *(model(state, map, scale) for scale, map in enumerate(maps[:-1], 1))]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-12, atol=1e-12)
    # A map is fed again: what followed it is gone.
    torch.testing.assert_close(model(state, maps[0], 1), parts[1], rtol=1e-12, atol=1e-12)


def test_no_map_reaches_the_conditions_of_its_own_scale_or_of_coarser_ones():
    model = tiny_flowar().double()
    maps, labels = random_maps(model), torch.tensor([1, 4])
    before = model.teacher_forced(maps, labels)
    for scale, (start, end) in enumerate(zip(model.offsets, model.offsets[1:], strict=False)):
        others = [map + (index == scale) for index, map in enumerate(maps)]
        changed = (model.teacher_forced(others, labels) - before).abs().amax((0, 2)) > 1e-9
        assert not changed[:end].any() and changed[end:].all(), scale
        assert start < end


def test_sizes_that_make_no_model_are_refused():
    for changes, said in (
        (dict(dim=20), "dim=20.*num_heads=2.*4"),
        (dict(scales=(1, 3)), r"scales=\(1, 3\).*4.*1"),
        (dict(scales=(2, 4)), "sides.*1"),
        (dict(scales=(1, 4, 4)), "sides.*1"),
        (dict(flow_width=96), "width 96.*64"),
    ):
        refuses(ValueError, said, tiny_flowar, **changes)
    with pytest.raises(ValueError, match="1 labels.*0.*4"):
        tiny_flowar().prefill(torch.tensor([5]), batch_size=1, guided=False)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cross", [False, True])
def test_a_released_file_becomes_a_model_and_a_folder(cross, tmp_path):
    model = tiny_flowar(cross=cross)
    torch.save(released_flowar(model), tmp_path / "FlowAR-S.pth")
    read = load_flowar_checkpoint(tmp_path / "FlowAR-S.pth", num_heads=2)
    read.save_pretrained(tmp_path / "saved")
    for loaded in (read, FlowARTransformer.from_pretrained(tmp_path / "saved")):
        same = {name: value for name, value in model.config.items() if name[0] != "_"}
        assert {name: loaded.config[name] for name in same} == same
        held = loaded.state_dict()
        assert all(torch.equal(held[key], value) for key, value in model.state_dict().items())


def test_a_file_with_other_keys_is_refused():
    weights = released_flowar(tiny_flowar())
    assert flowar.is_flowar(weights) and not is_mar(weights)
    refuses(ValueError, "pass num_heads", load_flowar_checkpoint, weights)
    missing = {key: value for key, value in weights.items() if key != "flownet.cond_embed.bias"}
    refuses(ValueError, "1 missing: flownet.cond_embed.bias", load_flowar_checkpoint, missing, num_heads=2)
    with pytest.raises(ValueError, match=r"FlowAR.*FlowAR-S\.pth"):
        load_flowar_checkpoint({"z_proj.weight": torch.zeros(16, 3)})


@pytest.mark.parametrize("preset", PRESETS)
def test_released_sizes_are_recognised(preset):
    with torch.device("meta"):
        model = FlowARTransformer(**PRESETS[preset])
    config = load_flowar_checkpoint(model.state_dict()).config
    assert all(config[name] == value for name, value in model.config.items() if name[0] != "_")
