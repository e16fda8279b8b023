"""MaskGIT of the Halton sampler and MAGE: official layouts, against straight-line computations of single pictures."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.mage import CLASSES, CODES, DIM, HEADS, LAYERS, SIDE, official_weights, tiny_mage
from tests.helpers.refusals import refuses
from tests.models.continuous.straight import block, linear, norm
from visual_spec.models.masked.mage import PRESETS as MAGE_SIZES
from visual_spec.models.masked.mage import MageTransformer, load_mage_checkpoint
from visual_spec.models.masked.maskgit import PRESETS, MaskedImageTransformer
from visual_spec.models.masked.maskgit_checkpoint import load_maskgit_checkpoint
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.masked.presets import PRESETS as SETTINGS


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def halton_logits(w: dict[str, Tensor], label: int, tokens: Tensor, proj: int) -> Tensor:
    """Logits [L, V] of one picture, tokens long [L], from the official weights, head by head."""
    y, x = w["cls_emb.weight"][label], w["tok_emb.weight"][tokens] + w["pos_emb.weight"]
    side = SIDE // proj
    if proj == 2:
        squares = x.view(side, 2, side, 2, DIM)  # row, row inside, column, column inside
        x = torch.einsum("ipjqc,dcpq->ijd", squares, w["in_proj.weight"]).reshape(-1, DIM)
    count = len(x)
    if "reg_tokens.weight" in w:
        x = torch.cat([x, w["reg_tokens.weight"]])
    for layer in range(LAYERS):
        at = f"transformer.layers.{layer}"
        shift, scale, gate, ff_shift, ff_scale, ff_gate = linear(w, f"{at}.mlp.1", F.silu(y)).chunk(6)
        h = rms(x) * w[f"{at}.ln1.weight"] * (1 + scale) + shift
        q, k = (rms(h @ w[f"{at}.attn.{part}.weight"].T) for part in ("wq", "wk"))
        v = h @ w[f"{at}.attn.wv.weight"].T
        seen = []
        for query, key, value in zip(q.chunk(HEADS, -1), k.chunk(HEADS, -1), v.chunk(HEADS, -1), strict=True):
            seen.append((query @ key.T / math.sqrt(DIM / HEADS)).softmax(-1) @ value)
        x = x + gate * (torch.cat(seen, -1) @ w[f"{at}.attn.wo.weight"].T)
        h = rms(x) * w[f"{at}.ln2.weight"] * (1 + ff_scale) + ff_shift
        gated = F.silu(h @ w[f"{at}.ff.w1.weight"].T) * (h @ w[f"{at}.ff.w3.weight"].T)
        x = x + ff_gate * (gated @ w[f"{at}.ff.w2.weight"].T)
    x = x[:count]
    if proj == 2:
        wide = (x @ w["out_proj.weight"][:, :, 0, 0].T).view(side, side, DIM, 2, 2)
        x = wide.permute(0, 3, 1, 4, 2).reshape(-1, DIM)
    shift, scale = linear(w, "last_norm.mlp.1", F.silu(y)).chunk(2)
    x = (rms(x) * w["last_norm.norm_final.weight"] + w["last_norm.norm_final.bias"]) * (1 + scale) + shift
    return (x @ w["head.weight"].T + w["head.bias"])[:, :CODES]


@pytest.mark.parametrize("proj, registers", [(1, 1), (1, 0), (2, 1), (2, 3)])
def test_the_official_layout_of_halton_maskgit(tmp_path, proj, registers):
    weights = official_weights(proj, registers)
    path = tmp_path / "ImageNet_256_base.pth"
    saved = {f"module._orig_mod.{key}": value for key, value in weights.items()}
    torch.save({"model_state_dict": saved, "iter": 7, "global_epoch": 1, "optimizer_state_dict": {}}, path)
    model = load_maskgit_checkpoint(path, num_heads=HEADS)
    assert (model.config["proj"], model.config["registers"]) == (proj, registers)
    tokens = torch.randint(CODES + 1, (3, SIDE**2), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 3, 4])
    state = model.prepare(labels, batch_size=3, guided=True)
    logits = model(state, tokens[..., None], 0)
    assert logits.shape == (6, SIDE**2, CODES)
    for row in range(3):
        for index, label in ((row, int(labels[row])), (3 + row, CLASSES)):
            wanted = halton_logits(weights, label, tokens[row], proj)
            assert torch.allclose(logits[index], wanted, atol=1e-9)


def test_official_files_that_are_something_else_are_refused():
    weights = official_weights()
    refuses(ValueError, "width 12.*2", load_maskgit_checkpoint, weights)
    with pytest.raises(ValueError, match=r"head\.weight.*tok_emb\.weight"):
        load_maskgit_checkpoint(weights | {"head.weight": weights["head.weight"] + 1}, num_heads=HEADS)
    short = {key: value for key, value in weights.items() if key != "transformer.layers.1.attn.wq.weight"}
    refuses(ValueError, r"1.*transformer\.layers\.1", load_maskgit_checkpoint, short, num_heads=HEADS)
    refuses(ValueError, "lacks tok_emb.weight", load_maskgit_checkpoint, {"x": torch.zeros(2)})


@pytest.mark.parametrize("size, millions", [("base", 142), ("large", 480)])
def test_official_sizes(size, millions):
    """Published: 142 M and 480 M weights."""
    with torch.device("meta"):
        model = MaskedImageTransformer(**PRESETS[size])
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def captioned() -> MaskedImageTransformer:
    torch.manual_seed(0)
    model = MaskedImageTransformer(
        CODES, DIM, LAYERS, HEADS, SIDE, num_classes=None, caption_dim=6, prefix_length=4
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def told() -> TextCondition:
    mask = torch.tensor([[False, True, True, True], [True] * 4, [False, False, False, True]])
    return TextCondition(torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(2)).double(), mask)


def test_captions_condition_each_row_alone_and_padding_says_nothing():
    model: Any = captioned()
    condition = told()
    tokens = torch.randint(CODES + 1, (3, 16, 1), generator=torch.Generator().manual_seed(1))
    whole = model(model.prepare(condition, batch_size=3, guided=True), tokens)
    assert not torch.allclose(whole[0], whole[3]) and torch.isfinite(whole).all()
    noise = TextCondition(condition.features + 9 * ~condition.mask[..., None], condition.mask)
    assert torch.allclose(model(model.prepare(noise, batch_size=3, guided=True), tokens), whole)
    nothing = model(model.prepare(None, batch_size=3, guided=False), tokens)
    assert torch.allclose(nothing, whole[3:])  # no caption is the same for every row
    for row in range(3):
        own = TextCondition(condition.features[row : row + 1], condition.mask[row : row + 1])
        alone = model(model.prepare(own, batch_size=1, guided=False), tokens[row : row + 1])
        assert torch.allclose(alone[0], whole[row])
        dropped = torch.tensor([True])
        trained = model.predictions(tokens[row : row + 1, :, 0], own, dropped)
        assert torch.allclose(trained[0], whole[3 + row])
        assert torch.allclose(model.predictions(tokens[row : row + 1, :, 0], own)[0], whole[row])


def test_words_see_only_words_and_tokens_see_them():
    """The layers by hand, with the words after the tokens in one sequence and a mask."""
    model: Any = captioned()
    condition = told()
    tokens = torch.randint(CODES + 1, (3, 16, 1), generator=torch.Generator().manual_seed(1))
    found = model(model.prepare(condition, batch_size=3, guided=False), tokens)
    y, words, mask = model.embed_condition(condition, 3)
    registers = model.reg_tokens.weight.expand(3, -1, -1)
    x = torch.cat([model.tok_emb(tokens[..., 0]) + model.pos_emb.weight, registers, words], 1)
    keys = torch.cat([torch.ones(3, 17, dtype=torch.bool), mask], 1)
    sees = keys[:, None].repeat(1, x.shape[1], 1)
    sees[:, 17:, :17] = False
    for layer in model.blocks:
        modulation = layer.mlp(y).unflatten(1, (6, -1))
        x, _ = layer(x, modulation, mask=sees[:, None])
    shift, scale = model.last_norm.mlp(y).chunk(2, -1)
    x = model.last_norm.norm_final(x[:, :16]) * (1 + scale[:, None]) + shift[:, None]
    wanted = x @ model.tok_emb.weight.T + model.head.bias
    assert torch.allclose(found, wanted[..., :CODES])


def test_conditions_that_do_not_fit_are_refused():
    model, classes = captioned(), load_maskgit_checkpoint(official_weights(), num_heads=HEADS)
    refuses(TypeError, "Tensor.*TextCondition", model.prepare, torch.tensor([1]), batch_size=1, guided=False)
    refuses(TypeError, "TextCondition", classes.prepare, told(), batch_size=3, guided=False)
    refuses(ValueError, r"\[5\].*1.*0.*4", classes.prepare, torch.tensor([5]), batch_size=1, guided=False)
    empty = TextCondition(told().features, torch.zeros(3, 4, dtype=torch.bool))
    refuses(ValueError, "caption", model.prepare, empty, batch_size=3, guided=False)
    refuses(ValueError, "proj=2.*grid_size=5", MaskedImageTransformer, grid_size=5, proj=2)
    refuses(ValueError, "num_classes=None.*caption_dim=None", MaskedImageTransformer, num_classes=None)


# -- MAGE -------------------------------------------------------------------------------------------------------------


def mage_logits(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [L, V] of one picture from the official weights. The mask has the last row of the table."""
    table = w["token_emb.word_embeddings.weight"]
    ids = torch.cat([torch.tensor([13]), tokens])
    x = norm(table[ids] + w["token_emb.position_embeddings.weight"], w, "token_emb.LayerNorm")
    for layer in range(2):
        x = block(w, f"blocks.{layer}", x, 3)
    x = linear(w, "decoder_embed", norm(x, w, "norm"))
    rows = [x[0] if int(token) == len(table) - 1 else row for token, row in zip(ids, x, strict=True)]
    x = torch.stack(rows) + w["decoder_pos_embed_learned"][0]
    x = norm(block(w, "decoder_blocks.0", x, 2), w, "decoder_norm")
    x = linear(w, "mlm_layer.fc", x)
    x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    x = x * w["mlm_layer.ln.weight"] + w["mlm_layer.ln.bias"]
    return (x @ table.T + w["mlm_layer.bias"][0, 0])[1:, :CODES]


