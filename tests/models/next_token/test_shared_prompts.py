"""Samples of one prompt, and unconditional rows, share its keys and values: computed once, and the same as alone."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.cached_decoders import case
from tests.helpers.tiny import seeded, tiny_pipeline, tiny_transformer
from visual_spec.models.core.cache import repeats
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

NAMES = ("llamagen", "classes", "janus", "chameleon", "emu3", "glm")


def rows_seen(model: nn.Module) -> list[int]:
    """How many rows each matrix product of the model's first attention layer gets, call by call."""
    seen: list[int] = []
    layer = next(one for path, one in model.named_modules() if path.endswith(("wqkv", "q_proj")))
    layer.register_forward_pre_hook(lambda layer, inputs: seen.append(len(inputs[0])))
    return seen


def made(name: str) -> tuple[Any, nn.Module, Any, int]:
    """A model, its weights, a condition of prompts that stand twice, and the number of samples."""
    twice = torch.tensor([0, 0, 1, 1])
    if name == "classes":
        model: Any = tiny_transformer(num_classes=5, caption_dim=None, prefix_length=1).double()
        return model, model, torch.tensor([1, 1, 3, 3]), 4
    if name == "llamagen":
        model = tiny_transformer().double()
        mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]).bool()
        features = torch.randn(2, 6, 8, generator=seeded(4)[0], dtype=torch.float64)
        return model, model, TextCondition(features[twice], mask[twice]), 4
    model, condition = case(name)
    return model, model.decoder, condition.repeat(2), 8


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("llamagen", "cached_decoder"):
        monkeypatch.setattr(f"visual_spec.models.next_token.{home}.repeats", lambda *parts: None)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_equal_prompts_are_run_once_and_leave_the_state_of_separate_ones(
    name: str, guided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guided and name == "glm":
        pytest.skip("GLM-Image has no unconditional prompt")
    model, weights, condition, count = made(name)
    seen = rows_seen(weights)
    options: Any = dict(batch_size=count, guided=guided, window=3)
    state = model.prefill(condition, **options)
    shared = seen[0]
    one_by_one(monkeypatch)
    seen.clear()
    expected = model.prefill(condition, **options)
    assert shared < seen[0] == count * (1 + guided)
    torch.testing.assert_close(state.logits, expected.logits)
    for one, other in zip(state.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    tokens, slots = torch.zeros(count, 2, dtype=torch.long), torch.arange(2).expand(count, -1)
    torch.testing.assert_close(model(state, tokens, slots), model(expected, tokens, slots))


def test_rows_that_differ_in_anything_are_not_shared() -> None:
    features, mask = torch.zeros(4, 3, 2), torch.ones(4, 3, dtype=torch.bool)
    first, place = repeats(features, mask)  # pyright: ignore
    assert first.tolist() == [0] and place.tolist() == [0, 0, 0, 0]
    mask[2, 0] = False
    first, place = repeats(features, mask)  # pyright: ignore
    assert first.tolist() == [0, 2, 3] and place.tolist() == [0, 0, 1, 2]
    features[1, 0] = 1.0
    assert repeats(features, mask) is None
    assert repeats(features[:1], mask[:1]) is None and repeats(features.to("meta"), mask.to("meta")) is None


def test_pictures_of_one_prompt_are_those_of_separate_calls() -> None:
    pipe = tiny_pipeline(SpeculativeJacobiSampler(4))
    seen = rows_seen(pipe.transformer)
    many = pipe(
        ["a red circle", "a blue square"], num_images_per_prompt=3, generator=seeded(*range(6))
    ).tokens
    assert seen[0] == 3  # two prompts, and the unconditional row
    pipe.sampler = AutoregressiveSampler()
    alone = [
        pipe(prompt, generator=seeded(seed)).tokens
        for seed, prompt in enumerate(["a red circle"] * 3 + ["a blue square"] * 3)
    ]
    assert torch.equal(many, torch.cat(alone))
