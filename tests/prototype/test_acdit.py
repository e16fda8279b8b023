"""ACDiT: numbers of the public code (thunlp/ACDiT at 135ff06), its cache, what each token sees, and what it refuses."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.models.continuous.tiny import tiny_acdit
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.acdit.model import ACDiTTransformer, block_places
from visual_spec.prototype.acdit.sampler import BlockDiffusionSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise

# Outputs of the public code on the weights of `recorded`, float32: every fourth (second) token of the second sample by
# its `forward`, and the first number of each token in raster order by its `sample` with 4 levels and guidance 1.5.
PICTURE: dict[str, Any] = dict(
    sizes=dict(grid_size=4, block_size=4),
    forward=[
        0.39874345, -0.10672081, -0.07414591, 0.29301149, -0.45287836, 0.38154584, 0.06433634, -0.80058408, 0.67778945,
        0.45435360, -0.20422032, 0.23142703,
    ],
    drawn=[
        -74.672325, -278.143646, -249.775345, 157.413635, 51.698872, -13.339306, -200.191833, -164.943161, 213.533020,
        245.436752, 134.121628, -204.395569, 87.383949, -58.919998, -119.203812, -58.245346,
    ],
)  # fmt: skip
CLIP: dict[str, Any] = dict(
    sizes=dict(grid_size=2, frames=2, block_size=4, axis_shares=[2, 1, 1]),
    forward=[
        0.38233578, -0.30569735, 0.20518368, -0.03298709, -0.88912487, 0.67201173, 0.48655698, -0.29778031, 0.15838823,
        0.26511100, -0.68131149, 0.34497347,
    ],
    drawn=[
        -75.163246, -278.141174, 51.140755, -15.539050, -249.326508, 155.407379, -201.159470, -165.181824,
    ],
)  # fmt: skip


def recorded(**sizes: Any) -> ACDiTTransformer:
    """A model with the weights that the public code had: each drawn from the letters of its name."""
    model = ACDiTTransformer(token_dim=3, dim=128, num_layers=2, num_heads=2, num_classes=5, **sizes)
    made = {}
    for key, value in model.state_dict().items():
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(sum(map(ord, key))))
        scale = value.shape[-1] ** 0.5 if value.ndim > 1 else 2.0
        made[key] = 1 + 0.1 * drawn if "norm" in key else 0.5 * drawn / scale
    model.load_state_dict(made)
    return model.eval()


class GivenNoise(CounterNoise):
    """Noise [B, L, d] by place."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(torch.arange(len(values)), values.device)
        self.values = values

    def normal(self, slots: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.values.gather(1, slots[..., None].expand(-1, -1, self.values.shape[2]))


@pytest.mark.parametrize("case", [PICTURE, CLIP], ids=["picture", "clip"])
@torch.no_grad()
def test_a_training_pass_gives_the_numbers_of_the_public_code(case):
    model = recorded(**case["sizes"])
    length = model.grid.num_tokens
    generator = torch.Generator().manual_seed(2)
    clean, noisy = (torch.randn(2, length, 3, generator=generator) for _ in range(2))
    times = torch.tensor([[999, 400, 30, 0], [5, 700, 250, 120]])[:, : model.num_blocks]
    output = model.predictions(clean, noisy, times, torch.tensor([4, 1]))
    wanted = torch.tensor(case["forward"])
    torch.testing.assert_close(output[1, :: length // 4].flatten(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("case", [PICTURE, CLIP], ids=["picture", "clip"])
def test_the_sampler_draws_the_numbers_of_the_public_code(case):
    model = recorded(**case["sizes"])
    generator = torch.Generator().manual_seed(3)
    blocks = [torch.randn(2, 1, model.block_size, 3, generator=generator) for _ in range(model.num_blocks)]
    by_slot = torch.cat(blocks, 1).flatten(1, 2)
    noise = torch.empty_like(by_slot).index_copy_(1, model.places, by_slot)
    result = BlockDiffusionSampler(levels=4)(
        model,
        torch.tensor([4, 1]),
        law=TokenLaw(guidance_scale=1.5),
        generator=GivenNoise(noise),
        batch_size=2,
    )
    torch.testing.assert_close(result.tokens[1, :, 0], torch.tensor(case["drawn"]), rtol=2e-5, atol=1e-3)


# -- the cache --------------------------------------------------------------------------------------------------------


def straight(model: ACDiTTransformer, clean: Tensor, noisy: Tensor, time: float, label: int) -> Tensor:
    """The prediction [n, d] at one noisy block, given all clean tokens before it [S, d]: no cache, token by token."""
    w, config = model.state_dict(), model.config
    heads, n, count = config["num_heads"], model.block_size, len(clean)

    def rms(name: str, x: Tensor) -> Tensor:
        return w[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    steps = torch.arange(128, dtype=torch.float64) / 128
    angles = time * torch.exp(-math.log(10000) * steps)
    embedded = F.silu(linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()])))
    condition = F.silu(linear("t_embedder.mlp.2", embedded) + w["y_embedder.embedding_table.weight"][label])
    x = linear("x_embedder", torch.cat([clean, noisy]))  # [S + n, dim]
    turns = model.rotary()[:, : count + n]
    index = torch.arange(count + n) // n
    sees = (index <= index[:, None]) & ((index[:, None] == count // n) | (index < count // n))

    def turned(part: Tensor) -> Tensor:
        half = part.shape[-1] // 2
        return part * turns[0] + torch.cat([-part[..., half:], part[..., :half]], -1) * turns[1]

    for layer in range(config["num_layers"]):
        name = f"blocks.{layer}"
        moved = linear(f"{name}.adaLN_modulation.1", condition).view(6, -1).clone()
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            torch.cat([torch.full((count, len(one)), still), one.expand(n, -1)])
            for one, still in zip(moved, (0.0, 0.0, 1.0, 0.0, 0.0, 1.0), strict=True)
        )
        hidden = rms(f"{name}.norm1", x) * (1 + scale1) + shift1
        q, k, v = linear(f"{name}.attn.qkv", hidden).view(count + n, 3, heads, -1).permute(1, 2, 0, 3)
        q, k = turned(rms(f"{name}.attn.q_norm", q)), turned(rms(f"{name}.attn.k_norm", k))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~sees, -math.inf).softmax(-1)
        x = x + gate1 * linear(f"{name}.attn.proj", (scores @ v).transpose(0, 1).flatten(1))
        hidden = linear(f"{name}.mlp.fc1", rms(f"{name}.norm2", x) * (1 + scale2) + shift2)
        x = x + gate2 * linear(f"{name}.mlp.fc2", F.gelu(hidden, approximate="tanh"))
    shift, scale = linear("final_layer.adaLN_modulation.1", condition).view(2, -1)
    return linear("final_layer.linear", rms("final_layer.norm_final", x[count:]) * (1 + scale) + shift)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@torch.no_grad()
def test_kept_keys_and_values_are_those_of_a_full_computation(block_size):
    """In every call of every block, with guidance: float64."""
    model = tiny_acdit(block_size=block_size).double()
    generator = torch.Generator().manual_seed(1)
    clean = torch.randn(2, 16, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([3, 0])
    state = model.prefill(labels, batch_size=2, guided=True, window=1)
    for block in range(model.num_blocks):
        start = block * block_size
        for call, time in enumerate((900.0, 31.5)):
            noisy = torch.randn(2, block_size, 3, generator=generator, dtype=torch.float64)
            before = clean[:, start - block_size : start] if block and not call else None
            output = model(state, noisy, time, block, before)
            for row, (sample, label) in enumerate([(0, 3), (1, 0), (0, 5), (1, 5)]):
                wanted = straight(model, clean[sample, :start], noisy[sample], time, label)
                torch.testing.assert_close(output[row], wanted, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_training_pass_is_what_the_cache_computes():
    model = tiny_acdit().double()
    generator = torch.Generator().manual_seed(1)
    clean, noisy = (torch.randn(2, 16, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    times, labels = torch.tensor([[10, 500, 999, 3], [7, 7, 0, 800]]), torch.tensor([4, 2])
    output = model.predictions(clean, noisy, times, labels).unflatten(1, (4, 4))
    for sample, block in ((0, 0), (0, 3), (1, 1), (1, 2)):
        wanted = straight(
            model, clean[sample, : 4 * block], noisy[sample, 4 * block : 4 * block + 4],
            float(times[sample, block]), int(labels[sample]),
        )  # fmt: skip
        torch.testing.assert_close(output[sample, block], wanted, rtol=0, atol=1e-12)


def test_a_noisy_block_sees_itself_and_the_clean_blocks_before_it():
    model = tiny_acdit().double()
    clean, noisy = (torch.randn(1, 16, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    output = model.predictions(clean, noisy, torch.tensor([[1, 2, 3, 4]]), torch.tensor([0]))
    for block in range(4):
        of_clean, of_noisy = torch.autograd.grad(
            output[0, 4 * block + 1].sum(), (clean, noisy), retain_graph=True, materialize_grads=True
        )
        moved = [(part[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist() for part in (of_clean, of_noisy)]
        assert moved == [[*range(4 * block)], [*range(4 * block, 4 * block + 4)]]


def test_blocks_of_pictures_are_squares_and_blocks_of_clips_are_runs():
    assert block_places(TokenGrid(4, 4), 4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert block_places(TokenGrid(2, 2, 2), 4).tolist() == [*range(8)]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 8}, "block_size=8.*4 x 4.*1, 4, 16"),
        ({"block_size": 9}, "block_size=9.*picture"),
        ({"block_size": 12, "frames": 2}, "block_size=12.*32"),
        ({"num_heads": 3}, "dim=16, num_heads=3"),
        ({"axis_shares": [1, 2]}, r"axis_shares=\(1, 2\).*8"),
        ({"axis_shares": [0, 1]}, r"axis_shares=\[0, 1\]; pass"),
        ({"axis_shares": [2, 1, 1]}, "2 axes"),
        ({"prediction": "sample"}, "prediction='sample'; pass"),
        ({"block_size": 0}, "block_size=0; pass"),
    ],
)  # fmt: skip
def test_sizes_that_make_no_model_are_refused(changes, message):
    refuses(ValueError, message, tiny_acdit, **changes)


def test_labels_of_no_class_are_refused():
    with pytest.raises(ValueError, match=r"\[5\].*1.*0.*4"):
        tiny_acdit().prefill(torch.tensor([5]), batch_size=1, guided=False, window=1)
