"""Texts of several caches in one call, against a call for each."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from tests.helpers.tiny_speech import tiny_vibevoice
from visual_spec.models.continuous import joined_cache
from visual_spec.models.continuous.joined_cache import JoinedCache, joined_mask
from visual_spec.models.core.transformers_cache import CACHE

LENGTHS = (5, 0, 2)  # of three texts of two rows


class Texts:
    """Three texts in caches of their own, and what the decoder says of their next tokens."""

    def __init__(self) -> None:
        self.decoder = tiny_vibevoice().model.language_model
        self.generator = torch.Generator().manual_seed(3)
        self.masks = [torch.ones(2, length, dtype=torch.long) for length in LENGTHS]
        self.masks[0][0, :2] = 0  # padded on the left
        self.caches: list[Any] = [DynamicCache(config=self.decoder.config) for _ in LENGTHS]
        for cache, mask in zip(self.caches, self.masks, strict=True):
            if mask.shape[1]:
                self.feed(cache, mask, self.random(mask.shape[1]))

    def random(self, tokens: int = 1) -> Tensor:
        return torch.randn(2, tokens, 32, generator=self.generator).double()

    def feed(self, cache: Any, mask: Tensor, embeds: Tensor) -> Tensor:
        with torch.no_grad():
            return self.decoder(
                inputs_embeds=embeds, attention_mask=mask, use_cache=True, **{CACHE: cache}
            ).last_hidden_state

    def longer(self, number: int) -> Tensor:
        return torch.nn.functional.pad(self.masks[number], (0, 1), value=1)

    def alone(self, number: int, embeds: Tensor) -> Tensor:
        """A step of one text by itself."""
        out = self.feed(self.caches[number], self.longer(number), embeds)
        self.masks[number] = self.longer(number)
        return out

    def together(self, joined: JoinedCache, embeds: list[Tensor], keep: tuple[int, ...]) -> list[Tensor]:
        size = joined.begin()
        masks = [self.longer(number) for number in range(3)]
        positions = [torch.full((2, 1), cache.get_seq_length()) for cache in self.caches]
        with torch.no_grad():
            hidden = self.decoder(
                inputs_embeds=torch.cat(embeds),
                attention_mask=joined_mask(masks, size),
                position_ids=torch.cat(positions),
                use_cache=True,
                **{CACHE: joined},
            ).last_hidden_state
        for number in keep:
            joined.keep(number)
            self.masks[number] = masks[number]
        return list(hidden.chunk(3))


@pytest.fixture(params=[256, 1], ids=["roomy", "growing"])
def room(request, monkeypatch):
    monkeypatch.setattr(joined_cache, "_LEAST", request.param)


def test_a_joint_call_is_a_call_of_each_and_what_is_not_kept_is_undone(room):
    one, many = Texts(), Texts()
    joined = JoinedCache(many.caches)
    for keep in [(0, 1, 2), (0,), (0, 2), (0, 1), (0, 1, 2), (0, 2), (0, 1, 2)]:
        embeds = [one.random() for _ in LENGTHS]
        found = many.together(joined, embeds, keep)
        for number in keep:
            torch.testing.assert_close(
                found[number], one.alone(number, embeds[number]), rtol=1e-10, atol=1e-10
            )
    for mine, theirs in zip(many.caches, one.caches, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length()
        for layer, other in zip(mine.layers, theirs.layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(layer.values, other.values, rtol=1e-10, atol=1e-10)


def test_a_cache_changed_from_outside_is_taken_over(room):
    one, many = Texts(), Texts()
    joined = JoinedCache(many.caches)
    for step in range(6):
        embeds = [one.random() for _ in LENGTHS]
        want = [one.alone(number, embeds[number]) for number in range(3)]
        if step % 3 == 2:  # a call of each by itself
            found = [many.alone(number, embeds[number]) for number in range(3)]
        else:
            found = many.together(joined, embeds, (0, 1, 2))
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
        for texts in (one, many):  # in place, as VibeVoice does where audio starts anew
            texts.caches[1].layers[0].keys[1, :, -1:] = 0.5


def test_release_leaves_the_first_cache_memory_of_its_own():
    texts = Texts()
    joined = JoinedCache(texts.caches)
    texts.together(joined, [texts.random() for _ in LENGTHS], (0, 1, 2))
    layer = texts.caches[0].layers[1]
    before = layer.keys.clone()
    joined.release()
    assert layer.keys.equal(before) and layer.keys.untyped_storage().nbytes() == before.nbytes
    assert texts.alone(0, texts.random()).isfinite().all() and layer.keys.shape[2] == LENGTHS[0] + 2


def test_what_can_be_joined():
    decoder = tiny_vibevoice().model.language_model
    sliding = tiny_vibevoice(
        use_sliding_window=True, sliding_window=4, max_window_layers=1
    ).config.text_config
    assert JoinedCache.joinable(DynamicCache(config=decoder.config))
    assert not JoinedCache.joinable(StaticCache(config=decoder.config, max_cache_len=8))
    assert not JoinedCache.joinable(DynamicCache(config=sliding))
    assert not JoinedCache.joinable(None)
