"""Consistency training: its trajectories, its losses beside a straight line, a run that is killed, refused laws."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.train import consistency
from scripts.train.consistency import ConsistencyTraining, consistency_losses, record, train_consistency
from tests.helpers.tiny import seeded, tiny_readers
from tests.helpers.training import check_training, tiny_raster
from visual_spec.data.shapes import held_out_prompts
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise, draw_keys
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

LAW = TokenLaw(guidance_scale=1.5, temperature=0.7)
PROMPTS = held_out_prompts(3)
SHORT = ConsistencyTraining(
    steps=40, batch_size=4, states=2, pictures=8, window=6, learning_rate=1e-2, compile=False
)


def larger(model: Any) -> Any:
    """With laws that differ from slot to slot."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6) if parameter.ndim == 2 else None
    return model


@pytest.fixture(scope="module")
def encoder() -> Any:
    torch.manual_seed(1)
    return tiny_readers()[0]


def straight_laws(model: Any, condition: Any, tokens: list[int]) -> torch.Tensor:
    """The law after each beginning of `tokens`, [1 + n, V], in the model's precision."""
    fed = torch.tensor([[*tokens, 0]])  # the last one is not read
    yes, no = (model.teacher_forced(fed, condition, torch.tensor([dropped]))[0] for dropped in (False, True))
    return ((no + 1.5 * (yes - no)) / 0.7).log_softmax(-1)


@torch.no_grad()
def test_trajectories_end_in_what_plain_decoding_draws_and_every_state_follows_from_the_one_before(encoder):
    model = larger(tiny_raster())
    decodes = record(model, encoder, PROMPTS, LAW, 6, seed=11)
    assert decodes.drafts.shape[2] == 5 and decodes.calls.max() == decodes.starts.shape[1]
    for number, prompt in enumerate(PROMPTS):
        condition = encoder([prompt])
        request: Any = dict(law=LAW, generator=seeded(11 + number), batch_size=1)
        plain = AutoregressiveSampler()(model, condition, **request)
        final = decodes.tokens[number].tolist()
        assert plain.tokens[0].tolist() == final
        fresh = CounterNoise(draw_keys(seeded(11 + number), 1), "cpu")
        noise = fresh.gumbel(torch.arange(22)[None], 16, 0)[0]
        calls = int(decodes.calls[number])
        starts = decodes.starts[number, :calls].tolist()
        drafts = decodes.drafts[number, :calls].tolist()
        assert starts[0] == 1 and calls < 16
        for call in range(calls):
            start, draft = starts[call], drafts[call]
            reach = min(5, 15 - start)
            laws = straight_laws(model, condition, final[:start] + draft[:reach])[start:]
            drawn = (laws + noise[start : start + reach + 1]).argmax(-1).tolist()
            right = next((place for place in range(reach) if drawn[place] != draft[place]), reach)
            assert drawn[: right + 1] == final[start : start + right + 1]
            if call + 1 == calls:
                assert start + right + 1 == 16
                break
            assert starts[call + 1] == start + right + 1
            carried = drawn[right + 1 :]
            assert drafts[call + 1][: len(carried)] == carried


