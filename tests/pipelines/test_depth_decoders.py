"""Accelerated depth decoders against the models' own `generate`: CSM, Moshi, Qwen3-Omni's talker."""

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor

import visual_spec
from tests.helpers.copies import check_copy, unpickled
from tests.helpers.refusals import refuses
from tests.helpers.tiny_depth import (
    FRAMES,
    LAWS,
    Qwen3TTSTalkerForConditionalGeneration,
    drawn,
    inputs,
    tiny_csm,
    tiny_moshi,
    tiny_talker,
)
from visual_spec.models.columns.depth import CsmDepth
from visual_spec.samplers.raster.depth_window import DepthWindow

MAKE = dict(csm=tiny_csm, moshi=tiny_moshi, talker=tiny_talker)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.fast_sets(12)
@pytest.mark.parametrize("window", (None, "depth-window", "depth-window:window=2"))
@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", MAKE)
def test_the_codes_are_those_of_the_models_own_generate(
    name: str, law: str, rows: int, window: str | None
) -> None:
    model = MAKE[name]()
    expected = drawn(model, name, law, rows)
    assert visual_spec.accelerate(model, window) is model
    assert same(drawn(model, name, law, rows), expected)
    trace = model.last_trace
    assert trace.plain == 0
    assert trace.frames >= FRAMES - 1
    assert trace.calls <= trace.frames * trace.codes
    assert window is not None or trace.calls == trace.frames * trace.codes
    if law == "sampled" and name != "talker":
        assert not same(drawn(model, name, law, rows, seed=1), expected)


@pytest.mark.parametrize("window", (None, "depth-window"))
@pytest.mark.parametrize(
    ("law", "codes"),
    [
        (dict(do_sample=False), [[9, 43, 42, 6], [37, 6, 47, 38], [3, 44, 41, 38]]),
        (
            dict(do_sample=True, top_k=10, temperature=0.9),
            [[27, 7, 29, 7], [37, 17, 42, 14], [10, 24, 2, 38]],
        ),
    ],
)
def test_frames_of_qwen3_tts_are_those_that_its_public_code_draws(
    law: dict[str, Any], codes: list[list[int]], window: str | None
) -> None:
    """Recorded from the code predictor of qwen-tts 0.1.1 with transformers 4.57.3."""
    talker = visual_spec.accelerate(Qwen3TTSTalkerForConditionalGeneration(), window)
    hidden = torch.arange(3 * 2 * 40, dtype=torch.float64).mul(0.37).sin().view(3, 2, 40)
    torch.manual_seed(5)
    result = talker.code_predictor.generate(
        inputs_embeds=hidden, max_new_tokens=4, output_hidden_states=True, return_dict_in_generate=True, **law
    )
    assert result.sequences.tolist() == codes
    assert (talker.last_trace.frames, talker.last_trace.plain) == (1, 0)


@pytest.mark.parametrize("name", MAKE)
def test_every_attention_of_a_call_sees_what_came_before(name: str) -> None:
    model = MAKE[name]()
    expected = drawn(model, name, "greedy")
    model.set_attn_implementation("eager")
    visual_spec.accelerate(model)
    assert same([drawn(model, name, "greedy")[0]], [expected[0]])
    assert model.last_trace.plain == 0


def test_batches_of_other_sizes_and_other_laws_follow_one_another() -> None:
    model, again = tiny_csm(), tiny_csm()
    visual_spec.accelerate(again)
    for law, rows in (("greedy", 2), ("sampled", 1), ("filtered", 3), ("greedy", 2), ("nucleus", 1)):
        assert same(drawn(again, "csm", law, rows), drawn(model, "csm", law, rows)), (law, rows)


def test_what_a_frame_does_not_know_goes_the_models_own_way() -> None:
    model = tiny_csm()
    expected = drawn(model, "csm", "sampled")
    visual_spec.accelerate(model)
    add_hook_to_module(model.depth_decoder, ModelHook())  # as one that moves weights
    assert same(drawn(model, "csm", "sampled"), expected)
    assert (model.last_trace.frames, model.last_trace.plain) == (0, FRAMES)
    assert f"{FRAMES} by its own generate (hooks of accelerate" in visual_spec.summary(model)
    scored = tiny_csm()
    visual_spec.accelerate(scored)
    settings = dict(depth_decoder_do_sample=True, depth_decoder_eos_token_id=3)
    scored.generate(**inputs("csm", 2), do_sample=True, **settings)
    assert (scored.last_trace.frames, scored.last_trace.plain) == (0, FRAMES)
    assert "(eos_token_id=3 may end a frame)" in visual_spec.summary(scored)


