"""Policies of a frame cache, against plain lists of frames."""

import pytest
import torch

from tests.helpers.refusals import refuses
from visual_spec.models.video.frame_cache import (
    POLICIES,
    DeepForcing,
    FrameCache,
    Full,
    FutureAnchor,
    SinkWindow,
    Sliding,
)

EACH, BATCH = 3, 2  # tokens of a frame; samples


class Plain:
    """A cache as one list a sample: (token, the frame it lies at). Token t was drawn as place t % EACH of a frame."""

    def __init__(self):
        self.rows = [[] for _ in range(BATCH)]

    def append(self, start, chunk):
        tokens = [
            (frame * EACH + place, frame) for frame in range(start, start + chunk) for place in range(EACH)
        ]
        for row in self.rows:
            row.extend(tokens)

    def make_room(self, policy, start, chunk, table):
        self.rows = [self.cut(policy, row, start, chunk, table[b]) for b, row in enumerate(self.rows)]

    def cut(self, policy, row, start, chunk, table):
        frames, end = len(row) // EACH, start + chunk

        def last(count):
            return row[len(row) - count * EACH :]

        def at(tokens, frame):
            return [(token, frame + index // EACH) for index, (token, _) in enumerate(tokens)]

        if isinstance(policy, Full):
            return row
        if isinstance(policy, Sliding):
            return last(min(policy.window - chunk, frames))
        if isinstance(policy, FutureAnchor):
            most = policy.anchors + policy.window - policy.anchors - chunk
            rest = row[policy.anchors * EACH :] if frames <= most else last(most - policy.anchors)
            return at(row[: policy.anchors * EACH], end - 1 + policy.ahead) + rest
        if frames + chunk <= policy.window:
            return row
        sink = row[: policy.sink * EACH]
        if isinstance(policy, SinkWindow):
            if policy.sink_gap is not None:
                sink = at(sink, max(end - policy.window - policy.sink_gap, 0))
            return sink + last(policy.window - policy.sink - chunk)
        recent = last(policy.recent - chunk)
        candidates = row[policy.sink * EACH : len(row) - len(recent)]
        count = (policy.budget - policy.sink - policy.recent) * EACH
        best = sorted(candidates, key=lambda held: -table[held[0]])[:count]
        selected = [held for held in candidates if held in best]
        if policy.realign_selected:
            selected = at(selected, end - policy.budget + policy.sink)
        return at(sink, max(end - policy.budget - policy.sink_gap, 0)) + selected + recent


def tokens_of(start, chunk):
    """Keys [BATCH, n, 1, 1] that are the token's number, values its negative, places, as a model would append them."""
    number = torch.arange(start * EACH, (start + chunk) * EACH)
    places = torch.stack([number // EACH, number % EACH, number % EACH], -1)
    keys = number.double().view(1, -1, 1, 1).expand(BATCH, -1, -1, -1)
    return keys, -keys, places.expand(BATCH, -1, -1)


def check_together(cache, plain):
    keys, values = cache.keys[:, :, 0, 0], cache.values[:, :, 0, 0]
    assert torch.equal(values, -keys)
    assert keys.tolist() == [[token for token, _ in row] for row in plain.rows]
    assert cache.places[..., 0].tolist() == [[frame for _, frame in row] for row in plain.rows]
    assert torch.equal(cache.places[..., 1], keys.long() % EACH)  # rows and columns never change
    assert torch.equal(cache.places[..., 2], keys.long() % EACH)


EVERY = [
    (Full(), 3),
    (Sliding(6), 3),
    (Sliding(7), 3),
    (Sliding(3), 3),
    (SinkWindow(2, 8), 3),
    (SinkWindow(0, 4), 2),
    (SinkWindow(3, 9, sink_gap=0), 3),
    (SinkWindow(3, 8, sink_gap=3), 3),
    (SinkWindow(1, 4, sink_gap=5), 1),
    (DeepForcing(), 3),
    (DeepForcing(3, 4, 9, 12, sink_gap=0), 3),
    (DeepForcing(2, 2, 6, 7, sink_gap=1, realign_selected=True), 2),
    (DeepForcing(0, 3, 4, 6), 3),
    (DeepForcing(4, 3, 7, 7, realign_selected=True), 3),
    (FutureAnchor(1, 4, 8), 3),
    (FutureAnchor(3, 2, 6), 3),
]


@pytest.mark.parametrize(("policy", "chunk"), EVERY, ids=str)
def test_keys_values_and_places_move_together(policy, chunk):
    generator = torch.Generator().manual_seed(0)
    cache, plain = FrameCache(torch.zeros(0, dtype=torch.float64), BATCH, 1, 1, EACH), Plain()
    policy.check(chunk)
    most = getattr(policy, "window", 1000)
    for index in range(20):
        start = index * chunk
        table = torch.randn(BATCH, (start + chunk) * EACH, generator=generator)

        def scores(first, last, frames, table=table):
            assert frames == policy.recent
            return table.gather(1, cache.keys[:, first:last, 0, 0].long())

        if index:
            policy.make_room(cache, start, chunk, scores)
            plain.make_room(policy, start, chunk, table)
            check_together(cache, plain)
        cache.append(*tokens_of(start, chunk))
        plain.append(start, chunk)
        check_together(cache, plain)
        assert cache.frames <= most
        assert cache.places[..., 0].min() >= 0
        assert cache.places[..., 0].max() < start + chunk + policy.reach


def test_deep_forcing_cuts_every_other_chunk_and_follows_the_clip():
    """The counts of a public program: 24 frames seen at the first cut, then 22; sinks at 5, 11, 17."""
    policy, seen, sinks = DeepForcing(), [], []
    cache = FrameCache(torch.zeros(0), 1, 1, 1, 1)
    for start in range(0, 48, 3):
        before = cache.frames

        def scores(first, last, frames):
            seen.append((cache.frames + 3, last - first))
            return torch.randn(1, last - first)

        policy.make_room(cache, start, 3, scores)
        if cache.frames < before:
            assert cache.frames + 3 == 16
            sinks.append(int(cache.places[0, 0, 0]))
        frames = torch.arange(start, start + 3).view(1, 3, 1).expand(-1, -1, 3)
        cache.append(torch.zeros(1, 3, 1, 1), torch.zeros(1, 3, 1, 1), frames)
    assert seen == [(24, 10), (22, 8), (22, 8), (22, 8), (22, 8)]
    assert sinks == [5, 11, 17, 23, 29]


@pytest.mark.parametrize(
    ("policy", "chunk", "message"),
    [
        (DeepForcing(budget=13), 3, r"budget=13; pass"),
        (DeepForcing(window=15), 3, "window=15; pass"),
        (DeepForcing(recent=2), 3, "recent=2; pass"),
        (DeepForcing(recent=7, budget=17), 3, "recent=7.*6"),
        (DeepForcing(sink=-1), 3, "sink=-1; pass"),
        (DeepForcing(sink_gap=-1), 3, "sink_gap=-1; pass"),
        (Sliding(2), 3, "window=2; pass"),
        (Sliding(True), 1, "window=True"),
        (SinkWindow(3, 5), 3, r"window=5; pass"),
        (SinkWindow(1, 5, -2), 3, "sink_gap=-2"),
        (FutureAnchor(window=3), 3, r"window=3; pass"),
        (FutureAnchor(ahead=0), 3, "ahead=0; pass"),
        (FutureAnchor(anchors=0), 3, "anchors=0; pass"),
    ],
)
def test_settings_that_cannot_serve_are_refused(policy, chunk, message):
    refuses(ValueError, message, policy.check, chunk)


def test_every_policy_has_defaults_that_serve_chunks_of_three():
    for kind in POLICIES.values():
        kind().check(3)


def test_bytes_count_all_that_is_held():
    cache = FrameCache(torch.zeros(0, dtype=torch.bfloat16), 2, 3, 4, 1)
    assert cache.nbytes == 0
    cache.append(
        torch.zeros(2, 5, 3, 4, dtype=torch.bfloat16),
        torch.zeros(2, 5, 3, 4, dtype=torch.bfloat16),
        torch.zeros(2, 5, 3, dtype=torch.long),
    )
    assert cache.nbytes == 2 * (2 * 5 * 3 * 4 * 2) + 2 * 5 * 3 * 8
    assert cache.query_sums.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_eight_bits_hold_each_head_of_a_token_within_half_a_step(dtype):
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 6, 3, 32, generator=generator, dtype=torch.float64).to(dtype)
    keys[0, 1, 2] = 0
    places = torch.zeros(2, 6, 3, dtype=torch.long)
    cache = FrameCache(torch.zeros(0, dtype=dtype), 2, 3, 32, 1, "int8")
    cache.append(keys[:, :4], values[:, :4], places[:, :4])
    cache.append(keys[:, 4:], values[:, 4:], places[:, 4:])
    slots = torch.tensor([[0, 2, 5], [1, 3, 4]])
    cache.keep(slots)
    assert cache.nbytes == 2 * (2 * 3 * 3 * (32 + dtype.itemsize)) + 2 * 3 * 3 * 8
    for held, whole in ((cache.keys, keys), (cache.values, values)):
        kept = torch.stack([part[own] for part, own in zip(whole, slots, strict=True)]).double()
        step = kept.abs().amax(-1, keepdim=True) / 127
        slack = 127 * step * torch.finfo(dtype).eps  # the scale and the product are rounded to the dtype
        assert ((held.double() - kept).abs() <= step / 2 + slack).all() and held.dtype == dtype
        assert (held.double() != kept).any()


def test_policies_refuse_other_types():
    for kind in POLICIES.values():
        refuses(ValueError, "dtype.*int4.*model.*int8", kind(dtype="int4").check, 3)


def test_the_first_frames_of_the_last_shot_are_kept_as_the_sink_is():
    cache, policy = FrameCache(torch.empty(0), 1, 1, 2, 1), SinkWindow(2, 8)
    kept = []
    for frame in range(0, 20, 2):
        if frame in (6, 14):
            cache.pins.append(cache.written)
        policy.make_room(cache, frame, 2, lambda *cut: torch.empty(0))
        kept.append(cache.places[0, :, 0].tolist())
        for one in (frame, frame + 1):
            cache.append(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), torch.tensor([[[one, 0, 0]]]))
    assert kept[5:] == [
        [0, 1, 6, 7, 8, 9],
        [0, 1, 6, 7, 10, 11],
        [0, 1, 6, 7, 12, 13],  # frame 14 begins a shot: until it is drawn the shot before it is the last
        [0, 1, 12, 13, 14, 15],
        [0, 1, 14, 15, 16, 17],
    ]