def test_losses_are_those_of_a_straight_line(encoder):
    """Every state as a picture of its own, in float64."""
    model, target = larger(tiny_raster()).double(), larger(tiny_raster()).double()
    with torch.no_grad():
        model.output.weight.mul_(1.3)
    condition = encoder(PROMPTS[:2])
    condition.features = condition.features.double()
    dice = torch.Generator().manual_seed(3)
    tokens = torch.randint(16, (2, 16), generator=dice)
    starts = torch.tensor([[1, 9], [6, 13]])
    longer = torch.cat([tokens, tokens], 1)
    drafts = torch.stack([longer[row].unfold(0, 5, 1)[starts[row]] for row in range(2)])
    wrong = {(0, 0, 0): 4, (0, 0, 3): 1, (0, 1, 2): 5, (1, 0, 4): 2, (1, 1, 1): 3}  # picture, state, place
    for where, off in wrong.items():
        drafts[where] = (drafts[where] + off) % 16
    anchored, consistent = consistency_losses(model, target, condition, LAW, tokens, starts, drafts)

    terms, anchors = [], []
    for picture in range(2):
        own: Any = encoder(PROMPTS[picture : picture + 1])
        own.features = own.features.double()
        fixed = straight_laws(model, own, tokens[picture, :15].tolist())
        before = straight_laws(target, own, tokens[picture, :15].tolist())
        anchors += [-(before[slot].exp() @ fixed[slot]) for slot in range(16)]
        for state in range(2):
            start = int(starts[picture, state])
            fed = tokens[picture, :start].tolist() + drafts[picture, state].tolist()
            reached = straight_laws(model, own, fed[:15])
            bad = next(slot for slot in range(start, 16) if fed[slot] != int(tokens[picture, slot]))
            terms += [
                -(fixed[slot].detach().exp() @ reached[slot]) for slot in range(bad + 1, min(start + 6, 16))
            ]
    assert len(terms) == 5 + 3 + 1 + 1
    want = torch.stack(anchors).mean(), torch.stack(terms).mean()
    assert torch.allclose(torch.stack([anchored, consistent]), torch.stack(want), atol=1e-10)
    for mine, theirs in ((anchored, want[0]), (consistent, want[1])):
        weights = list(model.layers.parameters())
        one = torch.autograd.grad(mine, weights, retain_graph=True)
        other = torch.autograd.grad(theirs, weights, retain_graph=True)
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(one, other, strict=True))
        assert any(float(a.abs().max()) > 1e-3 for a in one)


def test_the_consistency_loss_is_that_of_the_public_code(encoder):
    """Recorded from hao-ai-lab/Consistency_LLM, on laws in place of its logits.

    Its mean also counts the slot of the first wrong draft, where both laws are the same: their entropy, no gradient.
    """
    model, condition = larger(tiny_raster()), encoder(PROMPTS[:1])
    tokens = torch.randint(16, (1, 16), generator=torch.Generator().manual_seed(3))
    drafts = tokens[:, None, 4:9].clone()
    drafts[0, 0, 1] += 5
    drafts[0, 0, 3] += 2
    drafts %= 16
    with torch.no_grad():
        _, loss = consistency_losses(model, model, condition, LAW, tokens, torch.tensor([[4]]), drafts)
        law = straight_laws(model, condition, tokens[0, :15].tolist())[5]
    assert ((4 * loss - law.exp() @ law) / 5).item() == pytest.approx(2.7947707, abs=2e-5)


def test_it_learns_and_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    encoder, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(consistency, "_SHARD", 4)

    def train(out: Path, every: int) -> tuple[dict[str, Any], Any]:
        model = larger(tiny_raster())
        return train_consistency(model, encoder, LAW, SHORT, out, every=every), model

    entry = check_training(tmp_path, train, 6, every=4, saved={"transformer": LlamaGenTransformer})
    before = record(larger(tiny_raster()), encoder, held_out_prompts(16), LAW, 6, 777)
    assert entry["tokens_a_call"] > 256 / (int(before.calls.sum()) + 16)
    assert len(list((tmp_path / "whole").glob("trajectories_*.pt"))) == 2
    trained: Any = LlamaGenTransformer.from_pretrained(tmp_path / "whole" / "transformer")
    # Read, not made.
    parts = consistency.collected(larger(tiny_raster()), encoder, LAW, SHORT, tmp_path / "whole")
    batch = parts[0].tokens.long(), parts[0].starts[:, :2].long(), parts[0].drafts[:, :2].long()
    condition = encoder(parts[0].words)
    first, last = (
        consistency_losses(model, larger(tiny_raster()), condition, LAW, *batch)
        for model in (larger(tiny_raster()), trained)
    )
    assert last[1].item() < first[1].item() - 0.1


@pytest.mark.parametrize("changes", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.9}, {"allowed": (0, 4)}])
def test_a_law_that_takes_mass_from_tokens_is_refused(encoder, changes, tmp_path: Path):
    with pytest.raises(ValueError, match="TokenLaw.*guidance only"):
        train_consistency(tiny_raster(), encoder, TokenLaw(**changes), SHORT, tmp_path)
    assert not list(tmp_path.iterdir())
