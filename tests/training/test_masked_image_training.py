"""Training the masked model of pictures at a tiny size: it learns, resumes, and hides what it says it hides."""

import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from scripts.train import masked_image
from scripts.train.masked_image import MaskedImageTraining, hidden_tokens, new_model, train_masked_image
from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_masked_transformer
from tests.helpers.training import check_training, trained
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training import tokens

SHORT = MaskedImageTraining(steps=24, batch_size=8, scenes=16, learning_rate=3e-3)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    """16 tokens a picture, and few held-out ones."""
    monkeypatch.setattr(masked_image, "tokenize_dataset", partial(tokens.tokenize_dataset, side=4))
    monkeypatch.setattr(masked_image, "held_out_loss", partial(masked_image.held_out_loss, count=8))


def tiny(readers: tuple[CaptionEncoder, VQModel]) -> MaskedImageTransformer:
    torch.manual_seed(1)
    encoder, vq_model = readers
    return new_model(vq_model, encoder, dim=16, num_layers=2, num_heads=2)


def test_it_learns_and_an_interrupted_run_ends_where_an_uninterrupted_one_does(readers, tmp_path: Path):
    encoder, vq_model = readers

    train = trained(lambda: tiny(readers), train_masked_image, encoder, vq_model, SHORT)
    record = check_training(tmp_path, train, 15, every=10, saved={"": MaskedImageTransformer})
    assert record["loss"][-1][1] < record["loss"][0][1] - 0.2


def test_a_run_that_starts_from_another_goes_on_with_its_weights_and_says_so(
    readers, tmp_path: Path, monkeypatch
):
    for part, name in zip(readers, ("text_encoder", "vq_model"), strict=True):
        part.save_pretrained(tmp_path / "shapes" / name)

    def run(name: str, *more: str) -> dict:
        command = f"x --shapes {tmp_path / 'shapes'} --out {tmp_path / name} --steps 3 --batch-size 8"
        command += " --scenes 16 --dim 16 --num-layers 2 --num-heads 2 --judged-prompts 0"
        monkeypatch.setattr(sys, "argv", [*command.split(), *more])
        masked_image.main()
        return json.loads((tmp_path / name / "training.json").read_text())

    first = run("first", "--learning-rate", "0.01")
    second = run("second", "--learning-rate", "0", "--start-from", str(tmp_path / "first"))
    fresh = run("fresh", "--learning-rate", "0")
    assert second["held_out_loss"] == first["held_out_loss"] != fresh["held_out_loss"]
    assert second["started_from"] == {key: value for key, value in first.items() if key != "loss"}


def test_hidden_shares_follow_the_arccos_law():
    shares = torch.linspace(0, 1, 11)
    noise = torch.rand(11, 40, generator=torch.Generator().manual_seed(0))
    hidden = hidden_tokens(shares, noise)
    for row, share in enumerate(shares.tolist()):
        count = min(max(1, math.ceil(40 * 2 / math.pi * math.acos(share) - 1e-4)), 40)
        assert set(hidden[row].nonzero()[:, 0].tolist()) == set(noise[row].argsort()[:count].tolist())


@pytest.mark.slow
def test_several_workers_paint_what_one_paints(readers):
    encoder, vq_model = readers
    one = tokens.tokenize_dataset(vq_model, encoder, 6, 3, side=4)
    two = tokens.tokenize_dataset(vq_model, encoder, 6, 3, side=4, workers=2)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_a_model_for_another_tokenizer_is_refused(readers, tmp_path: Path):
    encoder, vq_model = readers
    other = tiny_masked_transformer(vocab_size=17, prefix_length=20)
    refuses(ValueError, "16.*4 x 4.*17", train_masked_image, other, encoder, vq_model, SHORT, tmp_path)
