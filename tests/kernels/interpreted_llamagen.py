"""LlamaGen by the kernels of its layers, in Triton's interpreter; tests/models/next_token runs this file."""

from typing import Any

import pytest
import torch

from tests.helpers.mended_interpreter import mend
from tests.helpers.tiny import tiny_transformer
from visual_spec.eval.measure import weight_bytes_per_call
from visual_spec.kernels import launch, layers, project, rotary_write, window_attention
from visual_spec.models.core.projections import fuse_projections
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

KERNELS = {
    "add_norm": layers,
    "gated": layers,
    "project": project,
    "rotary_write": rotary_write,
    "window_attention": window_attention,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Take the path of a GPU from here on, by the kernels themselves. Counts which of them ran."""
    counts: dict[str, int] = {}

    def watched(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*args)

        return call

    for name, module in KERNELS.items():
        monkeypatch.setattr(module, f"{name}_triton", watched(name, getattr(module, f"{name}_triton")))
    for module in (launch, *KERNELS.values()):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True, raising=False)
    monkeypatch.setattr(window_attention, "_SPLIT", 8)
    monkeypatch.setattr(window_attention, "_TILES", {2: (64, 8, 4), 4: (16, 8, 4)})
    return counts


def calls(model: Any, condition: TextCondition, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of a prompt, of windows that go back at their own pace, of a tree, and of slots in any order."""
    draw = torch.Generator().manual_seed(1)
    features = condition.features.to(dtype)
    state = model.prefill(TextCondition(features, condition.mask), batch_size=2, guided=True, window=4)
    found = [state.logits]
    for slots in ([[0, 1, 2, 3], [0, 1, 2, 3]], [[14, 15, 16, 17], [1, 2, 3, 4]]):
        tokens = torch.randint(0, 12, (2, 4), generator=draw)
        found.append(model(state, tokens, torch.tensor(slots)))
    tokens = torch.randint(0, 12, (2, 3), generator=draw)
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(2, -1, -1)
    found.append(model(state, tokens, torch.tensor([[9, 10, 10], [3, 4, 4]]), visible))
    seen = torch.rand(2, 3, 16, generator=draw) > 0.5
    found.append(model(state, tokens, torch.tensor([[9, 2, 7], [4, 1, 3]]), seen=seen))
    return found


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("joined", [None, False, True])
def test_calls_equal_those_in_double_precision(request, joined):
    model: Any = tiny_transformer(num_layers=1)
    mask = torch.arange(6) >= torch.tensor([[2], [0]])
    condition = TextCondition(torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)), mask)
    expected = calls(model.double(), condition, torch.float64)
    model.float()
    if joined is not None:
        fuse_projections(model, kernel=joined)
    counts = request.getfixturevalue("launched")
    for found, exact in zip(calls(model, condition, torch.float32), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    # Of one layer, in five calls; attention not for the tree, nor for any order. With the head five linear layers.
    others = {"project": 25, "add_norm": 5} if joined else {"gated": 5, "add_norm": 10}
    assert counts == {"rotary_write": 5, "window_attention": 3, **others}


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch, launched: dict[str, int]) -> tuple[Any, TextCondition]:
    """A model with one order of sums, in bfloat16, and a caption."""
    mend(monkeypatch)
    for tiles in ("_TILES", "_GATED"):  # few programs, of two widths
        monkeypatch.setattr(project, tiles, dict.fromkeys((2, 4), {16: (128, 1), 64: (128, 1)}))
    model: Any = tiny_transformer(dim=72, num_heads=2, num_layers=1).bfloat16()
    fuse_projections(model, kernel=True)
    features = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    return model, TextCondition(features.bfloat16(), torch.ones(1, 6, dtype=torch.bool))


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_has_the_bits_of_calls_of_one_token(ordered, dtype):
    model, condition = ordered
    model, condition = model.to(dtype), TextCondition(condition.features.to(dtype), condition.mask)
    tokens = torch.randint(0, 12, (1, 16), generator=torch.Generator().manual_seed(1))
    slots = torch.arange(16)[None]
    with torch.no_grad():
        state = model.prefill(condition, batch_size=1, guided=True, window=16)
        alone = [model(state, tokens[:, slot : slot + 1], slots[:, slot : slot + 1]) for slot in range(16)]
        for width in (2, 16):
            state = model.prefill(condition, batch_size=1, guided=True, window=16)
            wide = [
                model(state, *(one[:, start : start + width] for one in (tokens, slots)))
                for start in range(0, 16, width)
            ]
            assert torch.equal(torch.cat(wide, 1), torch.cat(alone, 1))


def test_weights_count_that_a_kernel_reads(ordered):
    model, condition = ordered
    with torch.no_grad():
        state = model.prefill(condition, batch_size=1, guided=True, window=2)
        slots = torch.arange(2)[None]
        found = weight_bytes_per_call(model, lambda: model(state, slots, slots))
    read = [*model.layers.parameters(), *model.norm.parameters(), *model.output.parameters()]
    assert found == sum(one.numel() * 2 for one in read)


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("window", [16, 4, 1])
def test_tokens_in_bfloat16_are_those_of_plain_decoding(ordered, launched, window):
    model, condition = ordered

    def decode(sampler: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        return sampler(model, condition, law=TokenLaw(guidance_scale=2.0), generator=generator, batch_size=1)

    expected = decode(AutoregressiveSampler())
    found = decode(SpeculativeJacobiSampler(window, acceptance="identical"))
    assert torch.equal(found.tokens, expected.tokens) and launched["project"] > 0
    assert window == 1 or found.trace.target_calls.max() < expected.trace.target_calls.max()