def test_the_official_layout_of_mage(tmp_path):
    model = tiny_mage()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    extra = {
        "cls_token": torch.zeros(1, 1, 12),
        "pos_embed": torch.zeros(1, 17, 12),
        "mask_token": torch.zeros(1, 1, 8),
        "decoder_pos_embed": torch.zeros(1, 17, 8),
        "decoder_pred.weight": torch.zeros(3, 8),
        "patch_embed.proj.weight": torch.zeros(12, 3, 16, 16),
        "vqgan.encoder.conv_in.weight": torch.zeros(4, 3, 3, 3),
        "token_emb.position_ids": torch.arange(17)[None],
    }
    path = tmp_path / "mage-vitb-1600.pth"
    torch.save({"model": weights | extra, "epoch": 1599}, path)
    refuses(ValueError, "B, L", load_mage_checkpoint, path)
    loaded = load_mage_checkpoint(path, num_heads=3, decoder_heads=2, class_id=13, num_classes=6)
    assert {k: v for k, v in loaded.config.items() if k[0] != "_"} == {
        k: v for k, v in model.config.items() if k[0] != "_"
    }
    tokens = torch.randint(CODES, (3, 16), generator=torch.Generator().manual_seed(1))
    tokens[:, ::3] = loaded.mask_id
    logits = loaded(loaded.prepare(None, batch_size=3, guided=False), tokens[..., None])
    for row in range(3):
        assert torch.allclose(logits[row], mage_logits(weights, tokens[row]), atol=1e-9)
    refuses(ValueError, "MAGE", loaded.prepare, None, batch_size=1, guided=True)
    wrong = weights | {"blocks.7.extra": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unexpected: blocks\.7\.extra"):
        load_mage_checkpoint(wrong, num_heads=3, decoder_heads=2, class_id=13, num_classes=6)


@pytest.mark.parametrize("size", MAGE_SIZES)
def test_official_sizes_of_mage_are_recognised(size):
    with torch.device("meta"):
        model = MageTransformer(**MAGE_SIZES[size])
    found = load_mage_checkpoint({key: torch.empty_like(v) for key, v in model.state_dict().items()})
    assert {k: v for k, v in found.config.items() if k[0] != "_"} == {
        k: v for k, v in model.config.items() if k[0] != "_"
    }


@pytest.mark.parametrize("preset", ["mage", "halton"])
def test_they_decode_with_published_settings(preset):
    mage, maskgit = tiny_mage(), load_maskgit_checkpoint(official_weights(), num_heads=HEADS)
    sampler, law = (
        SETTINGS[preset].sampler(steps=4),
        SETTINGS[preset].law,
    )
    for model, condition in ((mage, None), (maskgit, torch.tensor([1, 2]))):
        tokens = sampler(model, condition, law=law, batch_size=2).tokens
        assert tokens.shape == (2, 16) and 0 <= int(tokens.min()) and int(tokens.max()) < CODES
