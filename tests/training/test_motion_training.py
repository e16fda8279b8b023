"""Training of `motion`: tokens by parts, the weights of places, resuming, 8 bits, and the start from `shapes`."""

from typing import Any

import numpy as np
import pytest
import torch

from scripts.train import motion
from scripts.train.motion import (
    MotionTraining,
    judge,
    motion_vocabulary,
    place_weights,
    start_from_motion,
    start_from_shapes,
    store,
    train_motion,
)
from tests.helpers.nar import scores
from tests.helpers.refusals import refuses
from tests.helpers.training import check_training, tiny_raster
from visual_spec.data.motion import Clip, MovingShape, sample_clips
from visual_spec.data.motion_parser import parse_caption
from visual_spec.data.shapes import BACKGROUND_COLOURS, OBJECT_COLOURS, SHAPES
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.orders.tables import order_of


def tiny(vq_model) -> tuple[Any, Any]:
    torch.manual_seed(3)
    return motion.new_model(vq_model, 16, 2, 2)


def test_tokens_move_with_their_shape_and_rest_where_nothing_moves(parts):
    mover = MovingShape("star", "red", "small", 16, 16, "right", "quickly", "bounces")
    other = MovingShape("cross", "blue", "small", 32, 48)
    frames = parts.encode(Clip((mover, other), "sky", "plain"))
    kind = list(BACKGROUND_COLOURS).index("sky"), 0, 0
    red, blue = list(OBJECT_COLOURS).index("red"), list(OBJECT_COLOURS).index("blue")
    star = parts.shapes[*kind, SHAPES.index("star"), red, 0, 1:5, 1:5]
    cross = parts.shapes[*kind, SHAPES.index("cross"), blue, 0, 1:5, 1:5]
    for frame, (x, _) in enumerate(mover.path() // 8):
        assert np.array_equal(frames[frame, 0:4, x - 2 : x + 2], star)
        assert np.array_equal(frames[frame, 4:8, 2:6], cross)
    outside = np.ones((8, 8), bool)
    outside[0:4], outside[4:8, 2:6] = False, False
    assert (frames[:, outside] == parts.ground[kind[0], 0, 0]).all()


def test_stripes_slide_under_a_shape_that_stays(parts):
    shape = MovingShape("circle", "green", "large", 32, 24)
    frames = parts.encode(Clip((shape,), "mint", "striped", "pans left"), 7)
    ground = parts.ground[list(BACKGROUND_COLOURS).index("mint"), 1]
    for frame in range(7):
        assert frames[frame, 7].tolist() == [ground[(column - frame) % 3] for column in range(8)]
    # A large shape has 6 x 6 tokens, whose codes depend on the stripes behind them.
    assert np.array_equal(frames[0], frames[3]) and np.array_equal(frames[1], frames[4])
    assert not np.array_equal(frames[0, 0:6, 1:7], frames[1, 0:6, 1:7])


def test_a_large_shape_at_the_border_is_cut(parts):
    shape = MovingShape("circle", "green", "large", 16, 48)
    frame = parts.encode(Clip((shape,), "mint", "plain"), 1)[0]
    part = parts.shapes[
        list(BACKGROUND_COLOURS).index("mint"), 0, 0, 0, list(OBJECT_COLOURS).index("green"), 1
    ]
    assert np.array_equal(frame[3:8, 0:5], part[0:5, 1:6])


def test_encoded_parts_are_where_the_encoder_sees_them(vq_model):
    """The tokens around a shape are those of a picture that continues the frame beyond its border."""
    from scripts.train import motion_tokens
    from visual_spec.data.shapes import paint_shape

    background = BACKGROUND_COLOURS["mint"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(motion_tokens, "BACKGROUND_COLOURS", {"mint": background})
        patch.setattr(motion_tokens, "OBJECT_COLOURS", {"blue": (40, 90, 205)})
        patch.setattr(motion_tokens, "SHAPES", ("star",))
        parts = motion_tokens.encode_parts(vq_model)
        clip = Clip((MovingShape("star", "blue", "large", 40, 24),), "mint", "striped", "pans right")
        frames = parts.encode(clip, 3)
    y, x = np.mgrid[0:96, 0:96].astype(np.float32) + 0.5
    for frame in range(3):
        # The shape is in the middle, at 48: columns of tokens of the frame are one to the left of the picture's.
        dark = (x // 8 - 1 + frame) % 3 == 0
        canvas = np.where(dark, 0.88, 1.0)[..., None] * np.array(background, np.float32)
        canvas = paint_shape(canvas, x - 48, y - 48, "star", "blue", 20)
        pixels = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)[None]
        whole = vq_model.encode_tokens(motion_tokens.to_signed(pixels)).view(12, 12).numpy()
        assert np.array_equal(frames[frame, 0:6, 2:8], whole[3:9, 3:9])


def test_weights_look_only_at_what_the_model_has_seen(parts):
    mover = MovingShape("star", "red", "small", 16, 16, "right", "quickly", "stops")
    frames = torch.from_numpy(parts.encode(Clip((mover,), "sky", "plain"), 4)).long()[None]
    ground = torch.from_numpy(parts.ground.reshape(-1)).long()
    weights = place_weights(frames, ground, 3.0).view(4, 8, 8)
    assert (weights[0] == 3).all()
    near = torch.ones(8, 8)
    near[0:5, 0:5] = 3  # frame 0 has the star in rows and columns 0 to 3; one token around it counts
    assert torch.equal(weights[1], near)
    changed = frames.clone()
    changed[:, 1] = 0
    assert torch.equal(place_weights(changed, ground, 3.0).view(4, 8, 8)[1], near)


def test_the_vocabulary_holds_every_caption():
    from visual_spec.data.motion import caption

    encoder = CaptionEncoder(motion_vocabulary(), dim=8, num_layers=0, num_heads=2, max_words=22)
    captions = [caption(clip) for clip in sample_clips(300, 0)]
    assert encoder.unknown_words(captions) == []
    assert max((encoder.word_ids([text]) != 0).sum() for text in captions) == 22
    assert all(parse_caption(text) for text in captions)


def test_training_resumes_with_the_same_weights_and_stores_eight_bits(tmp_path, monkeypatch, parts, vq_model):
    monkeypatch.setattr(motion, "encode_parts", lambda model: parts)
    monkeypatch.setattr(motion, "_held_out_loss", lambda *arguments: 0.0)
    settings = MotionTraining(steps=4, batch_size=1, short_share=0.5, short_frames=2, compile=False)

    def train(out, every):
        model, encoder = tiny(vq_model)
        return train_motion(model, encoder, vq_model, settings, out, every=every), model, encoder

    saved = {"transformer": LlamaGenTransformer, "text_encoder": CaptionEncoder}
    check_training(tmp_path, train, 2, every=2, saved=saved)
    model, encoder = (kind.from_pretrained(tmp_path / "whole" / name) for name, kind in saved.items())
    for value in (*model.state_dict().values(), *encoder.state_dict().values()):
        assert value.ndim != 2 or torch.equal(value.float(), value.to(torch.float8_e4m3fn).float())
    drawn = judge(model, encoder, vq_model, 2, guidance_scale=1.0, batch_size=2)
    assert drawn["clips"] == 2 and 0 <= drawn["mean_attribute"] <= 1 and "camera" in drawn["attributes"]


def test_a_near_to_far_model_starts_as_motion_learns_resumes_and_draws(
    tmp_path, monkeypatch, parts, vq_model
):
    monkeypatch.setattr(motion, "encode_parts", lambda model: parts)
    held_out_loss = motion._held_out_loss
    monkeypatch.setattr(motion, "_held_out_loss", lambda *arguments: 0.0)
    torch.manual_seed(3)
    raster, words = motion.new_model(vq_model, 16, 4, 2)
    store(raster, words, tmp_path / "motion")
    model, encoder = start_from_motion(tmp_path / "motion", 2)
    known, own = raster.state_dict(), model.state_dict()
    assert model.trained_order == "nar" and model.num_answers == 3 and len(model.layers) == 4
    for key, value in own.items():
        assert torch.equal(value, known[key.removeprefix("medusa_").removeprefix("later_")]), key
    settings = MotionTraining(
        steps=12, batch_size=1, short_share=0.5, short_frames=2, hidden_clips=0, compile=False
    )

    def train(out, every):
        model, encoder = start_from_motion(tmp_path / "motion", 2)
        return train_motion(model, encoder, vq_model, settings, out, every=every), model

    check_training(tmp_path, train, 8, every=4, saved={"transformer": LlamaGenTransformer})
    assert not (tmp_path / "whole" / "text_encoder").exists()  # that of motion did not learn
    trained: Any = LlamaGenTransformer.from_pretrained(tmp_path / "whole" / "transformer")
    draws = motion.ClipDraws(parts, encoder, settings)
    few = draws.frames(2, 777, 16, held_out=True)
    monkeypatch.setattr(draws, "frames", lambda *arguments, **more: few)
    with torch.no_grad():
        tokens, steps = few[1].flatten(1), order_of("nar", trained.grid).steps[1:]
        logits = scores(trained, encoder(few[0]), tokens, steps, guided=False)
    want = float(torch.nn.functional.cross_entropy(logits.mT, tokens))
    assert held_out_loss(trained, encoder, draws) == pytest.approx(want, abs=1e-6)
    result = judge(trained, encoder, vq_model, 1, guidance_scale=1.0)
    assert result["clips"] == 1
    refuses(ValueError, "num_layers=3.*4", start_from_motion, tmp_path / "motion", 3)


def test_the_start_knows_the_words_and_layers_of_shapes(tmp_path, vq_model):
    torch.manual_seed(9)
    known_words = CaptionEncoder(["red", "of", "star"], dim=128, num_layers=0, num_heads=4, max_words=20)
    known: Any = tiny_raster(9, vocab_size=200, num_layers=1, grid_size=16, caption_dim=128)
    known.save_pretrained(tmp_path / "transformer")
    known_words.save_pretrained(tmp_path / "text_encoder")
    model, encoder = tiny(vq_model)
    start_from_shapes(model, encoder, tmp_path)
    words = list(encoder.config["vocabulary"])
    learnt = encoder.word_embedding.weight[2 + words.index("star")]
    assert torch.equal(learnt, known_words.word_embedding.weight[2 + 2])
    assert torch.equal(model.layers[0].attention.wqkv.weight, known.layers[0].attention.wqkv.weight)
    assert torch.equal(model.output.weight, known.output.weight)
    # The second layer starts without effect.
    assert not model.layers[1].attention.wo.weight.any() and not model.layers[1].feed_forward.w2.weight.any()
    other, other_words = motion.new_model(vq_model, 32, 1, 2)
    refuses(ValueError, "dim=16.*32", start_from_shapes, other, other_words, tmp_path)
