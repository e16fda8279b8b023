"""Clips drawn chunk by chunk: against a straight-line loop, over batches, over long clips, with a drafter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.tiny_wan import clips, official, prompts, saved, tiny_wan
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import (
    DeepForcing,
    FrameCache,
    Full,
    FutureAnchor,
    RollingWindow,
    SinkWindow,
    Sliding,
)
from visual_spec.models.video.self_forcing_checkpoint import load_self_forcing
from visual_spec.samplers.continuous.chunks import ChunkWiseSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHAIN, CounterNoise, draw_keys

SIZE: dict[str, Any] = dict(height=4, width=4)


def roll_out(
    model: Any,
    embeds: torch.Tensor,
    *,
    sampler: Any = None,
    drafter: Any = None,
    threshold: float = 0.0,
    **more: Any,
) -> tuple[torch.Tensor, Any]:
    sampler = sampler or ChunkWiseSampler()
    more = {
        "law": TokenLaw(),
        "batch_size": len(embeds),
        "draft_model": drafter,
        "threshold": threshold,
        **more,
    }
    result = sampler(model, embeds, **more)
    return result.tokens, result.trace


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeds(*numbers: int) -> list[torch.Generator]:
    return [seeded(number) for number in numbers]


def block_causal_hooks(model, frames):
    """Have the untouched model see whole chunks and those before, in a pass over `frames` frames of 4 tokens."""
    chunk = torch.arange(frames * 4) // 12
    mask = chunk[:, None] >= chunk[None]
    return [
        block.attn1.register_forward_pre_hook(lambda module, args: (args[0], args[1], mask, args[3]))
        for block in model.blocks
    ]


def straight(model, embeds, generator, chunks):
    """Self-Forcing's loop without a cache: every call is a pass over the whole clip so far, under a mask."""
    noise = CounterNoise(draw_keys(generator, len(embeds)), "cpu")
    done = torch.zeros(len(embeds), 4, 0, 4, 4, dtype=torch.float64)
    for index in range(chunks):
        slots = torch.arange(3 * index, 3 * index + 3).expand(len(embeds), -1)

        def draw(step, slots=slots):
            values = noise.normal(slots, 64, CHAIN, step, torch.float64)
            return values.view(len(embeds), 3, 4, 4, 4).permute(0, 2, 1, 3, 4)

        noisy: torch.Tensor = draw(0)
        clean: Any = None
        for step, (timestep, level) in enumerate(
            [(1000, 1), (937.5, 15 / 16), (2500 / 3, 5 / 6), (625, 0.625)]
        ):
            if clean is not None:
                noisy = (1 - level) * clean + level * draw(step)
            whole = torch.cat([done, noisy], 2)
            times = torch.tensor([0.0] * done.shape[2] + [timestep] * 3).repeat_interleave(4)
            hooks = block_causal_hooks(model, whole.shape[2])
            with torch.no_grad():
                flow = model(whole, times.expand(len(embeds), -1), embeds, return_dict=False)[0]
            for hook in hooks:
                hook.remove()
            clean = noisy - level * flow[:, :, -3:]
        done = torch.cat([done, clean], 2)
    return done


def test_a_clip_is_that_of_whole_passes_under_a_mask():
    model, embeds = tiny_wan(), prompts(2)
    wanted = straight(model, embeds, seeded(), 3)
    found, trace = roll_out(CausalWan(model, Full()), embeds, num_frames=9, generator=seeded(), **SIZE)
    assert (found - wanted).abs().max() < 1e-10
    assert trace.target_calls.tolist() == [15, 15]  # 4 steps and a clean pass a chunk
    assert not trace.kept.any() and not trace.draft_calls.any()


POLICIES = [
    Full(),
    Sliding(6),
    SinkWindow(2, 7, 3),
    DeepForcing(3, 4, 8, 10),
    FutureAnchor(1, 2, 6),
    RollingWindow(1, 7),
]