@pytest.mark.parametrize("window", (None, "depth-window"))
@pytest.mark.parametrize(("most", "plain"), [(16, 0), (15, FRAMES)])
def test_frames_beyond_the_limit_of_a_rotary_embedding_go_the_models_own_way(
    most: int, plain: int, window: str | None
) -> None:
    model = tiny_csm(codebooks=16)  # its decoder reads the hidden state and 15 codes
    config = model.config
    config.depth_decoder_config.max_position_embeddings = most
    config.depth_decoder_config.rope_parameters = dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)
    dynamic = type(model)(config).double().eval()
    dynamic.load_state_dict(model.state_dict())
    dynamic.generation_config = model.generation_config
    expected = drawn(dynamic, "csm", "greedy")
    visual_spec.accelerate(dynamic, window)
    assert same(drawn(dynamic, "csm", "greedy"), expected)
    assert dynamic.last_trace.plain == plain
    assert ("positions change beyond 15 places, and a frame has 16" in visual_spec.summary(dynamic)) == bool(
        plain
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
@pytest.mark.parametrize("name", MAKE)
def test_a_copy_is_plain_and_stands_alone(name: str, copied: Any) -> None:
    check_copy(MAKE[name](), lambda model: drawn(model, name, "sampled"), copied)


@pytest.mark.parametrize("name", MAKE)
def test_restore_gives_back_what_was_there(name: str) -> None:
    model = MAKE[name]()
    expected = drawn(model, name, "greedy")
    plain = [set(vars(part)) for part in model.modules()]
    visual_spec.accelerate(visual_spec.accelerate(model))
    assert "static" in visual_spec.summary(model)
    drawn(model, name, "greedy")
    assert f"{model.last_trace.frames} frames of" in visual_spec.summary(model)
    visual_spec.restore(model)
    assert [set(vars(part)) for part in model.modules()] == plain
    assert same(drawn(model, name, "greedy"), expected)
    assert "not accelerated" in visual_spec.summary(model)


def frame_of(rows: int) -> tuple[Any, dict[str, Any]]:
    """A decoder of 7 codes a frame, and what its frames read."""
    generator = torch.Generator().manual_seed(1)
    decoder = CsmDepth(tiny_csm(codebooks=8).depth_decoder)

    def choose(ids: Tensor, logits: Tensor, noise: Tensor) -> Tensor:
        return (logits.softmax(-1) / noise).argmax(-1)

    ids = torch.randint(1, 20, (rows, 1), generator=generator)
    hidden = torch.randn(rows, 32, generator=generator, dtype=torch.float64)
    noise = torch.empty(rows, 7, 20, dtype=torch.float64).exponential_(generator=generator)
    return decoder, dict(ids=ids, hidden=hidden, choose=choose, noise=noise)


def calls_by_recomputing(decoder: Any, request: dict[str, Any], drafts: Tensor) -> int:
    """Calls of a window over all open slots, each of them over the whole frame without a cache."""
    ids, hidden, calls, final = (
        request["ids"],
        request["hidden"],
        0,
        torch.zeros(len(drafts), dtype=torch.long),
    )
    drafts = drafts.clone()
    while bool((final < 7).any()):
        read = torch.cat([decoder.begin(ids, hidden), decoder.embed(0, drafts[:, :6], hidden)], 1)
        made = request["choose"](ids, decoder.heads(0, decoder.run(read, 0)[:, 1:]), request["noise"])
        for row in range(len(drafts)):
            start = int(final[row])
            kept = next((slot for slot in range(start, 7) if made[row, slot] != drafts[row, slot]), 7)
            final[row] = min(kept + 1, 7)
            drafts[row, start:] = made[row, start:]
        calls += 1
    return calls


@pytest.mark.parametrize("wrong", ((), (6,), (5,), (0,), (2, 4)))
def test_a_window_keeps_drafts_that_stand_and_calls_again_after_others(wrong: tuple[int, ...]) -> None:
    """The last row has right drafts alone, and waits for the others."""
    decoder, request = frame_of(3)
    codes, states = decoder.frame(**request)
    drafts = codes.clone()
    for slot in wrong:
        drafts[:2, slot] = (drafts[:2, slot] + 1) % 20
    drawn, scored, calls = DepthWindow().frame(decoder, **request, drafts=drafts)
    assert torch.equal(drawn, codes)
    torch.testing.assert_close(scored, states, rtol=1e-12, atol=1e-12)
    assert calls == calls_by_recomputing(decoder, request, drafts)
    assert calls == 1 if wrong in ((), (6,)) else 1 < calls <= 7  # the last draft is read by no slot
    assert DepthWindow(window=3).frame(decoder, **request, drafts=codes)[2] == 3


def test_hidden_states_that_are_no_numbers_are_refused() -> None:
    for window in (None, "depth-window"):
        model = tiny_csm()
        visual_spec.accelerate(model, window)
        model.depth_decoder.model.embed_tokens.weight.data[20:40] = torch.nan  # of the second code
        refuses(FloatingPointError, "Csm.*row 0", drawn, model, "csm", "sampled")


def test_what_was_done_is_logged_also_for_a_model_that_has_decoded(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_csm()
    with caplog.at_level("INFO", logger="visual_spec"):
        visual_spec.accelerate(model)
        drawn(model, "csm", "greedy")
        visual_spec.accelerate(model, "depth-window:window=2")
    first, second = (record.getMessage() for record in caplog.records)
    assert "3 codes a frame" in first and "one by one" in first
    assert "DepthWindow(window=2)" in second and second == visual_spec.summary(model)


def test_drafts_of_another_batch_are_not_used() -> None:
    decoder, request = frame_of(3)
    codes, _ = decoder.frame(**request)
    plain = DepthWindow().frame(decoder, **request)
    drawn, _, calls = DepthWindow().frame(decoder, **request, drafts=codes[:2])
    assert torch.equal(drawn, codes)
    assert calls == plain[2] > 1


def test_a_sampler_is_refused_and_changes_nothing() -> None:
    model = tiny_csm()
    refuses(TypeError, "speculative-jacobi", visual_spec.accelerate, model, "speculative-jacobi")
    assert "not accelerated" in visual_spec.summary(model)


@pytest.mark.parametrize(
    ("window", "recorded"), [(None, False), (None, True), ("depth-window", False)], ids=str
)
@pytest.mark.parametrize("law", ("greedy", "sampled", "filtered"))
def test_near_ties_of_frames_are_counted_by_definition(
    law: str, window: str | None, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, which is said to be bfloat16, so that the scores can be had from the decoder's own `generate`."""
    if recorded:  # the first frame's function draws all
        monkeypatch.setattr("visual_spec.pipelines.accelerate.depth.wants_graph", lambda *_: True)
        monkeypatch.setattr(
            "visual_spec.pipelines.accelerate.depth.RecordedFunction", lambda model, function: function
        )
    model = tiny_csm(codebooks=16)
    plain, scores = model.depth_decoder.generate, []

    def kept(*args: Any, **kwargs: Any) -> Any:
        state = torch.get_rng_state()
        rows = len(kwargs["input_ids"])
        draws = [torch.empty(rows, 20, dtype=torch.float32).exponential_() for _ in range(15)]
        torch.set_rng_state(state)
        result = plain(*args, **kwargs | dict(output_scores=True, return_dict_in_generate=True))
        scores.append((torch.stack(result.scores, 1).float(), torch.stack(draws, 1)))
        return result

    model.depth_decoder.generate = kept
    expected = drawn(model, "csm", law)
    del model.depth_decoder.generate
    near = 0
    for table, noise in scores:
        best = table - noise.log() if law != "greedy" else table
        first, second = best.sort(-1, descending=True).values[..., :2].unbind(-1)
        largest = table.masked_fill(table.isinf(), 0).abs().amax(-1)
        near += int((first - second < 2 * 2.0**-7 * largest).sum())
    monkeypatch.setattr("visual_spec.pipelines.accelerate.depth.low_precision_of", lambda model: "bfloat16")
    visual_spec.accelerate(model, window)
    assert same(drawn(model, "csm", law), expected)
    assert 0 < model.last_trace.near_ties == near
