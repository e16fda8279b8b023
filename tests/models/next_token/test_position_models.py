"""ARPG and LPD: tokens and logits of their public code on tiny weights, and what the room of any-order models asks."""

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import on_meta
from tests.helpers.official import arpg_shapes, lpd_shapes, random_weights
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_transformer
from visual_spec.models.core.position_queries import seen_in_groups
from visual_spec.models.core.protocol import ANY_ORDER
from visual_spec.models.next_token import arpg, lpd
from visual_spec.models.next_token.arpg import load_arpg
from visual_spec.models.next_token.lpd import load_lpd
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.along_order import AlongOrder
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.orders.any_order_speculative import SpeculativeAnyOrderSampler

VOCAB, CLASSES, SIDE = 12, 7, 3
LABELS = torch.tensor([3, 6])
ORDERS = torch.tensor([[4, 0, 8, 2, 6, 1, 7, 3, 5], [8, 7, 1, 0, 2, 6, 3, 5, 4]])
LENGTH = SIDE * SIDE


def tiny(name: str) -> Any:
    if name == "LPD":
        return load_lpd(random_weights(lpd_shapes(), torch.float64), num_heads=2)
    if name == "ARPG":
        weights = random_weights(arpg_shapes(), torch.float64)
        return load_arpg(weights, num_heads=2, image_size=16 * SIDE)
    model: Any = tiny_transformer(
        order="queries", grid_size=SIDE, num_classes=CLASSES, caption_dim=None, prefix_length=1
    ).double()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return model


MODELS = ["LPD", "ARPG", "queries"]


@pytest.fixture(params=MODELS)
def model(request: Any) -> Any:
    return tiny(request.param)


