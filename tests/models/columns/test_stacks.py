"""The stack pattern: calls of the model beside a forward written out, position by position, without cache or mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.musicgen import CODES, IDS, MASK, greedy, musicgen, random_codes
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition, text_condition
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler

BOOKS, FRAMES = 4, 3
STACK = CodebookPattern.stack(BOOKS)
STEPS = BOOKS * FRAMES


def attend(block: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Attention of one position [dim] to positions [N, dim], four heads."""
    q = block.q_proj(queries).view(4, -1)
    k, v = block.k_proj(keys).view(len(keys), 4, -1), block.v_proj(keys).view(len(keys), 4, -1)
    shares = (torch.einsum("hd,nhd->hn", q, k) / q.shape[1] ** 0.5).softmax(-1)
    return block.out_proj(torch.einsum("hn,nhd->hd", shares, v).flatten())


def straight(whole: Any, codes: Tensor, states: Tensor) -> Tensor:
    """Logits [S, K, V] of one clip [K, T], position by position; `states [N, dim]` are those of the text.

    Place 0 is empty. Place p is fed the stack of its frame up to its level, and sees place 0, the whole stacks of the
    frames before, and the stacks of its own frame.
    """
    decoder = whole.decoder.model.decoder
    hidden = []
    for place in range(STEPS):
        frame, level = divmod(place - 1, BOOKS)
        column = [int(codes[k, frame]) if place and k <= level else CODES for k in range(BOOKS)]
        parts = [
            table(torch.tensor(token)) for table, token in zip(decoder.embed_tokens, column, strict=True)
        ]
        hidden.append(sum(parts) + decoder.embed_positions.weights[place])
    for layer in decoder.layers:
        normed = [layer.self_attn_layer_norm(one) for one in hidden]
        found = []
        for place, own in enumerate(hidden):
            frame = (place - 1) // BOOKS
            seen = [0, *(BOOKS * (earlier + 1) for earlier in range(frame))]
            seen += [other for other in range(1, place + 1) if (other - 1) // BOOKS == frame]
            one = own + attend(layer.self_attn, normed[place], torch.stack([normed[other] for other in seen]))
            one = one + attend(layer.encoder_attn, layer.encoder_attn_layer_norm(one), states)
            inner = layer.activation_fn(layer.fc1(layer.final_layer_norm(one)))
            found.append(one + layer.fc2(inner))
        hidden = found
    features = [decoder.layer_norm(one) for one in hidden]
    return torch.stack([torch.stack([head(one) for head in whole.decoder.lm_heads]) for one in features])


def expected(whole: Any, condition: Any, codes: Tensor, guided: bool) -> Tensor:
    found = []
    for null in [False, True] if guided else [False]:
        for row, clip in enumerate(codes):
            words = condition.features[row, condition.mask[row].bool()]
            found.append(straight(whole, clip, whole.enc_to_dec_proj(words) * (not null)))
    return torch.stack(found)


def sequence(model: MusicgenColumnModel, codes: Tensor) -> Tensor:
    return model.pattern.apply(codes, model.special_id).transpose(1, 2)


@pytest.mark.parametrize("width", [1, 3, STEPS - 1])
@pytest.mark.parametrize("guided", [False, True])
@torch.no_grad()
def test_calls_compute_what_the_pattern_says(width, guided):
    """Window by window, after a first try with other tokens: what a step is fed later replaces it."""
    whole = musicgen()
    condition = text_condition(whole, IDS, MASK)
    model = MusicgenColumnModel(whole, FRAMES, pattern=STACK)
    codes = random_codes(model, 3)
    want, columns = expected(whole, condition, codes, guided), sequence(model, codes)
    wrong = sequence(model, (codes + 1) % CODES)
    state = model.prefill(condition, batch_size=3, guided=guided, window=width)
    found = [state.logits[:, None]]
    for first in range(0, STEPS - 1, width):
        steps = torch.arange(first, min(first + width, STEPS - 1)).expand(3, -1)
        model(state, wrong[:, steps[0]], steps)
        found.append(model(state, columns[:, steps[0]], steps))
    assert (torch.cat(found, 1) - want).abs().max() < 1e-10
    assert (want[:, 1:] - want[:, :-1]).abs().max() > 1e-2


@torch.no_grad()
def test_whole_clips_in_one_pass_and_a_prompt():
    whole = musicgen()
    text = text_condition(whole, IDS, MASK)
    model = MusicgenColumnModel(whole, FRAMES, pattern=STACK)
    codes = random_codes(model, 3)
    want = expected(whole, text, codes, False)
    found = model.teacher_forced(codes, text)
    books = torch.arange(BOOKS)
    for frame in range(FRAMES):
        assert (found[:, :, frame] - want[:, BOOKS * frame + books, books]).abs().max() < 1e-10
    on = MusicgenColumnModel(whole, FRAMES, prompt_frames=1, pattern=STACK)
    given = MusicCondition(text.features, text.mask, codes=codes[:, :, :1])
    state = on.prefill(given, batch_size=3, guided=False, window=STEPS)
    assert (state.logits - want[:, BOOKS]).abs().max() < 1e-10
    steps = torch.arange(STEPS - BOOKS - 1).expand(3, -1)
    logits = on(state, sequence(on, codes)[:, BOOKS:-1], steps)
    assert (logits - want[:, BOOKS + 1 :]).abs().max() < 1e-10


@torch.no_grad()
def test_samplers_draw_the_likeliest_codes_frame_by_frame():
    whole = musicgen()
    condition = text_condition(whole, IDS, MASK)
    model = MusicgenColumnModel(whole, FRAMES, pattern=STACK)
    codes = torch.zeros(3, BOOKS, FRAMES, dtype=torch.long)
    for step in range(STEPS):
        frame, level = divmod(step, BOOKS)
        given, other = expected(whole, condition, codes, True)[:, step, level].chunk(2)
        codes[:, level, frame] = (other + 3.0 * (given - other)).argmax(-1)
    assert torch.equal(greedy(model, condition, 3.0, 3), codes)
    fast = ColumnJacobiSampler(window=5)(
        model, condition, law=TokenLaw(temperature=0.0, guidance_scale=3.0), batch_size=3
    )
    assert torch.equal(model.codes(fast.tokens, condition), codes)
    assert len(codes.unique()) > 3


# -- stack-and-delay: four frames side by side -------------------------------------------------------------------------

ORDER, LONG = (0, 2, 4, 1, 3), 7  # the last block is cut off: frames 5, 6
DELAYED = CodebookPattern.stack_delay(BOOKS, ORDER)
DECODED = [0, 2, 4, 1, 3, 5, 6]


def side_by_side(whole: Any, codes: Tensor, states: Tensor) -> Tensor:
    """Logits [T + 3, K, V] of one clip [K, T], position by position, where codebook k of step s is of the k-th
    youngest frame.

    A position is (frame, level) of a stack, or ("empty", place). It is made in the step that decoded its level, and
    sees the whole stacks, and those of its frame, that were made by then.
    """
    decoder = whole.decoder.model.decoder
    made: dict[Any, int] = {("empty", 0): 0}  # position: its place, in the order they are made
    asked: list[list[Any]] = []  # by step, the position that predicts each codebook
    for step in range(LONG + BOOKS - 1):
        row: list[Any] = []
        for level in range(BOOKS):
            at = step - level  # in the order of decoding
            if level:
                row.append((DECODED[at], level - 1) if 0 <= at < LONG else None)
            else:
                last = at - BOOKS
                row.append((DECODED[last], BOOKS - 1) if 0 <= last < LONG else ("empty", step))
        asked.append(row)
        made |= {("empty", step): step} if step < BOOKS else {}
        made |= {(DECODED[step - k], k): step + 1 for k in range(BOOKS) if 0 <= step - k < LONG}
    embedded = {}
    for (frame, level), place in made.items():
        column = [CODES if frame == "empty" or k > level else int(codes[k, frame]) for k in range(BOOKS)]
        parts = [
            table(torch.tensor(token)) for table, token in zip(decoder.embed_tokens, column, strict=True)
        ]
        embedded[frame, level] = sum(parts) + decoder.embed_positions.weights[place]
    for layer in decoder.layers:
        normed = {one: layer.self_attn_layer_norm(value) for one, value in embedded.items()}
        outputs = {}
        for one, value in embedded.items():
            earlier = [other for other, place in made.items() if place <= made[one] and other[0] != "empty"]
            seen = [other for other in earlier if other[1] == BOOKS - 1 or other[0] == one[0]]
            seen += [("empty", 0)] + ([one] if one[0] == "empty" and one[1] else [])
            value = value + attend(
                layer.self_attn, normed[one], torch.stack([normed[other] for other in seen])
            )
            value = value + attend(layer.encoder_attn, layer.encoder_attn_layer_norm(value), states)
            inner = layer.activation_fn(layer.fc1(layer.final_layer_norm(value)))
            outputs[one] = value + layer.fc2(inner)
        embedded = outputs
    nothing = torch.zeros(CODES, dtype=torch.float64)
    return torch.stack(
        [
            torch.stack(
                [
                    nothing if one is None else head(decoder.layer_norm(embedded[one]))
                    for one, head in zip(row, whole.decoder.lm_heads, strict=True)
                ]
            )
            for row in asked
        ]
    )


@pytest.mark.parametrize("width", [1, 4])
@torch.no_grad()
def test_streams_compute_what_the_pattern_says(width):
    """Call after call, each after a try with other tokens; all at once; and after a prompt."""
    whole = musicgen()
    condition = text_condition(whole, IDS, MASK)
    model = MusicgenColumnModel(whole, LONG, pattern=DELAYED)
    codes = random_codes(model, 3)
    rows = [condition.features[row, condition.mask[row].bool()] for row in range(3)]
    want = torch.stack(
        [side_by_side(whole, c, whole.enc_to_dec_proj(row)) for c, row in zip(codes, rows, strict=True)]
    )
    valid = DELAYED.valid(LONG).T
    want, columns = want * valid[..., None], sequence(model, codes)
    wrong = sequence(model, (codes + 1) % CODES)
    assert model.num_steps == LONG + BOOKS - 1
    state = model.prefill(condition, batch_size=3, guided=False, window=width)
    outputs = [state.logits[:, None]]
    for first in range(0, model.num_steps - 1, width):
        steps = torch.arange(first, min(first + width, model.num_steps - 1)).expand(3, -1)
        model(state, wrong[:, steps[0]], steps)
        outputs.append(model(state, columns[:, steps[0]], steps))
    assert ((torch.cat(outputs, 1) - want) * valid[..., None]).abs().max() < 1e-10
    forced = model.teacher_forced(codes, condition)
    assert (forced - DELAYED.revert(want.transpose(1, 2))).abs().max() < 1e-10
    on = MusicgenColumnModel(whole, LONG, prompt_frames=3, pattern=DELAYED)
    start = on.first_step  # frame 4 is decoded before frame 1
    assert start == 2
    prompt = MusicCondition(condition.features, condition.mask, codes=codes[:, :, :3])
    state = on.prefill(prompt, batch_size=3, guided=False, window=on.grid.width)
    steps = torch.arange(on.grid.width - 1).expand(3, -1)
    logits = torch.cat([state.logits[:, None], on(state, columns[:, start:-1], steps)], 1)
    # What the prompt gives later is not known before: the frames of the prompt are fed in their own steps.
    assert ((logits - want[:, start:]) * valid[start:, :, None]).abs().max() < 1e-10


def test_other_stacked_patterns_are_refused():
    other = CodebookPattern((0, 0), (0, 0), (0, 0), stacked=True)
    with pytest.raises(ValueError, match=r"CodebookPattern\.stack"):
        MusicgenColumnModel(musicgen(codebooks=2), FRAMES, pattern=other)
