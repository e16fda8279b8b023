"""Models of continuous tokens that are real but tiny and random: 4 x 4 tokens of 3 numbers, 5 classes."""

from typing import Any

import torch

from visual_spec.models.continuous.causal import CausalContinuousTransformer
from visual_spec.models.continuous.mar import MARTransformer
from visual_spec.prototype.acdit.model import ACDiTTransformer
from visual_spec.prototype.flowar.model import FlowARTransformer

SIZES: dict[str, Any] = dict(
    grid_size=4, token_dim=3, dim=16, num_layers=2, num_heads=2, head_width=12, head_depth=2, num_classes=5
)


def tiny_mar(**changes: Any) -> MARTransformer:
    torch.manual_seed(0)
    return _random(MARTransformer(**{**SIZES, "buffer_size": 3, **changes}))


def tiny_causal(**changes: Any) -> CausalContinuousTransformer:
    torch.manual_seed(0)
    return _random(CausalContinuousTransformer(**{**SIZES, "prefix_length": 2, **changes}))


def tiny_flowar(**changes: Any) -> FlowARTransformer:
    """Maps of 1, 2 and 4 places a side."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(grid_size=4, token_dim=3, dim=16, num_layers=2, num_heads=2, num_classes=5)
    return _random(FlowARTransformer(**{**sizes, "flow_width": 64, "flow_depth": 1, **changes}))


def released_flowar(model: FlowARTransformer) -> dict[str, torch.Tensor]:
    """A state dict with what the released ones hold beside the weights."""
    computed = {
        f"{name}.rope.freqs": torch.ones(2) for name, _ in model.named_modules() if name.endswith("attn")
    }
    return {**model.state_dict(), **computed, "mask": torch.zeros(1, 1, 21, 21)}


def tiny_acdit(**changes: Any) -> ACDiTTransformer:
    """Blocks of 2 x 2 of 4 x 4 tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        grid_size=4, token_dim=3, block_size=4, dim=16, num_layers=2, num_heads=2, num_classes=5
    )
    return _random(ACDiTTransformer(**{**sizes, **changes}))


def _random(model: Any) -> Any:
    """Every weight differs from every other one, so that none can stand in for another."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def calm(model: Any, size: float = 0.1) -> Any:
    """The same in float64, with a head that says so little that tokens stay of order one."""
    with torch.no_grad():
        for parameter in model.head.final_layer.linear.parameters():
            parameter.mul_(size)
    return model.double()


class Trap:
    """What pickle would run on loading."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "ran", True)
