"""A T5 encoder that is real but tiny and random, and a tokenizer of seven words for it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from visual_spec.models.text.t5_features import T5Features

WORDS = ["a", "red", "blue", "circle", "square", "on", "."]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])  # type: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def tiny_t5(seed: int = 0, **changes) -> T5EncoderModel:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=12, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0)
    return T5EncoderModel(T5Config(**{**sizes, **changes})).eval()


def tiny_features(cache: Path | None = None, seed: int = 0) -> T5Features:
    return T5Features(tiny_t5(seed), tiny_tokenizer(), max_words=10, cache_folder=cache).eval()
