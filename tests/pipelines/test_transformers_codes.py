"""Language models of codes beside transformers' own `generate`: greedy ids equal, sampled ids of its law."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import visual_spec
from tests.helpers.code_texts import (
    LAWS,
    LLAMA,
    NEGATIVE,
    PROMPTS,
    SAMPLERS,
    SETTINGS,
    Alternating,
    OnlyCodes,
    given,
    ours,
    theirs,
)
from tests.helpers.refusals import refuses
from tests.models.next_token.tiny_languages import CLASSES, CODES, END, language_model, texts
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.models.next_token import cached_decoder, code_language
from visual_spec.models.next_token.code_language import CodeLanguageModel, why_not
from visual_spec.pipelines.accelerate.codes import generate_codes
from visual_spec.prototype.block_drafts.drafter import BlockDrafter
from visual_spec.prototype.block_drafts.sampler import BlockDraftSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_greedy_texts_are_those_of_generate(kind, sampler, settings):
    model = LLAMA if kind == "llama" else language_model(kind)
    want = theirs(model, PROMPTS, do_sample=False, **given(settings))
    assert torch.equal(ours(model, PROMPTS, SAMPLERS[sampler], do_sample=False, **given(settings)), want)


@pytest.mark.parametrize("settings", ["nothing", "all"])
@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_writes_the_greedy_texts_of_generate(kind, settings):
    model = language_model(kind)
    assert why_not(model) is None
    # transformers' eager attention, which Gemma 2 needs, makes nan of left padding here.
    even = kind == "gemma2"
    inputs, second = (texts([7] * 3), texts([3] * 3, 1)) if even else (PROMPTS, NEGATIVE)
    want = theirs(model, inputs, do_sample=False, **given(settings, second))
    for sampler in ("plain", "window 16"):
        got = ours(model, inputs, SAMPLERS[sampler], do_sample=False, **given(settings, second))
        assert torch.equal(got, want)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("codes, end", [([(40, 50), (60, 70)], 30), ([(45, 60)], None), ([(10, 90)], 45)])
def test_several_ranges_and_any_end(codes, end, sampler):
    settings = dict(do_sample=False, repetition_penalty=1.2, guidance_scale=1.5)
    want = theirs(LLAMA, PROMPTS, codes, end, **settings)
    assert torch.equal(ours(LLAMA, PROMPTS, SAMPLERS[sampler], codes, end, **settings), want)


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_processor_of_the_user_reads_the_drafts_before_a_slot(sampler, guidance_scale):
    settings = dict(do_sample=False, guidance_scale=guidance_scale)
    want = theirs(LLAMA, PROMPTS, logits_processor=[Alternating()], **settings)
    got = ours(LLAMA, PROMPTS, SAMPLERS[sampler], logits_processor=[Alternating()], **settings)
    assert torch.equal(got, want)
    assert not torch.equal(want, theirs(LLAMA, PROMPTS, **settings))


class Signs(LogitsProcessor):
    """Looks at the sign of a score."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(scores > -6, scores * 0.4 + 3, scores)


