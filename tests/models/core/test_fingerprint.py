"""Twelve digits by which weights are known again."""

import torch
from torch import Tensor, nn

from visual_spec.models.core.fingerprint import fingerprint


def network(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 4)


def holder(name: str, weight: Tensor) -> nn.ParameterDict:
    return nn.ParameterDict({name: weight})


def test_it_changes_with_any_weight_and_with_nothing_else():
    one, two = network(), network()
    assert fingerprint([one]) == fingerprint([two]) == fingerprint([two.requires_grad_(False).eval()])
    assert len({fingerprint([one]), fingerprint([one, two]), fingerprint([network(1)])}) == 3
    with torch.no_grad():
        two.bias[3] += 1e-6
    assert fingerprint([one]) != fingerprint([two])


def test_it_tells_names_shapes_and_dtypes_apart():
    modules = [
        holder("a", torch.ones(4)),
        holder("b", torch.ones(4)),
        holder("a", torch.ones(2, 2)),
        holder("a", torch.ones(4).bfloat16()),
    ]
    assert len({fingerprint([module]) for module in modules}) == 4
    assert fingerprint([holder("a", torch.ones(4))]) == fingerprint(modules[:1])