def test_a_longer_clip_begins_as_the_shorter_one():
    causal, embeds = CausalWan(tiny_wan(), DeepForcing(3, 4, 8, 10)), prompts(1)
    short, _ = roll_out(causal, embeds, num_frames=12, generator=seeded(), **SIZE)
    long, _ = roll_out(causal, embeds, num_frames=18, generator=seeded(), **SIZE)
    assert torch.equal(long[:, :, :12], short)


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize("policy", POLICIES[1:], ids=str)
def test_memory_is_flat_over_200_chunks(policy):
    causal = CausalWan(tiny_wan(num_layers=1), policy)
    sampler = ChunkWiseSampler(steps=(1000,))
    found, trace = roll_out(
        causal, prompts(1), num_frames=600, height=2, width=2, sampler=sampler, generator=seeded()
    )
    assert found.isfinite().all()
    # Deep Forcing holds 8 and 11 frames in turn, the others one number of frames.
    assert len(set(trace.cache_bytes[10:])) <= (2 if isinstance(policy, DeepForcing) else 1)
    assert max(trace.cache_bytes[:10]) == max(trace.cache_bytes)


def test_the_full_cache_grows():
    _, trace = roll_out(CausalWan(tiny_wan(), Full()), prompts(1), num_frames=9, generator=seeded(), **SIZE)
    first, second, third = trace.cache_bytes
    assert second - first == third - second > 0


def test_context_is_read_and_not_returned():
    """A clip that goes on after its own first chunk is read by the same calls, one chunk later."""
    causal, embeds, before = CausalWan(tiny_wan(), Full()), prompts(2), clips(2, 3)
    sampler = ChunkWiseSampler(steps=(1000,))
    options: dict[str, Any] = dict(num_frames=3, sampler=sampler, generator=seeded(), **SIZE)
    found, trace = roll_out(causal, embeds, context=before, **options)
    state = causal.begin(embeds, 4, 4, 6)
    with torch.no_grad():
        causal.commit(state, before)
        noise = CounterNoise(draw_keys(seeded(), 2), "cpu")
        values = noise.normal(torch.arange(3).expand(2, -1), 64, CHAIN, 0, torch.float64)
        noisy = values.view(2, 3, 4, 4, 4).permute(0, 2, 1, 3, 4)
        wanted = noisy - causal.forward(state, noisy, 1000.0)
    assert torch.equal(found, wanted)
    assert trace.target_calls.tolist() == [3, 3]
    without, _ = roll_out(causal, embeds, **{**options, "generator": seeded()})
    assert (without - found).abs().max() > 1e-3


def test_an_anchor_lies_ahead_of_every_chunk():
    causal, places = CausalWan(tiny_wan(), FutureAnchor(1, 4, 6)), []
    state = causal.begin(prompts(1), 4, 4, 13)
    with torch.no_grad():
        causal.commit(state, clips(1, 1))
        for _ in range(4):
            causal.commit(state, clips(1, 3))
            places.append(state.layers[0][0].cache.places[0, ::4, 0].tolist())
    assert places == [[7, 1, 2, 3], [10, 2, 3, 4, 5, 6], [13, 5, 6, 7, 8, 9], [16, 8, 9, 10, 11, 12]]


# -- a drafter --------------------------------------------------------------------------------------------------------


def pair(policy=None):
    policy = policy or DeepForcing(3, 4, 8, 10)
    return CausalWan(tiny_wan(), policy), CausalWan(tiny_wan(1, num_layers=1), Sliding(6))


def test_a_reward_that_never_passes_leaves_the_large_models_clip():
    large, small = pair()
    options: dict[str, Any] = dict(num_frames=15, **SIZE)
    plain, _ = roll_out(large, prompts(2), generator=seeds(0, 1), **options)
    found, trace = roll_out(
        large,
        prompts(2),
        generator=seeds(0, 1),
        drafter=small,
        reward=lambda chunk, index: 0.0,
        threshold=1.0,
        **options,
    )
    assert (found - plain).abs().max() < 1e-10
    assert not trace.kept.any()
    assert trace.target_calls.tolist() == [25, 25]
    assert trace.draft_calls.tolist() == [4 * 4 + 5] * 2


