"""T5 features: left-padding against a plain loop, the cache on disk, saving and loading. The T5 is real and tiny."""

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, T5EncoderModel

from tests.helpers.odd_addresses import misplaced, put_at_odd_addresses
from tests.helpers.refusals import refuses
from tests.helpers.tiny_t5 import WORDS, tiny_features, tiny_t5, tiny_tokenizer
from visual_spec.models.text.t5_features import T5Features

PROMPTS = ["A red circle", "a", "a red circle on a blue square on."]


def counting(features: T5Features) -> list[int]:
    """Sizes of the batches that the encoder is run on from now on."""
    sizes: list[int] = []
    features.encoder.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return sizes


def by_plain_loop(encoder, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One caption, token by token: padded at the end, encoded, and its valid features moved to the end."""
    words = prompt.lower().replace(".", " .").split()
    ids = [3 + WORDS.index(word) for word in words] + [1]
    count = len(ids)
    attention = torch.tensor([[1] * count + [0] * (10 - count)])
    hidden = encoder(torch.tensor([ids + [0] * (10 - count)]), attention).last_hidden_state[0]
    rows = torch.zeros(10, 8)
    for place in range(count):
        rows[10 - count + place] = hidden[place]
    return rows, torch.tensor([place >= 10 - count for place in range(10)])


def test_features_are_left_padded_as_by_a_plain_loop():
    features = tiny_features()
    condition = features(PROMPTS)
    assert condition.features.shape == (3, 10, 8) and condition.mask.dtype == torch.bool
    assert condition.mask.sum(1).tolist() == [4, 2, 10]  # words, the full stop, and the end token
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            expected, mask = by_plain_loop(features.encoder, prompt)
            assert torch.equal(condition.mask[row], mask)
            torch.testing.assert_close(condition.features[row], expected, rtol=0, atol=1e-6)


def test_captions_are_cleaned_before_they_are_tokenized():
    features = tiny_features()
    assert features.word_ids(["  <b>A</b> RED (circle) "]).equal(features.word_ids(["a red circle"]))
    assert features.unknown_words(["zebra"]) == []


def test_empty_prompts_are_refused():
    features = tiny_features()
    for prompt in ("", "  ", "***", "<br>"):
        refuses(ValueError, "prompt '", features, [prompt])


def test_long_prompts_are_cut_with_a_warning_that_names_the_rest():
    features = tiny_features()  # nine words and the end token
    with pytest.warns(
        UserWarning, match="at most 9 tokens; 'blue circle' at the end of the prompt 'a red a red"
    ):
        got = features(["a red a red a red a red a blue circle", "a red"])
    # In a batch of the same size: products of another size may round otherwise.
    assert got.features.equal(features(["a red a red a red a red a", "a red"]).features)


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_what_was_encoded_once_is_read_from_disk(tmp_path):
    features, plain = tiny_features(tmp_path), tiny_features()(PROMPTS)
    batches = counting(features)
    first = features(PROMPTS[:2])
    again = features(PROMPTS)  # one new
    assert batches == [2, 1]
    other = tiny_features(tmp_path)  # another process
    batches = counting(other)
    read = other(PROMPTS[::-1])
    assert batches == []
    torch.testing.assert_close(again.features, plain.features, rtol=0, atol=1e-6)
    assert torch.equal(first.features, again.features[:2]) and torch.equal(again.mask, plain.mask)
    assert torch.equal(read.features, again.features.flip(0)) and torch.equal(read.mask, again.mask.flip(0))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3 and all(path.suffix == ".safetensors" for path in files)


def test_other_weights_and_other_dtypes_have_entries_of_their_own(tmp_path):
    tiny_features(tmp_path)(PROMPTS)
    others = [tiny_features(tmp_path, seed=1), nn.Module.to(tiny_features(tmp_path), torch.bfloat16)]
    nudged = tiny_features(tmp_path)
    with torch.no_grad():
        nudged.encoder.get_parameter("encoder.block.1.layer.1.DenseReluDense.wo.weight").mul_(1.01)
    for features in (*others, nudged):
        batches = counting(features)
        found = features(PROMPTS)
        assert batches == [3] and found.features.dtype == features.dtype
        assert features(PROMPTS).features.equal(found.features) and batches == [3]


def test_a_damaged_entry_is_made_again_and_none_is_left_half_written(tmp_path, monkeypatch):
    features = tiny_features(tmp_path)
    expected = features(["a"]).features
    (entry,) = (path for path in tmp_path.rglob("*") if path.is_file())
    entry.write_bytes(entry.read_bytes()[:20])
    assert features(["a"]).features.equal(expected)
    assert tiny_features(tmp_path)(["a"]).features.equal(expected)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            features(["a red circle"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [entry]


# -- saving and loading ------------------------------------------------------------------------------------------------


def test_a_saved_folder_is_a_transformers_folder_and_loads_again(tmp_path):
    features = tiny_features()
    features.save_pretrained(tmp_path)
    assert T5EncoderModel.from_pretrained(tmp_path).config.d_model == 8
    assert AutoTokenizer.from_pretrained(tmp_path)("a red").input_ids == [3, 4, 1]
    assert put_at_odd_addresses(tmp_path) == 1
    again = T5Features.from_pretrained(tmp_path)
    assert misplaced(again) == []
    assert again.max_words == 10 and not again.training and again.dim == 8
    assert again(PROMPTS).features.equal(features(PROMPTS).features)
    assert T5Features.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_plain_transformers_folder_loads_with_the_official_length(tmp_path):
    tiny_t5().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert T5Features.from_pretrained(tmp_path).max_words == 120
    assert T5Features.from_pretrained(tmp_path, max_words=6)(["a"]).features.shape == (1, 6, 8)


def test_folders_that_hold_no_t5_are_refused(tmp_path):
    refuses(ValueError, r"config\.json.*flan-t5", T5Features.from_pretrained, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refuses(ValueError, "LlamaGen", T5Features.from_pretrained, tmp_path)
