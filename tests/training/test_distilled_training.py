"""Training a student at a tiny size: where it starts, what it reads, its loss by hand, and that it resumes."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.helpers.training import check_training, tiny_raster, trained
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.prototype.students.llamagen import LlamaGenStudent
from visual_spec.training import distilled
from visual_spec.training.distilled import (
    Batches,
    DistilledTraining,
    loss_of,
    start_from_teacher,
    train_distilled,
)
from visual_spec.training.distilled_pairs import Pairs

SHORT = DistilledTraining(steps=24, batch_size=8, checked=4, learning_rate=0.03, compile=False)
CODES = torch.nn.functional.normalize(torch.randn(16, 4, generator=torch.Generator().manual_seed(5)), dim=-1)


def teacher(**changes: Any) -> LlamaGenTransformer:
    return tiny_raster(1, **changes)


def student() -> LlamaGenStudent:
    torch.manual_seed(2)
    return start_from_teacher(teacher(), CODES, restart=7)


def pairs_of(encoder: CaptionEncoder, count: int = 20) -> Pairs:
    """Pairs of which a token says in which quadrant the first two numbers of its noise are."""
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(count, 1, 16, 4, generator=generator).half()
    tokens = 2 * (noise[:, 0, :, 0] > 0) + (noise[:, 0, :, 1] > 0)
    other = noise.abs() * noise.sign()  # the same signs, other lengths
    words = encoder.word_ids([f"a large {colour} circle" for colour in ("red", "blue", "green", "black")])
    return Pairs(words.repeat(count // 4, 1), tokens.to(torch.int16), torch.cat([noise, 2 * other], 1))


def test_it_starts_with_what_the_teacher_knows():
    one, model = teacher(), student()
    known, weights = one.state_dict(), model.state_dict()
    own = {"tok_embeddings.weight", "tok_embeddings.bias", "n_d_embed.weight"}
    assert set(weights) - own == set(known) - own
    assert all(torch.equal(weights[key], known[key]) for key in set(known) - own)
    assert model.first_continuous == 16 and model.restart == 7 and not model.config["zero_prefix_keys"]
    # No linear map of codes is nearer to the embeddings: what is left is orthogonal to codes and to a constant.
    left = CODES @ weights["tok_embeddings.weight"].T + weights["tok_embeddings.bias"]
    left = left - known["tok_embeddings.weight"]
    assert (CODES.T @ left).abs().max() < 1e-5 and left.sum(0).abs().max() < 1e-5
    with pytest.raises(ValueError, match="'raster'.*caption_dim=None"):
        start_from_teacher(teacher(num_classes=3, caption_dim=None, prefix_length=1), CODES, 7)
    refuses(ValueError, "teacher.*'nar'", start_from_teacher, teacher(order="nar"), CODES, 7)


def test_a_batch_gives_the_first_tokens_of_half_the_pictures_and_any_noise_of_the_others(readers):
    pairs = pairs_of(readers[0])
    batches = Batches(pairs, CODES, replace(SHORT, batch_size=400))
    words, vectors, tokens, known = batches(3)
    assert all(
        torch.equal(one, two) for one, two in zip(batches(3), (words, vectors, tokens, known), strict=True)
    )
    assert not torch.equal(batches(4)[3], known)
    assert abs(int((known == 0).sum()) - 200) < 45 and known.max() == 15
    given = known[known > 0].double()
    assert abs(given.mean() - 8) < 1 and given.unique().numel() == 15
    seconds = 0
    for row in range(40):
        same = (pairs.tokens.long() == tokens[row]).all(-1) & (pairs.words == words[row]).all(-1)
        (picture,) = same.nonzero()[:, 0].tolist()
        for slot in range(16):
            if slot < known[row]:
                assert torch.equal(vectors[row, slot], CODES[tokens[row, slot]])
            else:
                found = (pairs.noise[picture, :, slot].float() == vectors[row, slot]).all(-1).tolist()
                assert any(found)
                seconds += found[1]
    asked = int((16 - known[:40]).sum())
    assert 0.4 < seconds / asked < 0.6  # both noises, slot by slot


def test_the_loss_is_that_of_the_slots_that_are_not_given(readers):
    encoder, model = deepcopy(readers[0]).double(), student().double()
    words, vectors, tokens, known = Batches(pairs_of(encoder), CODES.double(), SHORT)(0)
    vectors = vectors.double()
    with torch.no_grad():
        loss, entropy = loss_of(model, encoder, CODES.double(), 0.7, words, vectors, tokens, known)
        state = model.prefill(encoder(words), batch_size=8)
        want, far, count = 0.0, 0.0, 0
        for row in range(8):
            one = type(state)(state.prefix[row : row + 1], state.seen[row : row + 1], state.table)
            hidden = model._run(one, vectors[row : row + 1], known[row : row + 1])
            laws = model.output(model.norm(hidden))[0].softmax(-1)
            for slot in range(int(known[row]), 16):
                token = int(tokens[row, slot])
                want -= float(laws[slot, token].log())
                mean = sum(laws[slot, code] * CODES[code].double() for code in range(16))
                far += float(((mean - CODES[token].double()) ** 2).sum())
                count += 1
    assert 0 < count < 8 * 16
    assert float(entropy) == pytest.approx(want / count, abs=1e-9)
    assert float(loss) == pytest.approx(want / count + 0.7 * far / count, abs=1e-6)


def test_it_learns_and_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    readers, tmp_path: Path, monkeypatch
):
    # In float64, and without Muon, which computes in bfloat16: the last bit of a product depends on where in memory its
    # factors lie.
    monkeypatch.setattr(
        distilled,
        "muon_and_adamw",
        lambda blocks, parameters, rate, decay: [torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)],
    )
    encoder, vq_model = (deepcopy(part).double() for part in readers)
    pairs = pairs_of(encoder, 60)

    train = trained(lambda: student().double(), train_distilled, encoder, vq_model, pairs, SHORT)
    record = check_training(tmp_path, train, 15, every=4, saved={"": LlamaGenStudent})
    assert record["loss"][-1][1] < record["loss"][0][1] - 0.5
    assert record["unseen"]["right_from_0"] > 0.4  # by chance a quarter


def test_what_is_checked_was_not_learned_from(readers, tmp_path: Path, monkeypatch):
    encoder, vq_model = readers
    pairs, seen = pairs_of(encoder), []
    found = Batches.of
    monkeypatch.setattr(
        Batches, "of", lambda self, *more: seen.append(self.pairs.tokens) or found(self, *more)
    )
    train_distilled(student(), encoder, vq_model, pairs, replace(SHORT, steps=2), tmp_path)
    learned, checked = seen[0], seen[-1]
    assert torch.equal(torch.cat([learned, checked]), pairs.tokens) and len(checked) == 4
    with pytest.raises(ValueError, match="20 pictures.*20"):
        train_distilled(student(), encoder, vq_model, pairs, replace(SHORT, checked=20), tmp_path)
