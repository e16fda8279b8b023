"""Training of frames that are filled in: tubes and shares, what the loss reads, resuming, the start from `motion`."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scripts.train import frames, motion
from scripts.train.frames import FrameTraining, drawn_masks, hidden_places, start_from_motion, train_frames
from scripts.train.motion import judge
from tests.helpers.refusals import refuses
from tests.helpers.training import check_training
from visual_spec.models.masked.frames import FrameMaskedTransformer
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.masked.frames import FrameMaskedSampler


def tiny(vq_model) -> tuple[Any, Any]:
    torch.manual_seed(3)
    return frames.new_model(vq_model, 16, 2, 2, 24)


def test_shares_hide_the_places_of_least_noise():
    shares = torch.tensor([[0.5, 0.01, 1.0]])
    noise = torch.tensor([0.3, 0.1, 0.4, 0.2]).expand(1, 3, 4)
    wanted = [[[False, True, False, True], [False, True, False, False], [True] * 4]]
    assert hidden_places(shares, noise).tolist() == wanted


def test_tubes_hide_the_same_places_in_all_frames():
    settings = FrameTraining(least_hidden=0.7, tubes=1.0)
    hidden = drawn_masks(settings, 400, 5, 64, step=3)
    assert hidden.shape == (400, 5, 64) and (hidden == hidden[:, :1]).all()
    shares = hidden[:, 0].double().mean(1)
    assert shares.min() == pytest.approx(round(0.7 * 64) / 64) and shares.max() == 1.0
    # A cosine of a uniform number is below 0.7 in arccos(0.7) / (pi / 2) of the cases, less than the others.
    floor = (shares < 0.71).double().mean().item()
    assert floor == pytest.approx(1 - np.arccos(0.71) * 2 / np.pi, abs=0.08)
    assert len(hidden[:, 0].unique(dim=0)) > 200  # one for each clip, but those that hide all
    assert torch.equal(hidden, drawn_masks(settings, 400, 5, 64, step=3))
    assert not torch.equal(hidden, drawn_masks(settings, 400, 5, 64, step=4))


def test_other_clips_hide_other_places_and_shares_in_every_frame():
    hidden = drawn_masks(FrameTraining(tubes=0.0), 50, 4, 64, step=0)
    assert (hidden.sum(2).double().std(1) > 0).all() and not (hidden == hidden[:, :1]).all((1, 2)).any()
    mixed = drawn_masks(FrameTraining(tubes=0.3), 1000, 3, 64, step=0)
    tubes = (mixed == mixed[:, :1]).all(2).all(1).double().mean().item()
    assert tubes == pytest.approx(0.3, abs=0.05)


def test_the_loss_is_that_of_hidden_places_by_weight(tmp_path, monkeypatch, parts, vq_model):
    """One step, its loss against a computation by hand on the batch of that step."""
    monkeypatch.setattr(frames, "encode_parts", lambda model: parts)
    monkeypatch.setattr(frames, "held_out_loss", lambda *arguments: 0.0)
    settings = FrameTraining(steps=1, batch_size=1, short_frames=4, compile=False, tubes=1.0)
    model, encoder = tiny(vq_model)
    clips = motion.ClipDraws(parts, encoder, motion.MotionTraining())
    words, tokens, dropped, hidden, weights = frames._Draws(clips, settings)(0)
    assert tokens.shape == (4, 4 * 64) and set(weights.unique().tolist()) == {1.0, 4.0}
    with torch.no_grad():
        logits = model.predictions(tokens.masked_fill(hidden, 200), encoder(words), dropped)
        losses = F.cross_entropy(logits[hidden], tokens[hidden], reduction="none")
        expected = (losses * weights[hidden]).sum() / weights[hidden].sum()
    record = train_frames(model, encoder, vq_model, settings, tmp_path)
    assert record["loss"][0][1] == pytest.approx(expected.item(), abs=2e-4)


def test_training_resumes_with_the_same_weights_and_stores_eight_bits(tmp_path, monkeypatch, parts, vq_model):
    monkeypatch.setattr(frames, "encode_parts", lambda model: parts)
    monkeypatch.setattr(frames, "held_out_loss", lambda *arguments: 0.0)
    settings = FrameTraining(steps=4, batch_size=1, short_share=0.5, short_frames=2, compile=False)

    def train(out, every):
        model, encoder = tiny(vq_model)
        return train_frames(model, encoder, vq_model, settings, out, every=every), model, encoder

    saved = {"transformer": FrameMaskedTransformer, "text_encoder": CaptionEncoder}
    check_training(tmp_path, train, 2, every=2, saved=saved)
    model, encoder = tiny(vq_model)
    drawn = judge(
        model, encoder, vq_model, 2, guidance_scale=1.0, sampler=FrameMaskedSampler(1), batch_size=2
    )
    assert drawn["clips"] == 2 and 0 <= drawn["mean_attribute"] <= 1 and "camera" in drawn["attributes"]


def test_the_start_has_layers_and_widest_neurons_of_motion(tmp_path, vq_model):
    torch.manual_seed(9)
    known, known_words = motion.new_model(vq_model, 16, 4, 2)
    known.save_pretrained(tmp_path / "transformer")
    known_words.save_pretrained(tmp_path / "text_encoder")
    model, encoder = tiny(vq_model)
    start_from_motion(model, encoder, tmp_path)
    own, weights = model.transformer, known.state_dict()
    assert torch.equal(own.tok_embeddings.weight[:200], weights["tok_embeddings.weight"])
    assert (own.tok_embeddings.weight[200] == 0).all()
    for name in ("output.weight", "norm.weight", "place_embeddings.1", "cls_embedding.cap_proj.fc2.weight"):
        assert torch.equal(own.state_dict()[name], weights[name])
    for layer, source in enumerate((0, 3)):
        block: Any = own.layers[layer]
        assert torch.equal(block.attention.wqkv.weight, weights[f"layers.{source}.attention.wqkv.weight"])
        w1, w2, w3 = (weights[f"layers.{source}.feed_forward.w{n}.weight"] for n in (1, 2, 3))
        sizes = [w1[n].norm() * w3[n].norm() * w2[:, n].norm() for n in range(len(w1))]
        kept = sorted(sorted(range(len(w1)), key=lambda n: -sizes[n])[:24])
        assert torch.equal(block.feed_forward.w1.weight, w1[kept])
        assert torch.equal(block.feed_forward.w2.weight, w2[:, kept])
    told = ["a small red star moves right quickly and bounces on a plain sky background, camera still"]
    assert torch.equal(encoder(told).features, known_words.eval()(told).features)


def test_a_start_of_another_size_is_refused(tmp_path, vq_model):
    known, known_words = motion.new_model(vq_model, 32, 1, 2)
    known.save_pretrained(tmp_path / "transformer")
    known_words.save_pretrained(tmp_path / "text_encoder")
    model, encoder = tiny(vq_model)
    refuses(ValueError, "dim=32.*16", start_from_motion, model, encoder, tmp_path)
    shallow, encoder = frames.new_model(vq_model, 32, 2, 2, 24)
    refuses(ValueError, "1 layers.*2", start_from_motion, shallow, encoder, tmp_path)
    assert isinstance(known, LlamaGenTransformer) and isinstance(encoder, CaptionEncoder)
