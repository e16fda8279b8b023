"""Adapters of transformers models by the kernels of window attention, in Triton's interpreter; tests/models runs it."""

from typing import Any

import pytest
import torch

from tests.helpers.cached_decoders import case, rows_of, text
from visual_spec.kernels import launch, window_attention
from visual_spec.models.core import cache as core_cache
from visual_spec.models.next_token import cached_decoder


def calls(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of prompts of two lengths, of windows that go back at their own pace and pass a row end, and of a tree."""
    model, condition = case(name, dtype)
    tokens = text(model, 2)
    state = model.prefill(
        rows_of(condition, [0, 3]), batch_size=2, guided=condition.unconditional is not None, window=4
    )
    found = [state.logits]
    with pytest.MonkeyPatch.context() as patch:
        for module in (cached_decoder, core_cache):  # windows of a GPU, whose shapes cover the worst case
            patch.setattr(module, "on_host", lambda tensor: False)
        for slots in ([[0, 1, 2, 3], [0, 1, 2, 3]], [[3, 4, 5, 6], [1, 2, 3, 4]]):
            places = torch.tensor(slots).clamp_max(model.grid.num_tokens - 1)
            found.append(model(state, tokens[:, :4], places))
    visible = torch.tensor([[1, 0], [1, 1]]).bool().expand(2, -1, -1)
    found.append(model(state, tokens[:, :2], torch.tensor([[4, 5], [2, 3]]), visible))
    return found


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("name", ["emu3", "glm small"])
def test_calls_equal_those_by_a_mask_in_double_precision(monkeypatch, name):
    expected = calls(name, torch.float64)
    model: Any = case(name, torch.float32)[0]
    before = model._attention
    ran: list[int] = []
    kernel = window_attention.window_attention_triton

    def watched(*args: Any) -> torch.Tensor:
        ran.append(args[0].shape[1])
        return kernel(*args)

    monkeypatch.setattr(window_attention, "window_attention_triton", watched)
    for module in (launch, window_attention):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(window_attention, "_SPLIT", 64)
    monkeypatch.setattr(window_attention, "_TILES", {4: (16, 32, 4)})
    for found, exact in zip(calls(name, torch.float32), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-4)
    assert len(ran) == 3 * model.decoder.config.num_hidden_layers  # in all calls but that of the tree
    assert model._attention == before
