"""Lumina-DiMOO beside its public code, in recorded numbers, and beside a straight-line computation.

The numbers come from Alpha-VLLM/Lumina-DiMOO (its `generate_image`, in float32) with the weights of
`tests.helpers.dimoo`, a prompt of three words, 4 x 6 tokens, `cfg_scale` 4, and this library's noise in the place of
the release's.
"""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import dimoo
from tests.helpers.dimoo import CODES, DIM, HEADS, TOKENS
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from visual_spec.models.masked.dimoo import AROUND, FIRST_CODE, MASK, DimooTransformer
from visual_spec.models.masked.dimoo_checkpoint import load_dimoo
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import hidden_counts, hidden_shares
from visual_spec.samplers.masked.presets import PRESETS

HEIGHT, WIDTH = 4, 6
# With code 5 at slot 3: the first logits of three slots.
LOGITS = {
    0: [-0.106479, 0.997977, -1.359518],
    3: [-0.322344, 1.367465, -0.466949],
    6: [-0.236737, 1.021375, -1.307917],
}
AT_SEVEN_TENTHS = [6, 9, 14, 22, 14, 6, 10, 10, 19, 7, 22, 6, 14, 23, 14, 8, 6, 6, 23, 22, 7, 14, 6, 22]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model over 4 x 6 tokens, and what embeds its prompts."""
    model, reader = load_dimoo(dimoo.write_folder(tmp_path_factory.mktemp("dimoo")))
    return model.with_grid(HEIGHT, WIDTH), reader


def test_logits_are_those_of_the_release(loaded):
    model, reader = loaded
    tokens = torch.full((1, HEIGHT * WIDTH, 1), model.mask_id)
    tokens[0, 3] = 5
    state = model.prepare(reader(["a red fox"]), batch_size=1, guided=True)
    found = model(state, tokens)[0]
    for slot, wanted in LOGITS.items():
        assert torch.allclose(found[slot, :3], torch.tensor(wanted), atol=2e-5)


def test_tokens_are_those_of_the_release_for_equal_noise(loaded):
    model, reader = loaded
    told, preset = reader(["a red fox"]), PRESETS["dimoo"]
    found = preset.sampler(steps=8)(model, told, law=preset.law, generator=seeded(1))
    assert found.tokens[0].tolist() == TOKENS and found.trace.target_calls.tolist() == [8]
    # At another temperature the release scores by the law of temperature 1, and scales its noise.
    cold = preset.sampler(steps=8, choice_temperature=0.7, score_temperature=1.0)
    found = cold(model, told, law=TokenLaw(guidance_scale=5.0, temperature=0.7), generator=seeded(1))
    assert found.tokens[0].tolist() == AT_SEVEN_TENTHS


def test_a_sample_does_not_depend_on_the_batch(loaded):
    model, reader = loaded
    preset = PRESETS["dimoo"]
    both = preset.sampler(steps=8)(
        model, reader(["a red fox", "blue"]), law=preset.law, generator=seeded(1, 2), batch_size=2
    )
    alone = preset.sampler(steps=8)(model, reader(["blue"]), law=preset.law, generator=seeded(2))
    assert both.tokens[0].tolist() == TOKENS and torch.equal(both.tokens[1:], alone.tokens)


@pytest.mark.parametrize("tokens", [64 * 64, 48 * 96, 32 * 32, 24])
@pytest.mark.parametrize("steps", [64, 32, 16])
def test_counts_are_those_of_the_release(tokens, steps):
    """Its formula, in float32: floor(tokens * cos(pi / 2 * t)), at least 1, and fewer than before."""
    wanted = [tokens]
    for step in range(1, steps):
        share = torch.cos(0.5 * math.pi * torch.tensor([step / steps]))
        kept = int((torch.tensor([float(tokens)]) * share).floor().clamp_min(1))
        wanted.append(min(kept, wanted[-1] - 1) if wanted[-1] > 1 else 1)
    found = hidden_counts(hidden_shares("cosine", "maskgit", steps), "maskgit", torch.tensor([tokens]))
    assert [int(count) for count in found] == wanted
    assert PRESETS["dimoo"].sampler(steps=steps).config["schedule"] == "cosine"


# -- the network -------------------------------------------------------------------------------------------------------


def straight(w: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits of all ids, [S, V], of a sequence in its own order, from official weights by name."""

    def normed(x: Tensor, key: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"model.transformer.{key}.weight"]

    size = DIM // HEADS
    rates = torch.tensor([500000.0 ** (-2 * pair / size) for pair in range(size // 2)], dtype=torch.float64)
    phase = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(len(ids))[:, None] * rates)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * phase
        return torch.cat([pairs.real, pairs.imag], -1)

    x = w["model.transformer.wte.weight"][ids]
    for index in range(dimoo.LAYERS):
        part = {key: w[f"model.transformer.blocks.{index}.{key}.weight"] for key in dimoo.SIZES}
        h = normed(x, f"blocks.{index}.attn_norm")
        q, k, v = ((h @ part[f"{key}_proj"].T).unflatten(1, (HEADS, size)).transpose(0, 1) for key in "qkv")
        seen = (turned(q) @ turned(k).mT / math.sqrt(size)).softmax(-1) @ v
        x = x + seen.transpose(0, 1).flatten(1) @ part["attn_out"].T
        h = normed(x, f"blocks.{index}.ff_norm")
        gate = h @ part["ff_proj"].T
        x = x + (gate * gate.sigmoid() * (h @ part["up_proj"].T)) @ part["ff_out"].T
    return normed(x, "ln_f") @ w["model.transformer.ff_out.weight"].T


def test_logits_of_a_ragged_batch_are_those_of_each_sequence(loaded):
    """With three prompts of different lengths, a negative one among them, and some tokens that are known."""
    model, reader = (deepcopy(part).double() for part in loaded)
    weights = {key: value.double() for key, value in dimoo.official_weights().items()}
    prompts, negative = ["a red fox", "blue"], "a fox"
    told = reader([*prompts, negative])
    avoided = TextCondition(told.features[2:].expand(2, -1, -1), told.mask[2:].expand(2, -1))
    tokens = torch.randint(CODES + 1, (2, HEIGHT * WIDTH, 1), generator=torch.Generator().manual_seed(0))
    for other, text in ((avoided, negative), (None, "<uncondition>")):
        given = TextCondition(told.features[:2], told.mask[:2], negative=other)
        found = model(model.prepare(given, batch_size=2, guided=True), tokens)
        for row, prompt in enumerate([*prompts, text, text]):
            lines = torch.where(tokens[row % 2, :, 0] < CODES, tokens[row % 2, :, 0] + FIRST_CODE, MASK)
            framed = torch.cat([lines.view(HEIGHT, WIDTH), torch.full((HEIGHT, 1), 126084)], 1)
            words = reader.ids(prompt)
            ids = [*words, 126354, 126349, *framed.flatten().tolist(), 126350, 126355]
            own = straight(weights, ids)[len(words) + 2 : -2, FIRST_CODE:]
            wanted = own.view(HEIGHT, WIDTH + 1, CODES)[:, :-1].flatten(0, 1)
            assert (found[row] - wanted).abs().max() < 1e-8


def test_states_are_selected_with_their_samples():
    model = dimoo.tiny_dimoo()
    told = TextCondition(torch.randn(2, 5, 8), torch.tensor([[True] * 5, [False, True, False, True, False]]))
    state = model.prepare(told, batch_size=2, guided=True)
    tokens = torch.randint(CODES, (2, 16, 1))
    both, least = model(state, tokens, keep=0), model(state, tokens.flip(1), least=0.3)
    state.select(torch.tensor([1]))
    assert torch.allclose(model(state, tokens.flip(1)[1:], least=0.0)[1], least[3], atol=1e-5)
    assert torch.allclose(model(state, tokens[1:]), both[[1, 3]], atol=1e-5)


def test_what_does_not_fit_is_refused():
    model = dimoo.tiny_dimoo()
    refuses(TypeError, "NoneType given.*TextCondition", model.prepare, None, batch_size=1, guided=False)
    for features, mask, message in (
        (torch.zeros(2, 5, 8), torch.ones(2, 5, dtype=torch.bool), r"\(2, 5, 8\).*\(1, 'words', 8\)"),
        (torch.zeros(1, 5, 9), torch.ones(1, 5, dtype=torch.bool), r"\(1, 5, 9\)"),
        (torch.zeros(1, 5, 8), torch.ones(1, 4, dtype=torch.bool), r"mask \(1, 4\)"),
        (torch.zeros(1, 5, 8), torch.zeros(1, 5, dtype=torch.bool), "without a word"),
    ):
        refuses(ValueError, message, model.prepare, TextCondition(features, mask), batch_size=1, guided=False)
    refuses(ValueError, "68 x 68 tokens.*4608", model.with_grid, 68, 68)
    refuses(ValueError, "multiple of twice the heads", DimooTransformer, dim=12, num_heads=4)
    assert model.with_grid(4, 4) is model and model.with_grid(48, 96).grid.num_tokens == 4608


def test_a_sequence_has_the_published_ids():
    """Of the special tokens in the order of the table after the codes (config.py of the release)."""
    assert (FIRST_CODE, *AROUND) == (126356, 126336, 126084, 126354, 126349, 126350, 126355)


# -- the official folder -----------------------------------------------------------------------------------------------


def test_damaged_or_other_folders_are_refused(tmp_path):
    home = dimoo.write_folder(tmp_path / "official")
    (home / "model-00002-of-00002.safetensors").rename(tmp_path / "kept")
    refuses(ValueError, r"lacks blocks.0.up_proj.weight.*model-\*.safetensors", load_dimoo, home)
    (tmp_path / "kept").rename(home / "model-00002-of-00002.safetensors")
    for change, message in (
        (dict(activation_type="gelu"), "activation_type.*gelu.*silu"),
        (dict(n_kv_heads=2), "2 of 4 heads"),
        (dict(n_heads=None), "None heads"),
    ):
        (home / "config.json").write_text(dimoo.json_text(dimoo.CONFIG | change))
        refuses(ValueError, message, load_dimoo, home)
    (home / "config.json").unlink()
    refuses(ValueError, "config.json is missing", load_dimoo, home)