def test_a_reward_that_always_passes_leaves_the_small_model_all_but_the_first_chunk():
    large, small = pair()
    embeds = prompts(1)
    options: dict[str, Any] = dict(num_frames=12, **SIZE)
    found, trace = roll_out(
        large,
        embeds,
        generator=seeded(),
        drafter=small,
        reward=lambda chunk, index: torch.tensor(0.0),
        **options,
    )
    assert trace.kept.tolist() == [[False, True, True, True]]
    assert trace.target_calls.tolist() == [5 + 3] and trace.draft_calls.tolist() == [3 * 4 + 4]
    first, _ = roll_out(large, embeds, num_frames=3, generator=seeded(), **SIZE)
    assert torch.equal(found[:, :, :3], first)
    # The rest is what the small model draws after that chunk, with the noise of those frames.
    state = small.begin(embeds, 4, 4, 12)
    noise = CounterNoise(draw_keys(seeded(), 1), "cpu")
    with torch.no_grad():
        small.commit(state, first)
        for start in (3, 6, 9):
            slots = torch.arange(start, start + 3)[None]
            clean: Any = None
            for step, level in enumerate(ChunkWiseSampler().levels()):
                values = noise.normal(slots, 64, CHAIN, step, torch.float64)
                draw = values.view(1, 3, 4, 4, 4).permute(0, 2, 1, 3, 4)
                noisy = draw if clean is None else (1 - level) * clean + level * draw
                clean = noisy - level * small.forward(state, noisy, 1000 * level)
            small.commit(state, clean)
            assert torch.equal(found[:, :, start : start + 3], clean)


def test_each_sample_is_kept_by_its_own_reward():
    large, small = pair()
    options: dict[str, Any] = dict(
        num_frames=12, drafter=small, reward=lambda chunk, index: chunk.mean(), **SIZE
    )
    trial, trace = roll_out(large, prompts(3), generator=seeds(0, 1, 2), threshold=-1e9, **options)
    middle = float(trace.rewards[:, 1:].median())
    steps: list[Any] = []
    found, trace = roll_out(
        large,
        prompts(3),
        generator=seeds(0, 1, 2),
        threshold=middle,
        callback=lambda *call: steps.append(call),
        **options,
    )
    assert [index for index, _ in steps] == [0, 1, 2, 3]
    assert torch.equal(torch.cat([chunk for _, chunk in steps], 2), found)
    assert trace.commit_call.tolist() == [[0] * 3 + [1] * 3 + [2] * 3 + [3] * 3] * 3
    assert trace.kept.any() and not trace.kept[:, 1:].all()
    assert torch.equal(trace.kept[:, 1:], trace.rewards[:, 1:] >= middle)
    assert trace.rewards[:, 0].isnan().all()
    alone, single = roll_out(large, prompts(3)[1:2], generator=seeds(1), threshold=middle, **options)
    assert torch.equal(alone[0], found[1]) and torch.equal(single.kept[0], trace.kept[1])
    assert trace.target_calls.tolist() == (5 * 4 - 4 * trace.kept.sum(1)).tolist()
    assert f"{int(trace.kept.sum())} of 12 chunks drafted" in trace.summary()


# -- requests that cannot be served -----------------------------------------------------------------------------------


class Refusing:
    """A model that fails the test if it is called."""

    channels = 4

    def check(self, *request):
        return CausalWan(tiny_wan(), Full()).check(*request)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_frames=10), "num_frames=10.*3.*9.*12"),
        (dict(num_frames=2), "num_frames=2 .* pass 3"),
        (dict(num_frames=0), "num_frames=0.*1"),
        (dict(height=5), "height=5.*2"),
        (dict(reward=lambda chunk, index: 0.0), "drafter.*reward"),
        (dict(context=torch.zeros(1, 3, 3, 4, 4)), r"\[1, 3, 3, 4, 4\].*\[2 or 1, 4, n, 4, 4\]"),
        (dict(context=torch.zeros(1, 4, 0, 4, 4)), "context is"),
        (dict(generator=[torch.Generator()]), "1 generators.*2"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_before_any_call(changes, message):
    request = {"num_frames": 9, "height": 4, "width": 4, **changes}
    with pytest.raises(ValueError, match=message):
        roll_out(Refusing(), prompts(2), **request)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bent", [lambda flow: flow[:1], lambda flow: flow[:, :, :1]])
def test_a_flow_of_another_shape_is_refused(monkeypatch, bent):
    causal = CausalWan(tiny_wan(), Full())
    forward = causal.forward
    monkeypatch.setattr(causal, "forward", lambda *call: bent(forward(*call)))
    with pytest.raises(ValueError, match=r"returned shape \("):
        roll_out(causal, prompts(2), num_frames=3, **SIZE)


def test_a_policy_for_other_chunks_is_refused_before_any_call():
    causal = CausalWan(tiny_wan(), Sliding(4))
    with pytest.raises(ValueError, match="window=4; pass"):
        roll_out(causal, prompts(1), num_frames=5, sampler=ChunkWiseSampler(chunk=5), **SIZE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(chunk=0), "chunk=0"),
        (dict(steps=()), r"steps=\(\).*0.*1000"),
        (dict(steps=(500, 500)), r"steps=\(500, 500\)"),
        (dict(first_steps=(1001,)), r"first_steps=\(1001,\).*1000"),
        (dict(steps=(1000, 0)), "above 0"),
        (dict(shift=0), "shift=0.*0"),
        (dict(solver="euler"), "solver.*euler.*renoise.*unipc.*rolling"),
    ],
)
def test_schedules_that_are_none_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ChunkWiseSampler(**settings)


