"""Language models of codes in windows, beside their own forward of each whole text."""

import pytest
import torch

from tests.models.next_token.tiny_languages import CODES, END, language_model, texts
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.models.next_token.code_language import CodeLanguageModel

LENGTH, WINDOW = 12, 4


@pytest.mark.every_set
@pytest.mark.parametrize("width", [2, 5, 40])
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
@torch.no_grad()
def test_layers_of_sliding_attention_see_the_last_places_alone(kind, width):
    """All layers, every second one, and widths beyond the text; rows with padding and at places of their own."""
    model = language_model(kind, sliding_window=width)
    prompts, generator = texts([7, 4, 9]), torch.Generator().manual_seed(1)
    tokens = torch.randint(END - CODES[0], (3, LENGTH), generator=generator)
    want = torch.stack(
        [
            model(torch.cat([ids[mask > 0], CODES[0] + own])[None]).logits[0, -LENGTH - 1 : -1]
            for ids, mask, own in zip(prompts["input_ids"], prompts["attention_mask"], tokens, strict=True)
        ]
    )[..., CODES[0] : END + 1]
    read = CodeLanguageModel(model, CODES, END, new_tokens=LENGTH)
    condition = ImagePrompt(Prompt(prompts["input_ids"], prompts["attention_mask"]))
    state = read.prefill(condition, batch_size=3, guided=False, window=WINDOW)
    assert (state.logits - want[:, 0]).abs().max() < 1e-9 * want.abs().max()
    for starts, wrong in [
        ([0, 0, 0], True),
        ([0, 0, 0], False),
        ([1, 3, 4], True),
        ([1, 3, 4], False),
        ([5, 4, 7], False),
    ]:
        slots = torch.tensor(starts)[:, None] + torch.arange(WINDOW)
        fed = tokens.gather(1, slots)
        logits = read(state, (fed + 1) % (END - CODES[0]) if wrong else fed, slots)
        if not wrong:
            following = (slots + 1)[..., None].expand_as(logits)
            apart = (logits - want.gather(1, following)).abs().max()
            assert apart < 1e-9 * want.abs().max()
