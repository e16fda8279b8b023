"""Language models of codes in windows, beside their own forward of each whole text."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.models.next_token.tiny_languages import CLASSES, CODES, END, VOCABULARY, language_model, texts
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.models.next_token.code_language import CodeLanguageModel

LENGTH, WINDOW = 12, 4
# Sliding attention in all layers, and in every second one; widths below and beyond the texts.
SLIDING = [(kind, width) for kind in ("mistral", "gemma2", "gemma3") for width in (2, 5, 40)]
# Codes, the end, whether logits are normalised, and the ids of the tokens.
READ: list[tuple[Any, int | None, bool, list[int]]] = [
    (CODES, END, False, [*range(40, 81)]),
    ([(45, 60), (20, 30), (30, 35)], 10, False, [*range(20, 35), *range(45, 60), 10]),
    ([(45, 60)], None, True, [*range(45, 60)]),
    ((0, VOCABULARY), 7, True, [*range(VOCABULARY)]),
]


@pytest.mark.every_set
@pytest.mark.parametrize("kind, width", [*SLIDING, *[(kind, None) for kind in CLASSES]])
@torch.no_grad()
def test_windows_score_what_the_whole_text_does(kind, width, monkeypatch):
    """Rows with padding, and at places of their own; drafts that were wrong are fed again."""
    # Eager attention (Gemma 2) takes this in float32, where the rounding depends on the length of a row.
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim=dim))
    model = language_model(kind, **({} if width is None else dict(sliding_window=width)))
    prompts, generator = texts([7, 4, 9]), torch.Generator().manual_seed(1)
    if kind == "llama":  # some heads have a bias
        model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY, generator=generator).double())
    written = torch.randint(45, 60, (3, LENGTH), generator=generator)  # ids that are codes in all of `READ`
    rows = zip(prompts["input_ids"], prompts["attention_mask"], written, strict=True)
    whole = [model(torch.cat([ids[mask > 0], own])[None]).logits[0] for ids, mask, own in rows]
    logits = torch.stack([own[-LENGTH - 1 : -1] for own in whole])
    condition = ImagePrompt(Prompt(prompts["input_ids"], prompts["attention_mask"]))
    for codes, end, normalised, ids in READ if width is None else READ[:1]:
        read = CodeLanguageModel(model, codes, end, new_tokens=LENGTH, normalised=normalised)
        assert read.ids_of.tolist() == ids and read.end == (None if end is None else ids.index(end))
        want = (logits.log_softmax(-1) if normalised else logits)[..., ids]
        tokens = torch.tensor([[ids.index(one) for one in row] for row in written.tolist()])
        state = read.prefill(condition, batch_size=3, guided=False, window=WINDOW)
        least = 1e-9 * want.abs().max()
        assert (state.logits - want[:, 0]).abs().max() < least
        for starts in ([0, 0, 0], [1, 3, 4], [5, 4, 7]):
            slots = torch.tensor(starts)[:, None] + torch.arange(WINDOW)
            fed = tokens.gather(1, slots)
            read(state, (fed + 1) % len(ids), slots)
            apart = read(state, fed, slots) - want.gather(1, (slots + 1)[..., None].expand(-1, -1, len(ids)))
            assert apart.abs().max() < least