def test_a_reward_that_is_no_number_is_refused():
    large, small = pair()
    with pytest.raises(ValueError, match="chunk 1.*nan"):
        roll_out(
            large, prompts(1), num_frames=6, drafter=small, reward=lambda chunk, index: float("nan"), **SIZE
        )


def test_a_drafter_of_other_latents_is_refused():
    large, _ = pair()
    small = CausalWan(tiny_wan(in_channels=2, out_channels=2), Full())
    with pytest.raises(ValueError, match="2 channels.*4"):
        roll_out(large, prompts(1), num_frames=6, drafter=small, reward=lambda chunk, index: 0.0, **SIZE)


def test_levels_are_those_of_self_forcing():
    assert ChunkWiseSampler().levels() == pytest.approx([1, 15 / 16, 5 / 6, 5 / 8])


def test_the_first_chunk_may_take_more_steps():
    """It is then the first chunk of a clip of these steps throughout; later ones take fewer."""
    model, embeds = pair()[0], prompts(1)
    many, few = (1000, 750, 500, 250), (1000, 500)
    options: dict[str, Any] = dict(generator=seeded(), **SIZE)
    first, _ = roll_out(model, embeds, num_frames=3, sampler=ChunkWiseSampler(steps=many), **options)
    options["generator"] = seeded()
    both = ChunkWiseSampler(steps=few, first_steps=many)
    drawn, trace = roll_out(model, embeds, num_frames=9, sampler=both, **options)
    assert torch.equal(drawn[:, :, :3], first) and trace.target_calls.tolist() == [5 + 3 + 3]
    options["generator"] = seeded()
    rest, _ = roll_out(
        model, embeds, num_frames=6, sampler=ChunkWiseSampler(steps=few), context=first, **options
    )
    assert torch.isfinite(rest).all() and both.levels(3) == ChunkWiseSampler(steps=few).levels()


class Formula:
    """A chunk model whose flow is a formula of what it is given."""

    channels = 2

    def __init__(self) -> None:
        self.timesteps: list[float] = []

    def check(self, embeds: Any, height: int, width: int, chunk: int) -> None:
        pass

    def begin(self, embeds: Any, height: int, width: int, num_frames: int) -> Any:
        return SimpleNamespace(nbytes=0)

    def forward(self, state: Any, latents: torch.Tensor, timestep: float) -> torch.Tensor:
        self.timesteps.append(timestep)
        return torch.sin(3 * latents) + latents * timestep / 1000

    def commit(self, state: Any, latents: torch.Tensor) -> None:
        pass


# Recorded: `FlowUniPCMultistepScheduler` of NVlabs/LongLive@7860ad9 in its loop, shift 5, the same noise and flow.
UNIPC = {
    2: ([999, 833], [-0.9457636, -0.5197762, -1.3040705, -1.3135711, -1.1665587, -0.3211946]),
    4: ([999, 937, 833, 624], [-1.0644841, -0.1594749, -1.6164981, -1.6138088, -1.5647098, -0.3238853]),
}


@pytest.mark.parametrize("steps", UNIPC)
def test_a_chunk_by_unipc_is_that_of_the_public_program(steps):
    model, (timesteps, numbers) = Formula(), UNIPC[steps]
    embeds = torch.zeros(1, 1, 1)
    sampler = ChunkWiseSampler(2, steps, solver="unipc")
    drawn, trace = roll_out(
        model, embeds, num_frames=4, sampler=sampler, generator=seeded(3), height=2, width=2
    )
    assert model.timesteps == 2 * timesteps and trace.target_calls.tolist() == [2 * steps + 2]
    assert drawn[0, :, 2:].flatten()[:6].tolist() == pytest.approx(numbers, abs=2e-6)


