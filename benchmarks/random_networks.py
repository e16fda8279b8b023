"""Networks of the released architectures with seeded random weights, for figures where no weights can be fetched.

`visual-spec score` runs them as it runs the released weights. The figures compare within one table only.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn


def random_inception(path: Path, seed: int = 0) -> Path:
    """Write the weights of torch-fidelity's Inception network drawn at random, in the layout of the released file."""
    from torch_fidelity import feature_extractor_inceptionv3 as source

    with (
        patch.object(source, "load_state_dict_from_url", lambda *_, **__: {}),
        patch.object(nn.Module, "load_state_dict", lambda *_, **__: None),
    ):
        network = source.FeatureExtractorInceptionV3("x", ["2048"])
    torch.manual_seed(seed)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    torch.save(network.state_dict(), path)
    return path


def random_clip(folder: Path, prompts: list[str], seed: int = 0) -> Path:
    """Write a CLIP ViT-B/32 drawn at random, as a folder of transformers. Its tokens are the words of the prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

    first, last, unknown = "<|startoftext|>", "<|endoftext|>", "<|unknown|>"
    words = [first, unknown, *sorted({word for prompt in prompts for word in prompt.split()}), last]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{first} $A {last}", special_tokens=[(first, numbers[first]), (last, numbers[last])]
    )
    named = {"bos_token": first, "eos_token": last, "pad_token": last, "unk_token": unknown}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=77, **named)

    text = {
        "vocab_size": len(words),
        "bos_token_id": numbers[first],
        "eos_token_id": numbers[last],
        "pad_token_id": numbers[last],
    }
    torch.manual_seed(seed)
    CLIPModel(CLIPConfig(text_config=text)).save_pretrained(folder)
    CLIPProcessor(CLIPImageProcessor(), fast).save_pretrained(folder)
    return folder
