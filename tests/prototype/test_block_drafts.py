"""Drafters of blocks: the plain tokens and their law whatever is drafted, the layout, and folders of `speculators`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

import visual_spec
from tests.exactness.enumeration import PLAIN, Enumerator, distance
from tests.helpers.block_tables import TableDrafter
from tests.helpers.drafting_sequences import pair
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_text_encoder, tiny_transformer
from tests.helpers.tiny_t5 import tiny_tokenizer
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.transformers_cache import CACHE
from visual_spec.pipelines.loading import load_drafter
from visual_spec.prototype.block_drafts.drafter import BlockDrafter
from visual_spec.prototype.block_drafts.sampler import BlockDraftSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.training import block_drafter
from visual_spec.training.block_drafter import (
    BlockTraining,
    Recorder,
    block_loss,
    train_block_drafter,
)

PROMPTS = ["a red circle", "a blue square on a circle", "blue", "red square"]
LAWS = {
    "plain": TokenLaw(),
    "guided": TokenLaw(guidance_scale=3.0, temperature=0.9, top_k=7, top_p=0.95),
    "greedy": TokenLaw(temperature=0.0),
}


def settled(drafter: BlockDrafter) -> BlockDrafter:
    """With weights that change drafts, seeded."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval()


def fresh(model: Any, law: TokenLaw, **settings: Any) -> BlockDrafter:
    state = model.prefill(tiny_text_encoder()(PROMPTS), batch_size=4, guided=law.guided, window=1)
    return settled(BlockDrafter.for_target(model, state, **{"block_size": 6, **settings}))


def decode(sampler: Any, law: TokenLaw, count: int = 4, **parts: Any) -> Any:
    condition = tiny_text_encoder()(PROMPTS[:count])
    generator = seeded(*range(count))
    return sampler(tiny_transformer(), condition, law=law, generator=generator, batch_size=count, **parts)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("corrects", [True, False], ids=["corrector", "layout"])
@pytest.mark.parametrize("window, steady", [(1, 2), (4, 1), (16, None)])
@torch.no_grad()
def test_identical_mode_returns_the_autoregressive_tokens(law, corrects, window, steady):
    drafter = fresh(tiny_transformer(), law, corrects=corrects, layers=2)
    for count in (1, 4):
        found = decode(BlockDraftSampler(window, steady=steady), law, count, drafter=drafter)
        assert torch.equal(found.tokens, decode(AutoregressiveSampler(), law, count).tokens)
        assert window > 1 or (found.trace.target_calls == 16).all()


@pytest.mark.parametrize("acceptance", ["identical", "exact"])
@pytest.mark.parametrize("window, most", [(2, 2), (3, 2), (3, 1)])
def test_the_law_is_kept_by_enumeration(acceptance, window, most):
    model, near = pair()
    sampler = BlockDraftSampler(window, acceptance, steady=1)
    found = Enumerator(sampler, model, PLAIN, drafter=TableDrafter(near, most)).run()
    assert distance(found, model) < 1e-10
    assert found.calls < 3.9


# ------------------------------------------------------------------------------------------------------ the layout


class Handed:
    """A target that hands out hidden states: a text of ids 25 to 44 in a vocabulary of 50."""

    grid, vocab_size, num_ids = TokenGrid(1, 12), 20, 50
    decoder = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4))

    def __init__(self, tapped: Tensor) -> None:
        """The state after a prefill of a prompt that left `tapped` [R, T, 2 * 32]."""
        self.guided, self.features, self.tapped = False, torch.zeros(len(tapped), 1, 32), tapped
        self.prompt_mask = torch.ones(tapped.shape[:2], dtype=torch.bool)
        self.start = torch.full((len(tapped),), tapped.shape[1])

    def ids(self, tokens: Tensor) -> Tensor:
        return tokens + 25


