"""LlamaGen over frames: its rotary table, its place embeddings, and decoding in windows that cross frames."""

import pytest
import torch

from tests.helpers.llamagen import condition
from tests.helpers.tiny import tiny_transformer
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.next_token.llamagen_blocks import rotary_table


def tiny_video(**changes):
    model = tiny_transformer(num_frames=3, grid_size=2, zero_prefix_keys=False, **changes)
    with torch.no_grad():
        for table in model.place_embeddings:
            torch.nn.init.normal_(table, std=0.5)
    return model.double().eval()


def test_the_table_rotates_by_frame_row_and_column():
    table = rotary_table(4, 48, dtype=torch.float64, frames=3)
    flat = rotary_table(4, 48, dtype=torch.float64)
    assert table.shape == (48, 24, 2)
    frames = table.view(3, 16, 24, 2)
    by_frame = [9, 10, 11, 21, 22, 23]
    others = [i for i in range(24) if i not in by_frame]
    for frame in range(3):
        assert torch.equal(frames[frame][:, others], flat[:, others])
        for place, rate in zip([9, 21, 10, 22, 11, 23], [1, 0.5, 0.25, 0.125, 0.0625, 0.03125], strict=True):
            angle = torch.tensor(rate * frame, dtype=torch.float64)
            expected = torch.stack([angle.cos(), angle.sin()]).expand(16, 2)
            assert torch.allclose(frames[frame][:, place], expected, atol=1e-12)


def test_windows_across_frames_equal_one_pass_over_the_clip():
    model = tiny_video()
    assert model.grid == TokenGrid(2, 2, 3)
    tokens = torch.randint(12, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = model.teacher_forced(tokens, condition(2))
    for window in (1, 3, 7):
        state = model.prefill(condition(2), batch_size=2, guided=False, window=window)
        found = [state.logits[:, None]]
        for start in range(0, 11, window):
            slots = torch.arange(start, min(11, start + window)).expand(2, -1)
            found.append(model(state, tokens.gather(1, slots), slots))
        assert torch.allclose(torch.cat(found, 1), expected, atol=1e-12)


@pytest.mark.parametrize("table", [0, 1, 2])
def test_every_place_embedding_matters(table):
    model = tiny_video()
    tokens = torch.zeros(1, 12, dtype=torch.long)
    before = model.teacher_forced(tokens, condition(1))
    with torch.no_grad():
        model.place_embeddings[table][-1] += 1.0
    after = model.teacher_forced(tokens, condition(1))
    changed = (after != before).any(-1)[0]
    # From the first slot of the last frame, row or column on; the last token feeds nothing.
    first = {0: 8, 1: 2, 2: 1}[table]
    assert not changed[: first + 1].any() and changed[first + 1 :].all()


def test_hidden_tokens_show_their_place_only():
    model = tiny_video()
    hidden = torch.zeros(1, 11, dtype=torch.bool)
    hidden[0, 4] = True
    tokens = torch.arange(12)[None]
    other = tokens.clone()
    other[0, 4] = 0
    first, second = (model.teacher_forced(t, condition(1), hidden_tokens=hidden) for t in (tokens, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, model.teacher_forced(tokens, condition(1)))
