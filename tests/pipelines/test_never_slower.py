"""Where nobody can guess a model's tokens, `accelerate` falls back to plain decoding, says so once, and keeps them."""

import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import visual_spec
from visual_spec.samplers.raster.window import WindowPolicy

VOCAB, WIDTH, TOKENS = 512, 64, 200


def chain() -> Any:
    """A model that writes token after token of one cycle through its vocabulary, and often leaves it: the best guess at
    a slot needs the token before, which no window knows beforehand."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
        )
    ).eval()
    tokens, cycle = model.model.embed_tokens.weight.data, torch.randperm(VOCAB)
    tokens.normal_()
    model.lm_head.weight.data[cycle.roll(-1)] = tokens[cycle] * (9 / WIDTH)
    return model


@pytest.mark.parametrize("price", [0.05, 0.3], ids="slot at {} of a call".format)
def test_it_costs_at_most_a_tenth_more(price, monkeypatch, caplog):
    model, spent = chain(), list[float]()
    learn = WindowPolicy.saw

    def saw(self, width, committed, seconds):  # seconds of a machine where a call takes 1 and `price` a slot
        spent.append((1 + price * width) / (1 + price))
        learn(self, width, committed, spent[-1])

    monkeypatch.setattr(WindowPolicy, "saw", saw)
    asked: dict[str, Any] = dict(do_sample=True, top_k=0, max_new_tokens=TOKENS, eos_token_id=None)
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    torch.manual_seed(7)
    wanted = model.generate(prompt, **asked)
    visual_spec.accelerate(model, codes=(0, VOCAB))
    with caplog.at_level(logging.WARNING, "visual_spec"):
        torch.manual_seed(7)
        assert torch.equal(model.generate(prompt, **asked), wanted)
        assert sum(spent) <= 1.1 * TOKENS
        spent.clear()
        model.generate(prompt, **asked)  # what was learnt lasts
        assert sum(spent) <= 1.05 * TOKENS
    said = [record.message.split(":")[0] for record in caplog.records]
    assert said == ["No window pays on this model at this batch size"]
    # A window of fixed width is what the fallback saves from.
    visual_spec.accelerate(model, "speculative-jacobi:window=8", codes=(0, VOCAB))
    model.generate(prompt, **asked | dict(max_new_tokens=50))
    assert int(model.last_trace.target_calls) > 40