LAYER = dict(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
LAYER |= dict(intermediate_size=48, rms_norm_eps=1e-6, rope_theta=10000.0)
SHARED: dict[str, Any] = dict(
    draft_vocab_size=20, block_size=4, aux_hidden_state_layer_ids=[1, 3], mask_token_id=3, own_head=True
)


def layout(**settings: Any) -> BlockDrafter:
    torch.manual_seed(1)
    made = settled(BlockDrafter(LAYER, **SHARED, **settings))
    assert made.d2t is not None
    made.d2t.copy_(torch.arange(25, 45) - torch.arange(20))
    return made


def by_transformers(drafter: BlockDrafter, before: Tensor, newest: int, anchored: bool) -> Tensor:
    """Hidden states of a block by layers of transformers, over a cache of the keys of `before` [1, T, 2 * 32]."""
    config = Qwen3Config(**{**LAYER, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    config._attn_implementation = "eager"
    rotary, cache, length = Qwen3RotaryEmbedding(config), DynamicCache(), before.shape[1]
    ids = torch.tensor([[newest, 3, 3, 3]])
    assert drafter.embed_tokens is not None
    hidden, context = drafter.embed_tokens(ids), drafter.hidden_norm(drafter.fc(before))
    turned = rotary(hidden, torch.arange(length + 4)[None])
    for index, mine in enumerate(drafter.layers):
        layer = Qwen3DecoderLayer(config, index)
        layer.load_state_dict(mine.state_dict())
        attention: Any = layer.self_attn
        keys = attention.k_norm(attention.k_proj(context).view(1, length, 2, 8)).transpose(1, 2)
        values = attention.v_proj(context).view(1, length, 2, 8).transpose(1, 2)
        keys, _ = apply_rotary_pos_emb(keys, keys, *(part[:, :length] for part in turned))
        cache.update(keys, values, index)
        of_block = tuple(part[:, length:] for part in turned)
        found = layer(hidden, attention_mask=None, position_embeddings=of_block, **{CACHE: cache})
        hidden = found[0] if isinstance(found, tuple) else found
    return drafter.norm(hidden)[:, 0 if anchored else 1 :]


@pytest.mark.parametrize("anchored", [True, False])
@torch.no_grad()
def test_a_block_is_that_of_layers_of_qwen3_over_the_states_of_the_target(anchored):
    drafter, before = layout(sample_from_anchor=anchored), torch.randn(1, 7, 64)
    target = Handed(before)
    state = drafter.follow(target, target, window=4, guidance=1.0)
    count, drawn = drafter.most, []
    tokens, none = torch.zeros(1, 1 + count, dtype=torch.long), torch.full((1, count), -1)
    places = torch.arange(1 + count)[None]
    drafter.draft(state, tokens + 2, none, places, lambda *asked: drawn.append(asked) or asked[1])
    logits, slots = drawn[0]
    wanted = by_transformers(drafter, before, 27, anchored)
    assert drafter.lm_head is not None
    assert torch.allclose(logits, drafter.lm_head(wanted), atol=1e-5) and slots.tolist() == [
        [1, 2, 3, 4][:count]
    ]


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@torch.no_grad()
def test_the_bias_of_dspark_is_of_the_token_before(kind):
    made = layout(
        speculators_model_type="dspark", sample_from_anchor=True, markov_rank=6, markov_head_type=kind
    )
    target = Handed(torch.randn(1, 7, 64))
    state, seen = made.follow(target, target, window=4, guidance=1.0), []
    tokens, none, slots = (
        torch.full((1, 5), 2),
        torch.full((1, 4), -1),
        torch.arange(5)[None],
    )

    def draw(logits: Tensor, at: Tensor) -> Tensor:
        seen.append(logits)
        return at % 3 + 4

    made.draft(state, tokens, none, slots, draw)
    hidden = made.hidden(state, tokens, none, slots[:, :-1], None)
    before = torch.tensor([[2, 5, 6, 4]]) + 25  # the newest token, then what was drawn
    parts: Any = made.markov_head
    vector = parts["markov_w1"].weight[before]
    if kind == "gated":
        vector = vector * torch.sigmoid(parts["gate_proj"](torch.cat([hidden, vector], -1)))
    assert made.lm_head is not None
    wanted = made.lm_head(hidden) + vector @ parts["markov_w2"].weight.T
    assert torch.allclose(torch.cat(seen, 1), wanted, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- folders


def test_a_folder_holds_the_drafter(tmp_path):
    made = layout(speculators_model_type="dspark", markov_rank=6, sample_from_anchor=True)
    made.save_pretrained(tmp_path)
    read = BlockDrafter.from_pretrained(tmp_path)
    assert read.state_dict().keys() == made.state_dict().keys() and read.most == 4
    assert all(torch.equal(value, made.state_dict()[key]) for key, value in read.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    # As `speculators` writes it.
    theirs = {name: value for name, value in config.items() if name != "_class_name"}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    named = load_drafter(tmp_path)  # what `--drafter` reads
    assert all(torch.equal(value, made.state_dict()[key]) for key, value in named.state_dict().items())
    assert config["speculators_model_type"] == "dspark" and config["architectures"] == ["Qwen3DSparkModel"]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


@pytest.mark.parametrize(
    "change, text",
    [
        ({"speculators_model_type": "eagle3"}, "holds a drafter of kind 'eagle3'"),
        ({"aux_hidden_state_layer_ids": [1, 2, 3]}, "does not hold the BlockDrafter.*fc.weight"),
        ({"transformer_layer_config": LAYER | {"layer_types": ["sliding_attention"]}}, "full attention"),
    ],
)
def test_refuses_folders_of_another_kind(tmp_path, change, text):
    layout().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    refuses(ValueError, text, BlockDrafter.from_pretrained, tmp_path)


@pytest.mark.parametrize(
    "given, text",
    [
        (lambda made: tiny_transformer(), "takes a BlockDrafter"),
        (lambda made: made.double(), "in torch.float64, and the model in torch.float32"),
        (lambda made: fresh(tiny_transformer(dim=32), TokenLaw()), "32 numbers, and the model has 16"),
        (lambda made: fresh(tiny_transformer(), LAWS["guided"]), "reads 2 branches, and this decode has 1"),
    ],
)
def test_refuses_a_drafter_of_another_model(given, text):
    made = fresh(tiny_transformer(), TokenLaw())
    refuses(ValueError, text, decode, BlockDraftSampler(4), TokenLaw(), drafter=given(made))


# -------------------------------------------------------------------------------------------------------- training

GUIDED = TokenLaw(guidance_scale=1.5, temperature=0.7)


def trained(out: Path, corrects: bool, steps: int, fail_at: int | None = None) -> BlockDrafter:
    settings = BlockTraining(
        steps=steps, steps_a_round=4, samples=4, batch_size=2, calls=3, learning_rate=3e-3
    )
    model = tiny_transformer()

    def draw(turn: int, sampler: Any, drafter: Any) -> None:
        if turn == fail_at:
            raise KeyboardInterrupt
        generator = seeded(*range(4 * turn, 4 * turn + 4))
        condition = tiny_text_encoder()(PROMPTS)
        sampler(model, condition, law=GUIDED, generator=generator, batch_size=4, drafter=drafter)

    made = fresh(model, GUIDED, corrects=corrects)
    model.requires_grad_(False)
    train_block_drafter(made, draw, GUIDED.temperature, settings, out)
    return made


@pytest.mark.parametrize("corrects", [True, False], ids=["corrector", "layout"])
def test_a_run_that_is_interrupted_goes_on_with_the_same_result(tmp_path, corrects):
    want = trained(tmp_path / "whole", corrects, 8)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", corrects, 8, fail_at=1)
    found = trained(tmp_path / "cut", corrects, 8)
    for key, value in want.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
    saved = BlockDrafter.from_pretrained(tmp_path / "cut" / "drafter")
    law = decode(BlockDraftSampler(6), GUIDED, drafter=saved)
    assert torch.equal(law.tokens, decode(AutoregressiveSampler(), GUIDED).tokens)


@torch.no_grad()
def test_the_labels_are_the_targets_laws_after_the_tokens_that_were_kept():
    """A drafter that knew them would have their entropy for its loss: here it is told them."""
    model = tiny_transformer()
    notes = Recorder(fresh(model, GUIDED), drafts=True)
    final = decode(BlockDraftSampler(6, graph=False), GUIDED, drafter=notes).tokens
    state = model.prefill(tiny_text_encoder()(PROMPTS), batch_size=4, guided=True, window=16)
    slots = torch.arange(15).expand(4, -1)
    laws = (GUIDED(model(state, final[:, :-1], slots), True, slots + 1)).double()  # of slots 1 to 15
    entropy = -(laws.exp() * laws).sum(-1)
    calls = torch.tensor([[0, 1, 2], [2, 1, 0]])
    drafter: Any = notes.drafter
    drafter.hidden = lambda here, tokens, fed, at, old: at

    def told(here: Any, at: Tensor) -> Tensor:
        rows = torch.tensor([1, 1, 1, 3, 3, 3])[:, None]
        return laws[rows, at.clamp(max=14)].float() * GUIDED.temperature

    drafter.logits = told
    found = block_loss(notes, torch.tensor([1, 3]), calls, GUIDED.temperature, 1.0)
    wanted = [
        entropy[row, at - 1]
        for row, own in zip((1, 3), calls.tolist(), strict=True)
        for call in own
        for at in notes.shown[call][2][row, 1:].tolist()
        if at < 16
    ]
    assert float(found) == pytest.approx(float(torch.stack(wanted).mean()), rel=1e-4)


def test_the_command_trains_a_drafter_for_a_language_model_of_codes(tmp_path, monkeypatch):
    """From a folder of transformers to a folder that `accelerate` takes; ids are those of plain decoding.

    A round is of more samples than the default opens a window for.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    LlamaForCausalLM(LlamaConfig(vocab_size=90, **sizes)).save_pretrained(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red circle\n\nblue square .\n")
    given = f"--model {tmp_path / 'model'} --codes 40 50 --end 30 --prompts {tmp_path / 'prompts.txt'} --new_tokens 12"
    small = "--steps 4 --steps_a_round 2 --samples 40 --batch_size 2 --calls 2 --block_size 6"
    for kind in ("True", "False"):
        folder = tmp_path / kind
        line = f"block_drafter {given} {small} --corrects {kind} --out {folder}"
        monkeypatch.setattr("sys.argv", line.split())
        block_drafter.main()
        model: Any = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        inputs = tokenizer(["a red circle", "blue"], return_tensors="pt", padding=True, padding_side="left")
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        drawn = []
        for sampler, drafter in (("autoregressive", None), (BlockDraftSampler(6), folder / "drafter")):
            drafter = None if drafter is None else BlockDrafter.from_pretrained(drafter)
            visual_spec.accelerate(model, sampler, codes=(40, 50), end=30, drafter=drafter)
            asked = dict(do_sample=True, max_new_tokens=12, generator=seeded(0, 1))
            drawn.append(model.generate(**inputs, **asked))
            visual_spec.restore(model)
        assert torch.equal(*drawn) and drawn[0].shape[1] > inputs["input_ids"].shape[1]