# Recorded: `CausalInferencePipeline` of TencentARC/RollingForcing (that in `long_video` of thu-ml/Causal-Forcing is
# equal) on the weights of `official()`, with the noise of this sampler, in float64: the last frame of a clip that is
# longer than the cache.
ROLLING = {
    (1000, 800, 600, 400, 200): (
        45,
        34,
        [0.2322632, -1.2238266, -0.8150277, -0.9364841, -4.4734264, 3.4642353],
    ),
    (1000, 750, 500, 250): (60, 43, [0.4778891, -0.3690467, 0.4879224, -0.0721666, -3.3489891, 2.9834288]),
}


@pytest.mark.parametrize("steps", ROLLING, ids=len)
def test_a_rolling_window_draws_what_the_public_program_draws(steps, tmp_path):
    frames, calls, numbers = ROLLING[steps]
    model = load_self_forcing(saved(tmp_path, official()), head_dim=12).double()
    sampler, causal = ChunkWiseSampler(3, steps, solver="rolling"), CausalWan(model, RollingWindow())
    drawn, trace = roll_out(
        causal, prompts(1), num_frames=frames, sampler=sampler, generator=seeded(5), **SIZE
    )
    assert trace.target_calls.tolist() == [calls]  # one a chunk, some before the first, and the clean passes
    assert drawn[0, :, -1].flatten()[:6].tolist() == pytest.approx(numbers, abs=5e-5)


class Framewise(Formula):
    """Its flow depends on the frame and its level alone."""

    def forward(self, state: Any, latents: torch.Tensor, timestep: Any) -> torch.Tensor:
        share = torch.as_tensor(timestep, dtype=latents.dtype) / 1000
        return torch.sin(3 * latents) + latents * (share[..., None, None] if share.ndim else share)


@pytest.mark.parametrize("frames", [2, 4, 14])
def test_chunks_that_do_not_see_each_other_roll_as_they_are_drawn_alone(frames):
    """Also of a clip with fewer chunks than the window has."""
    options: dict[str, Any] = dict(num_frames=frames, height=2, width=2)
    embeds = torch.zeros(2, 1, 1, dtype=torch.float64)
    rolled, alone = (
        roll_out(
            Framewise(),
            embeds,
            sampler=ChunkWiseSampler(2, 3, solver=solver),
            generator=seeds(3, 4),
            **options,
        )
        for solver in ("rolling", "renoise")
    )
    assert (rolled[0] - alone[0]).abs().max() < 1e-12
    chunks = frames // 2
    assert rolled[1].target_calls.tolist() == [2 + 2 * chunks] * 2
    assert alone[1].target_calls.tolist() == [4 * chunks] * 2


@pytest.mark.parametrize(
    ("settings", "policy", "message"),
    [
        (dict(first_steps=2), RollingWindow(), "first_steps"),
        ({}, RollingWindow(3, 14), "window=14; pass .*15"),
        ({}, Sliding(8), "window=8; pass .*12"),
    ],
)
def test_a_rolling_window_that_cannot_serve_is_refused(settings, policy, message):
    sampler = ChunkWiseSampler(solver="rolling", **settings)
    with pytest.raises(ValueError, match=message):
        roll_out(CausalWan(tiny_wan(), policy), prompts(1), num_frames=15, sampler=sampler, **SIZE)


def test_a_rolling_window_takes_no_drafter():
    large, small = pair()
    with pytest.raises(ValueError, match="neither a drafter"):
        roll_out(
            large,
            prompts(1),
            num_frames=6,
            drafter=small,
            reward=lambda chunk, index: 0.0,
            sampler=ChunkWiseSampler(solver="rolling"),
            **SIZE,
        )


def test_a_clean_chunk_of_a_long_rolling_clip_forgets_the_sink():
    """A noisy one reads it, moved to right before the frames that follow it."""
    cache, policy = FrameCache(torch.empty(0), 1, 1, 2, 1), RollingWindow(2, 8)
    for frame in range(9):
        held = torch.full((1, 1, 1, 2), float(frame))
        cache.append(held, held, torch.tensor([[[frame, 0, 0]]]))
    policy.make_room(cache, 9, 2, lambda *cut: torch.empty(0))
    for commit, values, places in (
        (False, [0, 1, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8]),
        (True, [3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8]),
    ):
        keys, read, _ = policy.read(cache, 9, 2, commit)
        assert keys[0, :, 0, 0].tolist() == values and read[0, :, 0].tolist() == places
    assert cache.places[0, :, 0].tolist() == [0, 1, 3, 4, 5, 6, 7, 8]


