"""The LlamaGen that fills in frames: what each slot sees, and a cached decode against one pass over the whole clip."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import condition
from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_frame_transformer
from visual_spec.models.masked.frames import FrameMaskedTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.frames import FrameMaskedSampler


def tiny_frames(**changes) -> FrameMaskedTransformer:
    return tiny_frame_transformer(**changes).double()


def planned_frames(**changes) -> FrameMaskedTransformer:
    """Seven frames: the first, 2, 4 and 6 together, then 1, 3 and 5."""
    return tiny_frames(num_frames=7, key_frames=[2, 4, 6], **changes)


def some_tokens(rows: int, frames: int = 3, hidden: float = 0.4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(12, (rows, 4 * frames), generator=generator)
    return tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < hidden, 12)


def decoded(model: FrameMaskedTransformer, tokens: Tensor, guided: bool, rows: int = 2) -> Tensor:
    """Logits [R, L, V] of groups of frames that are scored one after the other, each written before the next."""
    state, logits = model.prepare(condition(rows), batch_size=rows, guided=guided), {}
    for group in model.frame_groups:
        fed = tokens.unflatten(1, (-1, 4))[:, group].flatten(1)
        model(state, torch.full_like(fed, 12))  # a call leaves nothing behind
        logits |= zip(group, model(state, fed).split(4, 1), strict=True)
        model.write(state, fed)
    return torch.cat([logits[frame] for frame in sorted(logits)], 1)


MODELS = {
    "frame by frame": tiny_frames,
    "key frames": planned_frames,
    "in turn": partial(planned_frames, fill_in_turn=True),
}


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_cached_decode_equals_one_pass(name, guided):
    model = MODELS[name]()
    tokens, nobody = some_tokens(2, model.grid.frames), torch.ones(2, dtype=torch.bool)
    found = decoded(model, tokens, guided)
    assert found.shape == (4 if guided else 2, tokens.shape[1], 12)
    assert torch.allclose(found[:2], model.predictions(tokens, condition(2)), rtol=0, atol=1e-12)
    if guided:
        assert torch.allclose(found[2:], model.predictions(tokens, condition(2), nobody), rtol=0, atol=1e-12)


def test_a_decode_of_the_sampler_equals_full_recomputation(monkeypatch):
    """Every call of a whole guided decode, with a hidden history, against one pass over all that was fed so far."""
    model, calls = tiny_frames(), []
    forward = model.forward

    def noted(state, tokens):
        found = forward(state, tokens)
        calls.append((state.frames, tokens.clone(), found))
        return found

    monkeypatch.setattr(model, "forward", noted)
    result = FrameMaskedSampler(3, 0.5)(
        model, condition(2), law=TokenLaw(guidance_scale=2.0), batch_size=2,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    hidden = torch.tensor([True, False, True, False])
    history = result.tokens.unflatten(1, (3, 4)).masked_fill(hidden, 12)
    assert len(calls) == 9
    nobody = torch.ones(2, dtype=torch.bool)
    for frame, tokens, logits in calls:
        past = history[:, :frame].flatten(1)
        with_text = model.predictions(torch.cat([past, tokens], 1), condition(2))
        without = model.predictions(torch.cat([torch.full_like(past, 12), tokens], 1), condition(2), nobody)
        wanted = torch.cat([with_text, without])[:, -4:]
        assert torch.allclose(logits, wanted, rtol=0, atol=1e-12)


def test_the_mask_is_a_token_of_its_own():
    model = tiny_frames()
    hidden = torch.full((1, 4), 12)
    with torch.no_grad():
        before = model.predictions(hidden, condition(1))
        model.transformer.tok_embeddings.weight[12] += 1.0
        assert not torch.allclose(model.predictions(hidden, condition(1)), before)
        shown = torch.arange(4)[None]
        before = model.predictions(shown, condition(1))
        model.transformer.tok_embeddings.weight[12] += 1.0
        assert torch.equal(model.predictions(shown, condition(1)), before)


def test_first_frames_are_those_of_longer_clips():
    model, tokens = tiny_frames(), some_tokens(2)
    short = model.first_frames(2)
    assert short.grid.frames == 2 and model.grid.frames == 3 and model.first_frames(3) is model
    assert torch.equal(decoded(short, tokens[:, :8], False), decoded(model, tokens, False)[:, :8])
    refuses(ValueError, "1 to 3", model.first_frames, 4)


def test_selected_samples_go_on():
    model, tokens = tiny_frames(), some_tokens(2)
    state = model.prepare(condition(2), batch_size=2, guided=True)
    model.write(state, tokens[:, :4])
    expected = model(state, tokens[:, 4:8])
    state.select(torch.tensor([1]))
    assert torch.allclose(model(state, tokens[1:, 4:8]), expected[[1, 3]], rtol=0, atol=1e-12)


def test_classes_condition_as_well():
    model = tiny_frames(num_classes=5, caption_dim=None, prefix_length=1)
    tokens, labels = some_tokens(2), torch.tensor([0, 3])
    state = model.prepare(labels, batch_size=2, guided=False)
    expected = model.predictions(tokens[:, :4], labels)
    assert torch.allclose(model(state, tokens[:, :4]), expected, rtol=0, atol=1e-12)


def test_a_single_frame_is_refused():
    refuses(ValueError, "at least 2", tiny_frames, num_frames=1)


def test_key_frames_say_what_is_drawn_when_and_what_a_frame_sees():
    model = planned_frames(num_layers=1)  # with more, key frames pass on what they see
    assert model.frame_groups == [[0], [2, 4, 6], [1, 3, 5]]
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(12, (1, 28), generator=generator)
    before, seen = model.predictions(tokens, condition(1)), []
    for frame in range(7):
        other = tokens.clone()
        other[0, 4 * frame] = (tokens[0, 4 * frame] + 1) % 12
        moved = (model.predictions(other, condition(1)) - before).abs().amax(-1)[0] > 1e-9
        assert (moved.unflatten(0, (7, 4)).all(1) == moved.unflatten(0, (7, 4)).any(1)).all()
        seen.append(moved.unflatten(0, (7, 4)).all(1).tolist())
    # Of each frame, those that it sees; 1 and 3 do not see the key frames after their end, nor the other parts.
    keys = {0, 2, 4, 6}
    wanted = [{0}, {0, 1, 2}, keys, {0, 2, 3, 4}, keys, {0, 2, 4, 5, 6}, keys]
    assert [{f for f in range(7) if seen[f][row]} for row in range(7)] == wanted
    # The release's order (Tele-AI/MMPL, `clean_steps`): plans, then parts in turn, which see the parts before.
    turn = tiny_frames(num_frames=21, key_frames=[1, 2, 3, 10, 11, 12, 19, 20], fill_in_turn=True)
    assert turn.frame_groups[2:] == [[*range(4, 10)], [*range(13, 19)]]
    sees = [set(row.nonzero()[:, 0].tolist()) for row in turn.seen_frames()]
    assert sees[5] == {*range(13)} and sees[14] == {*range(21)}
    assert sees[11] == {0, 1, 2, 3, 10, 11, 12, 19, 20}


def test_key_frames_that_fit_no_clip_are_refused(tmp_path):
    for keys in ([0, 6], [2, 4], [4, 2, 6], [2, 7]):
        refuses(ValueError, "7 frames.*1.*6", tiny_frames, num_frames=7, key_frames=keys)
    refuses(ValueError, "fill_in_turn=True without key_frames", tiny_frames, fill_in_turn=True)
    refuses(ValueError, "num_frames=3.*7", planned_frames().first_frames, 3)
    planned_frames().save_pretrained(tmp_path)
    assert FrameMaskedTransformer.from_pretrained(tmp_path).frame_groups == [[0], [2, 4, 6], [1, 3, 5]]