def drawn(seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


# Tokens of the public codes, in hexadecimal (`LPD.sample_tokens` of mit-han-lab/lpd, `Transformer.generate` of
# hp-l33/ARPG), on these weights, labels and orders; ARPG has one order for all pictures. Likeliest tokens, or drawn by
# the noise of the generators 0 and 1 in place of `torch.multinomial`.
# By the sizes of the groups, the guidance, whether it rises from 1, and whether tokens are the likeliest.
LPD = {
    ((1, 2, 3, 3), 4.0, True, True): "333333333 333333333",
    ((1, 2, 3, 3), 4.0, True, False): "538633336 332396335",
    ((1, 2, 3, 3), 3.0, False, True): "333363333 333333336",
    ((1, 2, 3, 3), 3.0, False, False): "638663336 332396335",
    ((1, 2, 3, 3), 1.0, False, True): "333333333 333333333",
    ((1, 2, 3, 3), 1.0, False, False): "538633336 332393335",
    ((1, 1, 1, 1, 1, 1, 1, 1, 1), 4.0, True, True): "333333333 333333333",
    ((1, 1, 1, 1, 1, 1, 1, 1, 1), 4.0, True, False): "538633936 332393335",
    ((1, 1, 1, 1, 1, 1, 1, 1, 1), 3.0, False, True): "333363333 333333336",
    ((1, 1, 1, 1, 1, 1, 1, 1, 1), 3.0, False, False): "638663936 332393335",
    ((1, 1, 1, 1, 1, 1, 1, 1, 1), 1.0, False, True): "333333333 333333333",
    ((1, 1, 1, 1, 1, 1, 1, 1, 1), 1.0, False, False): "538633936 332393335",
    ((1, 8), 4.0, True, True): "333333333 333333333",
    ((1, 8), 4.0, True, False): "538633333 332393335",
    ((1, 8), 1.0, False, True): "333333333 333333333",
    ((1, 8), 1.0, False, False): "538633333 332333335",
}
# By calls, schedule, and as above.
ARPG = {
    (4, "arpg", 4.0, True, True): "8bab8baba 222222222",
    (4, "arpg", 4.0, True, False): "b886a8988 222222212",
    (4, "arpg", 3.0, False, True): "8bab8baba 222222222",
    (4, "arpg", 3.0, False, False): "8b86a89b8 222222212",
    (4, "arpg", 1.0, False, True): "8b7b8b7ba 222222222",
    (4, "arpg", 1.0, False, False): "b886a89b8 2a475461a",
    (4, "arpg-cosine", 4.0, True, True): "8aab8baba 288827888",
    (4, "arpg-cosine", 4.0, True, False): "8886a8982 2a275a272",
    (4, "arpg-cosine", 3.0, False, True): "842181212 177122728",
    (4, "arpg-cosine", 3.0, False, False): "8886a89b2 177822718",
    (4, "arpg-cosine", 1.0, False, True): "8bbb8bbba 288a2a8a8",
    (4, "arpg-cosine", 1.0, False, False): "b886a8986 2a4754218",
    (9, "arpg", 4.0, True, True): "8bab8abba 278725878",
    (9, "arpg", 4.0, True, False): "b286a8856 2a4858a88",
    (9, "arpg", 3.0, False, True): "8bab8abba 1a7b2b7b8",
    (9, "arpg", 3.0, False, False): "8986a8978 1a772b7b8",
    (9, "arpg", 1.0, False, True): "8bab8bbba 2b8a2baa8",
    (9, "arpg", 1.0, False, False): "b886a89b6 2a4754214",
    (2, "arpg-cosine", 4.0, True, True): "8aaa8aaa8 222121122",
    (2, "arpg-cosine", 4.0, True, False): "b286a2926 2a772aa7a",
    (2, "arpg-cosine", 3.0, False, True): "8aaa8aaa8 222122122",
    (2, "arpg-cosine", 3.0, False, False): "8886a8986 2a772aa7a",
    (2, "arpg-cosine", 1.0, False, True): "8aaa8aaa8 222222222",
    (2, "arpg-cosine", 1.0, False, False): "b286a8956 2a4754278",
}


def read(tokens: str) -> list[list[int]]:
    return [[int(token, 16) for token in row] for row in tokens.split()]


@pytest.mark.parametrize(("sizes", "scale", "rises", "greedy"), LPD)
def test_lpd_draws_the_tokens_of_its_public_code(sizes, scale, rises, greedy, monkeypatch):
    monkeypatch.setattr(AnyOrderSampler, "bounds", lambda *_: (0, *accumulate(sizes)))
    law = TokenLaw(guidance_scale=scale, top_k=int(greedy))
    model = tiny("LPD")
    for row, order in enumerate(ORDERS.tolist()):
        sampler = AnyOrderSampler(order, len(sizes), 1.0 if rises else None, "lpd")
        found = sampler(model, LABELS[row : row + 1], law=law, generator=seeded(row)).tokens[0]
        assert found.tolist() == read(LPD[sizes, scale, rises, greedy])[row]


@pytest.mark.parametrize(("calls", "schedule", "scale", "rises", "greedy"), ARPG)
def test_arpg_draws_the_tokens_of_its_public_code(calls, schedule, scale, rises, greedy):
    law = TokenLaw(guidance_scale=scale, top_k=int(greedy))
    sampler = AnyOrderSampler(ORDERS[0].tolist(), calls, 1.0 if rises else None, schedule)
    found = sampler(tiny("ARPG"), LABELS, law=law, generator=seeded(0, 1), batch_size=2).tokens
    assert found.tolist() == read(ARPG[calls, schedule, scale, rises, greedy])


# Logits of the public codes' training: by place, of the codes 0 and 1 of the first picture, and 11 of the second. LPD's
# groups are of 1, 2, 3 and 3 places; ARPG's, in float32, of one.
LOGITS = {
    "LPD": ((1, 2, 3, 3), 1e-8, [[-1.295668409, -1.976026735, -1.425920739],
        [-1.387568132, -2.122951022, -2.38201501],
        [-1.210415145, -2.344547419, -2.080457606],
        [-1.33884154, -2.506946707, -2.087230505],
        [-1.238010012, -2.681525024, -2.1751829],
        [-1.43472295, -2.675100466, -1.977770825],
        [-1.423651513, -3.284288795, -2.315860567],
        [-1.168326501, -3.325002133, -2.398379605],
        [-1.538062155, -2.420488206, -2.290507567]]),
    "ARPG": ((1,) * 9, 1e-5, [[-0.619239092, -0.084779449, -1.566313148],
        [-0.601839721, -0.628596485, -1.692739725],
        [-0.567078173, 0.463486999, -1.218497396],
        [0.33660838, -0.470276922, -0.265713364],
        [1.029770494, -0.368853837, 0.647799134],
        [1.165835381, -0.628738344, -0.46033144],
        [1.067321897, -0.651199758, -0.315904289],
        [1.04859066, -0.473301381, -0.866615295],
        [1.016711712, -0.757242978, -0.750831127]]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGITS)
def test_calls_give_the_logits_of_public_training(name):
    sizes, close, want = LOGITS[name]
    along = AlongOrder(tiny(name), ORDERS)
    state = along.prefill(LABELS, batch_size=2, guided=False, window=LENGTH)
    by_place, found = drawn().gather(1, ORDERS), [state.logits]
    bounds = [0, *accumulate(sizes)]
    for before, now, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        places = torch.arange(before, after).expand(2, -1)
        known = places.clamp(max=now)
        logits = along.ask(state, by_place[:, before:now], places, known, together=True)
        found.append(logits[:, now - before :])
    logits = torch.cat(found, 1)
    ours = torch.stack([*logits[0, :, :2].unbind(-1), logits[1, :, 11]], 1)
    assert (ours - torch.tensor(want, dtype=torch.float64)).abs().max() < close


def test_one_pass_of_groups_is_what_calls_give():
    """And no other position: gradients flow to all parameters, and a dropped class is the one of guidance."""
    model, tokens, sizes = tiny("queries"), drawn(), (1, 2, 3, 3)
    groups = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    dropped = torch.tensor([False, True])
    logits = model.teacher_forced_in_groups(tokens, ORDERS, groups, LABELS, dropped)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    along = AlongOrder(model, ORDERS)
    state = along.prefill(LABELS, batch_size=2, guided=True, window=LENGTH)
    by_place, found, bounds = tokens.gather(1, ORDERS), [state.logits], [0, *accumulate(sizes)]
    for before, now, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        places = torch.arange(before, after).expand(2, -1)
        asked = along.ask(state, by_place[:, before:now], places, places.clamp(max=now), together=True)
        found.append(asked[:, now - before :])
    assert (logits - torch.cat(found, 1)[[0, 3]]).abs().max() < 1e-12 * logits.abs().max()


def test_groups_see_what_was_fed_before_and_one_another():
    """By hand, two groups of one and two places: tokens 0, 1, 2, then queries."""
    seen = seen_in_groups(torch.tensor([0, 1, 1]))
    rows = ["100000", "111000", "111000", "000100", "100011", "100011"]
    assert seen.int().tolist() == [[int(one) for one in row] for row in rows]


@pytest.mark.parametrize("width", [1, 3, LENGTH - 1])
def test_rejected_tokens_are_fed_again(model, width):
    """A window gives what one place a call does, also after wrong drafts."""
    by_place = drawn().gather(1, ORDERS)

    def logits_by(width: int, wrong: bool) -> Tensor:
        along = AlongOrder(model, ORDERS)
        state = along.prefill(LABELS, batch_size=2, guided=True, window=LENGTH)
        found = [state.logits[:, :1]]
        for first in range(0, LENGTH - 1, width):
            places = torch.arange(first, min(first + width, LENGTH - 1)).expand(2, -1)
            if wrong:
                along(state, (by_place.gather(1, places) + 1) % VOCAB, places)
            found.append(along(state, by_place.gather(1, places), places))
        return torch.cat(found, 1)

    want = logits_by(1, False)
    assert want.std() > 0.1
    assert (logits_by(width, True) - want).abs().max() < 1e-12 * want.abs().max()


@pytest.mark.parametrize("acceptance", ["identical", "exact"])
@pytest.mark.parametrize("order", ["random", "locality"])
def test_speculation_keeps_the_tokens_of_one_a_call(model, order, acceptance):
    law = TokenLaw(guidance_scale=1.5, top_k=4 if acceptance == "identical" else 1)
    plain, fast = (
        sampler(model, LABELS, law=law, generator=seeded(0, 1), batch_size=2)
        for sampler in (AnyOrderSampler(order), SpeculativeAnyOrderSampler(3, order, acceptance))
    )
    assert torch.equal(plain.tokens, fast.tokens) and fast.trace.target_calls.sum() < 2 * LENGTH


@pytest.mark.parametrize(
    "sampler",
    [
        AnyOrderSampler("random", 4),
        AnyOrderSampler("locality", 4, 1.0, "lpd", 1),
        AnyOrderSampler("random", 4, 1.0, "arpg"),
    ],
    ids=["randar", "lpd", "arpg"],
)
def test_a_picture_does_not_depend_on_its_batch(model, sampler):
    """Neither on the others, nor on what they know."""
    known = torch.full((3, LENGTH), -1)
    known[1, [0, 3, 6]], known[2, 1:] = torch.tensor([2, 0, 1]), torch.arange(8)
    labels, law = torch.tensor([3, 6, 1]), TokenLaw(guidance_scale=2.0)
    for given in (None, known):
        whole = sampler(
            model, labels, law=law, generator=seeded(0, 1, 2), batch_size=3, known_tokens=given
        ).tokens
        for row in range(3):
            own = None if given is None else given[row : row + 1]
            alone = sampler(
                model, labels[row : row + 1], law=law, generator=seeded(row), known_tokens=own
            ).tokens
            assert torch.equal(alone[0], whole[row])
        if given is not None:
            assert torch.equal(whole[given >= 0], given[given >= 0])


def test_places_of_the_first_call_are_drawn_together():
    """ARPG's schedule asks for two of nine; a RandAR's second instruction sees the first, an LPD's both see both."""
    for order in ("any", "queries"):
        model: Any = tiny_transformer(
            order=order, grid_size=SIDE, num_classes=CLASSES, caption_dim=None, prefix_length=1
        ).double()
        for parameter in model.parameters():
            parameter.data.mul_(2)
        asked = torch.tensor([[4, 0]])
        given: dict[str, Any] = dict(batch_size=1, guided=False, window=2, asked=asked)
        one, two = (
            model.prefill(LABELS[:1], **given, together=together).logits[0] for together in (False, True)
        )
        assert torch.equal(one[0], two[0]) == (order == "any") and not torch.equal(one[1], two[1])


@pytest.mark.parametrize("name", ["L", "XL", "XXL"])
def test_no_key_is_missing_or_left_over(name):
    layers, dim = {"L": (24, 1024), "XL": (36, 1280), "XXL": (48, 1536)}[name]
    for load, module, shapes in [
        (load_arpg, arpg, arpg_shapes(layers, dim, 16384, 1000)),
        (load_lpd, lpd, lpd_shapes(layers, dim, 16384, 1000, 16)),
    ]:
        file = on_meta(shapes)
        model: Any = load(file)
        assert module.name_of(file) == f"{module.__name__.split('.')[-1].upper()}-{name}"
        assert sum(parameter.numel() for parameter in model.parameters()) == sum(
            map(math.prod, shapes.values())
        )
        assert model.trained_order == ANY_ORDER and model.config["num_classes"] == 1000


@pytest.mark.parametrize(
    ("load", "shapes"), [(load_arpg, arpg_shapes()), (load_lpd, lpd_shapes())], ids=["ARPG", "LPD"]
)
def test_files_that_do_not_fit_are_refused(load, shapes):
    weights = random_weights(shapes)
    refuses(ValueError, "pass num_heads", load, weights)
    for key in shapes:
        with pytest.raises(ValueError, match=r"no (ARPG|LPD)|missing|lacks"):
            load({name: value for name, value in weights.items() if name != key}, num_heads=2)
    refuses(ValueError, "other.weight", load, weights | {"other.weight": torch.zeros(1)}, num_heads=2)
    refuses(ValueError, "image_size=20", load, weights, num_heads=2, image_size=20)


def test_what_no_call_can_answer_is_refused(model):
    refuses(ValueError, "asked", model.prefill, LABELS, batch_size=2, guided=False, window=1)
    state = model.prefill(LABELS, batch_size=2, guided=False, window=1, asked=torch.tensor([[0], [1]]))
    refuses(ValueError, "seen", model, state, LABELS[:, None], LABELS[:, None])
    with pytest.raises(ValueError, match="labels"):
        model.prefill(LABELS + 1, batch_size=2, guided=False, window=1, asked=LABELS[:, None])
