"""What VAR, FlexVAR and Infinity have in common: decoding scale by scale, prefills and training say the same."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers import flexvar
from tests.helpers.next_scale import decoded, random_maps
from tests.helpers.refusals import refuses
from tests.helpers.tiny_infinity import captions, tiny_infinity
from tests.helpers.tiny_scales import tiny_var
from visual_spec.models.core.protocol import area_of

KINDS: dict[str, Any] = {
    "VAR": tiny_var,
    "VAR of shared norms": partial(tiny_var, shared_adaln=True),
    "FlexVAR": flexvar.tiny,
    "Infinity": tiny_infinity,
}


@pytest.fixture(params=KINDS)
def parts(request) -> Any:
    """A model, the condition of three pictures and their maps."""
    model = KINDS[request.param]()
    condition = captions() if request.param == "Infinity" else torch.tensor([1, 4, 0])
    return model, condition, random_maps(model)


@pytest.mark.parametrize("guided", [False, True])
def test_prefill_with_maps_scale_by_scale_and_teacher_forcing_agree(parts, guided):
    model, condition, maps = parts
    sizes = [area_of(side) * model.config.get("bits", 1) for side in model.scales]
    trained = model.teacher_forced(maps, condition).split(sizes, 1)
    null = model.teacher_forced(maps, condition, torch.tensor([False, True, False])).split(sizes, 1)
    for known in range(len(sizes)):
        for k, logits in enumerate(decoded(model, condition, maps, guided, known), known):
            assert logits.shape[:2] == (6 if guided else 3, sizes[k])
            assert (logits[:3] - trained[k]).abs().max() < 1e-11
            assert (null[k][0] - trained[k][0]).abs().max() < 1e-11
            assert not guided or (logits[4] - null[k][1]).abs().max() < 1e-11
    part = model.teacher_forced(maps[:2], condition)
    assert (part - torch.cat(trained[:3], 1)).abs().max() < 1e-11


def test_a_scale_may_be_fed_again_and_what_followed_is_forgotten(parts):
    model, condition, right = parts
    state = model.prefill(condition, batch_size=3, guided=False)
    for k in (1, 2, 3):
        model(state, right[k - 1] + 1, k)
    got = [model(state, right[k - 1], k) for k in (1, 2, 3)]
    assert all(map(torch.equal, got, decoded(model, condition, right, guided=False)[1:]))


def test_half_precision_stays_near_float32(parts):
    model, condition, maps = parts
    model, maps = model.float(), [map.float() for map in maps]
    want = torch.cat(decoded(model, condition, maps), 1)
    got = torch.cat(decoded(model.bfloat16(), condition, maps), 1)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.05 * want.abs().max()
    assert (got - want).abs().mean() < 0.03 * want.abs().mean()


def test_training_reaches_every_weight(parts):
    model, condition, maps = parts
    dropped = torch.tensor([False, True, False])
    model.train().teacher_forced(maps, condition, dropped).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_maps_out_of_turn_are_refused(parts):
    model, condition, maps = parts
    request: Any = dict(batch_size=3, guided=True)
    shapes = [r"\(" + ", ".join(map(str, maps[k].shape)) + r"\)" for k in (1, 0)]
    refuses(ValueError, ".*1.*".join(shapes), model.prefill, condition, **request, maps=maps[1:])
    refuses(ValueError, "4.*stop=4.*4", model.prefill, condition, **request, maps=[*maps, maps[-1]])
    refuses(ValueError, "2.*stop=2", model.prefill, condition, **request, maps=maps[:2], stop=2)
    state = model.prefill(condition, **request)
    refuses(ValueError, "scale 2.*1", model, state, maps[1], 2)
    refuses(ValueError, "scale 0 given", model, state, maps[0], 0)
    refuses(ValueError, f"takes {shapes[1]}", model, state, maps[0].repeat(2, 1, 1, 1), 1)
