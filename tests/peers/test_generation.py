"""Cases of transformers' `GenerationTesterMixin`: once by its own `generate`, once by that of an accelerated model.

Restated from huggingface/transformers, `tests/generation/test_utils.py`, whose tests are not in its wheel. Every case
holds for both; where it compares ids, they are those of transformers under a processor that allows codes only.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

import visual_spec
from tests.models.next_token.tiny_languages import CODES, END, language_model, texts

pytestmark = pytest.mark.peers
MODELS = {name: language_model(name) for name in ("llama", "qwen3", "gpt2")}


class OnlyCodes(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, CODES[0] : END + 1] = scores[:, CODES[0] : END + 1]
        return kept


@pytest.fixture(params=MODELS)
def model(request: Any) -> Any:
    return MODELS[request.param]


@pytest.fixture(params=["plainly", "plain loop", "window"])
def generate(request: Any, model: Any) -> Iterator[Callable[..., Any]]:
    """`generate` of the model: its own, or after `accelerate`."""
    if request.param == "plainly":
        yield lambda **given: model.generate(
            logits_processor=LogitsProcessorList([OnlyCodes()]), **{"eos_token_id": END} | given
        )
        return
    sampler = "autoregressive" if request.param == "plain loop" else "speculative-jacobi:window=6"
    visual_spec.accelerate(model, sampler, codes=CODES, end=END)
    yield model.generate
    visual_spec.restore(model)


def plain(model: Any, **given: Any) -> Any:
    """What transformers returns, whatever hangs on the model."""
    processors = LogitsProcessorList([OnlyCodes()])
    return type(model).generate(model, logits_processor=processors, eos_token_id=END, **given)


GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=12)


def test_greedy_generate(generate, model):
    """`test_greedy_generate`, and the ids."""
    inputs = texts([7, 4, 9])
    ids = generate(**inputs, **GREEDY)
    assert ids.shape[0] == 3 and 9 < ids.shape[1] <= 9 + 12
    assert torch.equal(ids, plain(model, **inputs, **GREEDY))


def test_greedy_generate_dict_outputs(generate, model):
    inputs = texts([7, 4, 9])
    answer = generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert type(answer).__name__ == "GenerateDecoderOnlyOutput"
    assert torch.equal(answer.sequences, generate(**inputs, **GREEDY))


def test_sample_generate(generate):
    """Every sequence that was asked for, and the prompts in front."""
    inputs = texts([7, 4])
    ids = generate(**inputs, do_sample=True, num_return_sequences=3, max_new_tokens=10)
    assert len(ids) == 6 and ids.shape[1] <= 7 + 10
    assert torch.equal(ids[:, :7], inputs["input_ids"].repeat_interleave(3, 0))


def test_left_padding_compatibility(generate):
    """A padded batch writes what each prompt writes alone."""
    lengths = [7, 4, 9]
    inputs = texts(lengths)
    together = generate(**inputs, **GREEDY)
    for row, length in enumerate(lengths):
        alone = {name: value[row : row + 1, -length:] for name, value in inputs.items()}
        ids = generate(**alone, **GREEDY)
        written = together[row, 9 : 9 + ids.shape[1] - length]
        assert torch.equal(ids[0, length:], written)


def test_max_length_counts_the_prompt(generate):
    """`test_generate_methods_with_logits_to_keep` and others take both; `max_new_tokens` does not count it."""
    inputs = texts([7, 4])
    ids = generate(**inputs, do_sample=False, max_length=7 + 9, min_new_tokens=9)
    assert ids.shape[1] == 16
    assert torch.equal(ids, generate(**inputs, do_sample=False, max_new_tokens=9, min_new_tokens=9))


def test_a_generation_config_in_place_of_the_models(generate):
    inputs, config = texts([7, 4]), GenerationConfig(do_sample=False, max_new_tokens=5, pad_token_id=0)
    kept = copy.deepcopy(config.to_dict())
    assert torch.equal(
        generate(**inputs, generation_config=config), generate(**inputs, do_sample=False, max_new_tokens=5)
    )
    assert config.to_dict() == kept


def test_neither_the_model_nor_its_inputs_change(generate, model):
    inputs, config = texts([7, 4, 9]), copy.deepcopy(model.generation_config.to_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    given = {name: value.clone() for name, value in inputs.items()}
    generate(**given, **GREEDY, repetition_penalty=1.3)
    assert all(torch.equal(given[name], inputs[name]) for name in inputs)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.generation_config.to_dict() == config


def test_texts_end_by_themselves_and_are_padded(generate):
    """`test_generate_with_eos`-like cases: after the end only padding."""
    ids = generate(**texts([5] * 16), do_sample=True, temperature=3.0, max_new_tokens=40)[:, 5:]
    ended = (ids == END).any(1)
    assert ended.any()
    for row in ids[ended]:
        end = int((row == END).nonzero()[0])
        assert (row[end + 1 :] == 0).all() and (row[:end] != END).all()


def test_beams_are_refused_by_name_or_done(generate, model):
    """What cannot be accelerated says so, and is not done in some other way."""
    asked = dict(do_sample=False, num_beams=2, max_new_tokens=4)
    if "sampler" in vars(model):
        with pytest.raises(ValueError, match="num_beams=2"):
            generate(**texts([4]), **asked)
    else:
        assert len(generate(**texts([4]), **asked)) == 1