class Favoured(LogitsProcessor):
    """Adds to a third of the ids."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (torch.arange(scores.shape[1]) % 3 == 0) * 3.0


TEXT = PROMPTS["input_ids"].shape[1]
# What `generate` does to scores one after the other, and the lengths it takes; ends are likely.
STEPS: dict[str, dict[str, Any]] = {
    "signs under guidance": dict(guidance_scale=2.0, logits_processor=[Signs()]),
    "signs after a penalty": dict(
        guidance_scale=1.5, repetition_penalty=1.4, logits_processor=[Signs(), Favoured()]
    ),
    "signs without guidance": dict(logits_processor=[Favoured(), Signs()], min_new_tokens=4),
    "a penalty and a processor": dict(repetition_penalty=3.0, logits_processor=[Favoured()], top_k=4),
    "least with the prompt": dict(min_length=TEXT + 9),
    "least, new before whole": dict(min_length=TEXT + 9, min_new_tokens=3),
    "least below the prompt": dict(min_length=3),
    "most with the prompt": dict(max_length=TEXT + 11),
    "most, new before whole": dict(max_length=TEXT + 11, max_new_tokens=5),
    "all the same": dict(max_new_tokens=9, min_new_tokens=9),
    "a config": dict(
        generation_config=GenerationConfig(
            max_length=TEXT + 12, min_length=TEXT + 8, do_sample=True, pad_token_id=0
        ),
    ),
    "a config under the call": dict(
        generation_config=GenerationConfig(max_new_tokens=4, min_length=TEXT + 4, top_k=3, pad_token_id=0),
        max_length=TEXT + 10,  # new tokens count, whoever says them
        top_k=0,
    ),
    "the usual, and no end before": dict(max_new_tokens=None, min_new_tokens=20),
}


@pytest.mark.every_set
@pytest.mark.parametrize("name", STEPS)
def test_steps_and_lengths_are_those_of_generate(name):
    settings, codes = STEPS[name] | dict(do_sample=True), (40, 46)
    torch.manual_seed(1)
    want = [theirs(LLAMA, PROMPTS, [codes], 46, **settings) for _ in range(2)]
    torch.manual_seed(1)
    for text in want:
        got = ours(LLAMA, PROMPTS, SAMPLERS["window 4"], codes, 46, **settings)
        assert torch.equal(got, text)


class FirstToken(LogitsProcessor):
    """Puts one token first, without a change of what comes second."""

    def __init__(self, token: int, prompt: int) -> None:
        self.token, self.prompt = token, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > self.prompt:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([self.token]), 0.0)


def law_of_pairs(model: Any, settings: dict[str, Any], codes: tuple[int, int], end: int) -> Tensor:
    """The law of the first two tokens under `generate`, [V, V], from the scores that it reports."""
    ids = [*range(*codes), end]
    only = LogitsProcessorList([OnlyCodes([codes], end)])
    more = dict(
        do_sample=True, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, eos_token_id=end
    )
    inputs = {name: part[:1] for name, part in PROMPTS.items()}
    found = torch.zeros(len(ids), len(ids), dtype=torch.float64)
    first = model.generate(**inputs, logits_processor=only, **more, **settings).scores[0][0].softmax(-1)[ids]
    for row, token in enumerate(ids):
        if token == end:
            found[row, row] = first[row]
            continue

        two = LogitsProcessorList([OnlyCodes([codes], end), FirstToken(token, PROMPTS["input_ids"].shape[1])])
        out = model.generate(**inputs, logits_processor=two, **(more | dict(max_new_tokens=2)), **settings)
        found[row] = first[row] * out.scores[1][0].softmax(-1)[ids]
    return found


@pytest.mark.fast_sets(4)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("guided", [False, True])
def test_sampled_texts_follow_the_law_of_generate(sampler, guided):
    """Chi-square of 3,000 pairs of tokens against the laws that `generate` reports."""
    codes, end, count = (40, 46), 46, 3000
    settings: dict[str, Any] = dict(temperature=1.3, top_k=5, top_p=0.97, repetition_penalty=1.6)
    if guided:
        settings |= dict(guidance_scale=1.7, negative_prompt_ids=NEGATIVE["input_ids"][:1])
    law = law_of_pairs(LLAMA, settings, codes, end).flatten()
    inputs = {name: part[:1].repeat(count, 1) for name, part in PROMPTS.items()}
    if guided:
        settings["negative_prompt_ids"] = settings["negative_prompt_ids"].repeat(count, 1)
    ids = ours(
        LLAMA,
        inputs,
        SAMPLERS[sampler],
        codes,
        end,
        do_sample=True,
        max_new_tokens=4,
        generator=torch.Generator().manual_seed(3),
        **settings,
    )
    pair = ids[:, PROMPTS["input_ids"].shape[1] :][:, :2]
    pair = torch.where(pair == 0, end, pair) - codes[0]  # padding stands after an end
    seen = torch.bincount(pair[:, 0] * 7 + pair[:, 1], minlength=49).double()
    assert seen[law == 0].sum() == 0 and law.sum().item() == pytest.approx(1)
    large = law * count >= 5
    expected = torch.cat([law[large], law[~large].sum()[None]]) * count
    found = torch.cat([seen[large], seen[~large].sum()[None]])
    kept = expected > 0
    chi = float(((found - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert freedom > 8 and chi < freedom + 4.5 * (2 * freedom) ** 0.5


def test_rows_end_at_their_own_length_and_no_call_is_spent_on_them():
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    sampler = SpeculativeJacobiSampler(8)
    settings = dict(do_sample=True, max_new_tokens=200, generator=generators)
    visual_spec.accelerate(LLAMA, sampler, codes=(40, 48), end=48)
    try:
        ids = LLAMA.generate(**PROMPTS, **settings)
        trace, line = LLAMA.last_trace, visual_spec.summary(LLAMA)
    finally:
        visual_spec.restore(LLAMA)
    text = ids[:, PROMPTS["input_ids"].shape[1] :]
    lengths = [row.tolist().index(48) + 1 for row in text]
    assert len(set(lengths)) > 1 and max(lengths) == text.shape[1] < 200
    for row, length in zip(text, lengths, strict=True):
        assert (row[length:] == 0).all() and (row[:length] != 0).all()
    assert (trace.commit_call >= 0).sum(1).tolist() == lengths
    assert (trace.target_calls <= torch.tensor(lengths)).all()
    assert f"{sum(lengths)} tokens in 3" in line


def test_only_the_rows_of_the_codes_are_computed(monkeypatch):
    rows = []
    real = torch.nn.functional.linear

    def linear(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.data_ptr() >= LLAMA.lm_head.weight.data_ptr() and weight.shape[0] not in (16, 32, 64):
            rows.append(weight.shape[0])
        return real(features, weight, bias)

    monkeypatch.setattr("visual_spec.models.next_token.code_language.F.linear", linear)
    ours(LLAMA, PROMPTS, SAMPLERS["plain"], do_sample=False, max_new_tokens=3)
    assert set(rows[-3:]) == {CODES[1] - CODES[0] + 1}


# ---------------------------------------------------------------------------------------------------- accelerate


def test_restore_leaves_the_model_as_it_was():
    names = set(vars(LLAMA))
    ours(LLAMA, PROMPTS, SAMPLERS["window 4"])
    assert set(vars(LLAMA)) == names


def test_restore_inside_a_call_leaves_the_model_as_it_was_and_ends_the_text():
    names, want = set(vars(LLAMA)), theirs(LLAMA, PROMPTS, do_sample=False, max_new_tokens=6)

    class Restoring(BaseStreamer):
        def put(self, value):
            visual_spec.restore(LLAMA)

        def end(self):
            pass

    visual_spec.accelerate(LLAMA, codes=CODES, end=END)
    one = {name: value[:1] for name, value in PROMPTS.items()}
    found = LLAMA.generate(**one, max_new_tokens=6, do_sample=False, streamer=Restoring())
    assert torch.equal(found[0, -6:], want[0, -6:]) and set(vars(LLAMA)) == names


def test_the_default_sampler_says_what_it_promises():
    want = theirs(LLAMA, PROMPTS, do_sample=False, max_new_tokens=6)
    visual_spec.accelerate(LLAMA, codes=CODES, end=END)
    try:
        assert "same tokens" in visual_spec.summary(LLAMA)
        assert torch.equal(LLAMA.generate(**PROMPTS, max_new_tokens=6, do_sample=False), want)
        assert "tokens per call" in visual_spec.summary(LLAMA)
    finally:
        visual_spec.restore(LLAMA)


@pytest.mark.parametrize("kind", ["BloomForCausalLM", "MambaForCausalLM"])
def test_a_model_that_cannot_be_read_is_left_as_it_is_and_says_why(kind):
    import transformers

    cls = getattr(transformers, kind)
    model = cls(
        cls.config_class(vocab_size=96, hidden_size=32, num_hidden_layers=1, n_head=4, state_size=4)
    ).eval()
    with pytest.warns(UserWarning, match=f"{kind} is left as it is: its decoder"):
        assert visual_spec.accelerate(model, codes=CODES, end=END) is model
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    "given, error, text",
    [
        (dict(), TypeError, "codes="),
        (dict(codes=(50, 50)), ValueError, "50, 50"),
        (dict(codes=[(1, 5), (4, 8)]), ValueError, "overlap"),
        (dict(codes=(40, 97)), ValueError, "97"),
        (dict(codes=CODES, end=96), ValueError, "end=96"),
        (dict(codes=CODES, sampler="tree"), (TypeError, ValueError), "TreeSampler"),
        (dict(codes=CODES, drafter=LLAMA), TypeError, "drafter"),
        (
            dict(codes=CODES, sampler=type("Own", (), dict(lossless=True, __call__=print))()),
            TypeError,
            "Own.*early",
        ),
    ],
)
def test_refuses_before_any_compute(given, error, text):
    refuses(error, text, visual_spec.accelerate, LLAMA, **given)
    assert "generate" not in vars(LLAMA)


@pytest.mark.parametrize(
    "settings, text",
    [
        (dict(num_beams=3), "num_beams=3"),
        (dict(repetition_penalty=0.0), "0.0"),
        (dict(no_repeat_ngram_size=-1), "-1"),
        (dict(max_new_tokens=0), "0"),
        (dict(max_new_tokens=3, min_new_tokens=5), "5"),
        (dict(eos_token_id=7), "eos_token_id=7"),
        (dict(guidance_scale=0.5), "0.5"),
    ],
)
def test_refuses_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        generate_codes(LLAMA, **PROMPTS, codes=CODES, end=END, sampler=SAMPLERS["plain"], **settings)


ROPE: dict[str, Any] = dict(rope_theta=1e4, factor=2.0)
LONG: dict[str, Any] = dict(rope_type="longrope", long_factor=[3.0] * 4, short_factor=[1.0] * 4, **ROPE)
GPT_NEO: dict[str, Any] = dict(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    intermediate_size=64,
)
# Class, and what of its configuration says LIMIT, the most places of a text.
LIMIT = 20
LIMITED: dict[str, tuple[str, dict[str, Any]]] = {
    "learned": ("gpt2", dict(n_positions=LIMIT)),
    "learned, opt": ("OPT", dict(ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=LIMIT)),
    "dynamic": (
        "llama",
        dict(max_position_embeddings=LIMIT, rope_parameters=dict(rope_type="dynamic", **ROPE)),
    ),
    "dynamic, old form": (
        "qwen2",
        dict(max_position_embeddings=LIMIT, rope_scaling=dict(type="dynamic", factor=2.0)),
    ),
    "dynamic, by layer": (
        "gemma3",
        dict(
            max_position_embeddings=LIMIT,
            rope_parameters=dict(
                full_attention=dict(rope_type="dynamic", **ROPE),
                sliding_attention=dict(rope_type="default", **ROPE),
            ),
        ),
    ),
    "longrope": ("llama", dict(rope_parameters=LONG | dict(original_max_position_embeddings=LIMIT))),
    "longrope, phi3": ("phi3", dict(original_max_position_embeddings=LIMIT, rope_parameters=LONG)),
    "chosen places": ("Doge", dict(keep_window_size=LIMIT)),
    "local layers": ("GPTNeo", GPT_NEO | dict(window_size=LIMIT + 4)),
    "masks of layers": ("GPTNeo", GPT_NEO | dict(window_size=256, max_position_embeddings=LIMIT + 4)),
}


@pytest.mark.fast_sets(12)
@pytest.mark.parametrize("guidance", [{}, dict(guidance_scale=2.0)])
@pytest.mark.parametrize("kind", LIMITED)
def test_up_to_a_limit_texts_are_those_of_generate_and_beyond_it_refused(kind, guidance):
    model, prompts = language_model(LIMITED[kind][0], **LIMITED[kind][1]), texts([9] * 6)
    second = dict(negative_prompt_ids=prompts["input_ids"][:, -3:]) if guidance else {}
    settings: dict[str, Any] = dict(do_sample=True, codes=(CODES,), end=None, **guidance, **second)
    torch.manual_seed(0)
    want = theirs(model, prompts, max_new_tokens=LIMIT - 9, **settings)
    torch.manual_seed(0)
    assert torch.equal(ours(model, prompts, SAMPLERS["window 4"], max_new_tokens=LIMIT - 9, **settings), want)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"at most {LIMIT} "):
        ours(model, prompts, SAMPLERS["window 4"], max_new_tokens=LIMIT - 8, **settings)
    assert torch.equal(torch.get_rng_state(), state)  # before any compute


def test_the_longer_prompt_of_guidance_counts():
    model = language_model(*LIMITED["dynamic"][:1], **LIMITED["dynamic"][1])
    longer: dict[str, Any] = dict(guidance_scale=2.0, negative_prompt_ids=texts([12])["input_ids"])
    refuses(ValueError, "21 places", ours, model, texts([4]), SAMPLERS["plain"], max_new_tokens=9, **longer)


def test_a_picture_is_held_to_the_limits_too():
    from tests.helpers.transformers_models import INPUTS
    from tests.models.next_token import tiny_transformers as tiny

    model = tiny.janus()
    settings = model.config.text_config
    settings.max_position_embeddings, settings.rope_parameters = 12, dict(rope_type="dynamic", **ROPE)
    with pytest.raises(ValueError, match="at most 12 "):
        visual_spec.accelerate(type(model)(model.config)).generate_images(
            **INPUTS["janus"], guidance_scale=1.0
        )


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "chosen places", "local layers"])
def test_the_trial_sees_what_depends_on_the_length_of_a_call(kind, monkeypatch):
    """Where nobody names the limit: two texts are read, at different places and beyond it."""
    name, settings = LIMITED[kind]
    short = {
        key: LIMIT // 4
        if value in (LIMIT, LIMIT + 4)
        else value | dict(original_max_position_embeddings=5)
        if isinstance(value, dict)
        else value
        for key, value in settings.items()
    }
    model = language_model(name, **short)
    with monkeypatch.context() as patch:
        patch.setattr(code_language, "length_limits", lambda *_: [])
        patch.setattr(cached_decoder, "check_length", lambda *_, **__: None)
        patch.setattr(code_language, "local_window", lambda _: None)
        assert "depend on more than the places" in (why_not(model) or "")
    assert "at most" in (why_not(model) or "")


def test_layers_whose_masks_are_not_known_are_named():
    model = language_model(
        "Llama4", head_dim=8, intermediate_size_mlp=64, attention_chunk_size=64, num_local_experts=2
    )
    assert "chunked_attention" in (why_not(model) or "")


def test_codes_are_for_language_models_only():
    from tests.models.next_token import tiny_transformers as tiny

    refuses(TypeError, "codes", visual_spec.accelerate, tiny.janus(), codes=CODES)


def test_the_snippet_of_the_page_of_models(capsys):
    page = (Path(__file__).parents[2] / "docs" / "MODELS.md").read_text()
    [snippet] = re.findall(r"### Language models of codes.*?```python\n(.*?)```", page, flags=re.S)
    names: dict[str, Any] = dict(model=LLAMA, inputs=PROMPTS)
    exec(snippet, names)
    text = names["ids"][:, PROMPTS["input_ids"].shape[1] :]
    assert ((text >= CODES[0]) & (text <= END) | (text == 0)).all()
    assert "same tokens" in capsys.readouterr().out and "generate" not in vars(LLAMA)


def test_the_end_may_be_among_the_codes():
    assert CodeLanguageModel(LLAMA, (40, 60), 45, new_tokens=3).end == 5


@pytest.mark.fast_sets(8)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("sampler", ["plain", "window 4", "window 16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_sampled_texts_are_those_of_generate_for_a_seed(kind, sampler, law):
    """And the generator ends where `generate` leaves it, so a second text follows the first."""
    model = LLAMA if kind == "llama" else language_model(kind)
    second = dict(
        negative_prompt_ids=NEGATIVE["input_ids"], negative_prompt_attention_mask=NEGATIVE["attention_mask"]
    )
    settings: dict[str, Any] = dict(do_sample=True, **LAWS[law], **(second if law == "all" else {}))
    for seed in range(3):
        torch.manual_seed(seed)
        want = [theirs(model, PROMPTS, **settings) for _ in range(2)]
        torch.manual_seed(seed)
        got = [ours(model, PROMPTS, SAMPLERS[sampler], **settings) for _ in range(2)]
        for one, other in zip(want, got, strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(want[0], want[1])


def test_texts_without_an_end_leave_the_generator_as_generate_does():
    settings = dict(do_sample=True, max_new_tokens=9)
    torch.manual_seed(4)
    want, after = theirs(LLAMA, PROMPTS, ((45, 60),), None, **settings), torch.rand(2)
    for sampler in ("plain", "window 16"):
        torch.manual_seed(4)
        got = ours(LLAMA, PROMPTS, SAMPLERS[sampler], [(45, 60)], None, **settings)
        assert torch.equal(got, want) and torch.equal(torch.rand(2), after)


def test_a_sampler_that_keeps_the_law_alone_draws_by_keys():
    """Acceptance "exact" does not keep tokens: the noise of slots would promise what it cannot hold."""
    torch.manual_seed(4)
    want = theirs(LLAMA, PROMPTS, do_sample=True)
    torch.manual_seed(4)
    assert not torch.equal(ours(LLAMA, PROMPTS, SAMPLERS["exact"], do_sample=True), want)


def block_drafter(corrects: bool, guided: bool) -> Any:
    """A drafter of blocks for `LLAMA`, with seeded weights."""
    stage = CodeLanguageModel(LLAMA, CODES, END, new_tokens=1)
    text = Prompt(PROMPTS["input_ids"], PROMPTS["attention_mask"])
    state = stage.prefill(ImagePrompt(text, text), batch_size=3, guided=guided, window=1)
    made: Any = BlockDrafter.for_target(stage, state, corrects=corrects, block_size=6, layers=2)
    made.to(state.features.dtype)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made.eval()


@pytest.mark.parametrize("settings", ["nothing", "all"])
@pytest.mark.parametrize("corrects", [True, False], ids=["corrector", "layout"])
def test_a_block_drafter_changes_no_token_of_a_batch_or_of_a_stream(corrects, settings, tmp_path):
    drafter = block_drafter(corrects, "guidance_scale" in SETTINGS[settings])
    drafter.save_pretrained(tmp_path)
    drafter = BlockDrafter.from_pretrained(tmp_path)

    class Heard(BaseStreamer):
        ids: list[int] = []

        def put(self, value: Tensor) -> None:
            self.ids += value.flatten().tolist()

        def end(self) -> None:
            self.ids.append(-1)

    want = ours(LLAMA, PROMPTS, "autoregressive", do_sample=True, generator=seeds(3), **given(settings))
    visual_spec.accelerate(LLAMA, BlockDraftSampler(6), codes=CODES, end=END, drafter=drafter)
    try:
        asked = dict(do_sample=True, max_new_tokens=24)
        assert torch.equal(LLAMA.generate(**PROMPTS, **asked, generator=seeds(3), **given(settings)), want)
        trace = LLAMA.last_trace
        assert trace.identical and int(trace.target_calls.max()) <= 24
        one = {name: part[:1] for name, part in PROMPTS.items()}
        rest = {n: part[:1] if isinstance(part, Tensor) else part for n, part in given(settings).items()}
        streamer = Heard()
        ids = LLAMA.generate(**one, **asked, generator=seeds(1), streamer=streamer, **rest)
        assert streamer.ids == [*ids[0].tolist(), -1]
    finally:
        visual_spec.restore(LLAMA)


def test_a_drafter_is_refused_where_the_sampler_takes_none():
    with pytest.raises(TypeError, match="takes no drafter; pass BlockDraft"):
        visual_spec.accelerate(LLAMA, codes=CODES, drafter=object())
    with pytest.raises(ValueError, match="a BlockDrafter trained for it"):
        visual_spec.accelerate(LLAMA, BlockDraftSampler(), codes=CODES)


def seeds(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]