# Recorded: `CausalDiffusionInferencePipeline` of NVlabs/LongLive@7860ad9 with `multi_shot_sink` and
# `multi_shot_rope_offset=3`, sink 2 of a window of 8, on the weights of `official()` with the noise of this sampler, in
# float64: the last frame of 20, without cuts, with shots from chunks 3 and 7, and these after a clean first frame.
SHOTS = {
    "plain": [0.0039738, -0.6877103, -0.8904113, -0.2793368, -5.9785789, 2.8333392],
    "cuts": [0.2473922, -0.7183850, -0.6225424, -0.3417350, -6.2461566, 2.9121221],
    "a picture, cuts": [0.2193390, -0.7826937, -0.6434199, -0.4102715, -6.2963492, 2.9054322],
}


@pytest.mark.parametrize("name", SHOTS)
def test_shots_and_a_first_picture_are_drawn_as_the_public_program_draws_them(name, tmp_path):
    model = load_self_forcing(saved(tmp_path, official()), head_dim=12).double()
    given: dict[str, Any] = {}
    if name != "plain":
        given["cuts"] = {3: prompts(1, seed=1), 7: prompts(1, seed=2)}
    if "picture" in name:
        picture = torch.randn(1, 1, 4, 4, 4, generator=seeded(9), dtype=torch.float64)
        given["start"] = picture.transpose(1, 2)
    drawn, trace = roll_out(
        CausalWan(model, SinkWindow(2, 8, cut_gap=3)),
        prompts(1),
        num_frames=20,
        sampler=ChunkWiseSampler(2, 4, solver="unipc"),
        generator=seeded(5),
        **given,
        **SIZE,
    )
    assert drawn[0, :, -1].flatten()[:6].tolist() == pytest.approx(SHOTS[name], abs=2e-5)
    assert trace.target_calls.tolist() == [50]
    if "start" in given:
        assert torch.equal(drawn[:, :, :1], given["start"])


def test_a_shot_of_a_drafted_clip_is_that_of_its_prompt():
    """Both models go on with the new prompt; what comes before it does not change."""
    large, small = pair()
    options: dict[str, Any] = dict(num_frames=9, drafter=small, reward=lambda chunk, index: 1.0, **SIZE)
    plain, _ = roll_out(large, prompts(2), generator=seeds(0, 1), **options)
    same, _ = roll_out(large, prompts(2), generator=seeds(0, 1), cuts={2: prompts(2)}, **options)
    other, _ = roll_out(large, prompts(2), generator=seeds(0, 1), cuts={2: prompts(2, seed=4)}, **options)
    assert torch.equal(same, plain) and torch.equal(other[:, :, :6], plain[:, :, :6])
    assert (other[:, :, 6:] - plain[:, :, 6:]).abs().amax((1, 2, 3, 4)).min() > 0.01


@pytest.mark.parametrize(
    ("given", "solver", "message"),
    [
        (dict(cuts={0: prompts(1)}), "renoise", "chunk 0 .* from 1 to 2"),
        (dict(cuts={3: prompts(1)}), "renoise", "chunk 3 .* from 1 to 2"),
        (dict(cuts={1: prompts(2)}), "renoise", r"\[2, 3, 8\]; .*\[1, T, E\]"),
        (dict(cuts={1: torch.zeros(1, 3, 5)}), "renoise", r"prompt_embeds are \[1, 3, 5\]"),
        (dict(start=clips(1, 3)), "renoise", "start is .* n at most 2"),
        (dict(start=clips(2, 1)), "unipc", "start is"),
        (dict(start=clips(1, 1)), "rolling", "begins with noise"),
    ],
)
def test_shots_and_pictures_that_do_not_fit_are_refused(given, solver, message):
    sampler, causal = ChunkWiseSampler(solver=solver), CausalWan(tiny_wan(), Full())
    with pytest.raises(ValueError, match=message):
        roll_out(causal, prompts(1), num_frames=9, sampler=sampler, **given, **SIZE)
