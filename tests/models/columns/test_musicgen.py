"""MusicGen as a model of columns: against `generate` of transformers, and against plain forwards of its decoder."""

import pytest
import torch
import transformers

from tests.helpers.musicgen import (
    CODES,
    FRAMES,
    IDS,
    MASK,
    greedy,
    musicgen,
    random_codes,
    rows_of,
)
from tests.helpers.refusals import refuses
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition, text_condition
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.next_token.llamagen import TextCondition

transformers.logging.set_verbosity_error()


def columns_of(model: MusicgenColumnModel, codes: torch.Tensor) -> torch.Tensor:
    """[B, S, K]."""
    return model.pattern.apply(codes, model.special_id).transpose(1, 2)


def straight(
    model: MusicgenColumnModel, condition: TextCondition, codes: torch.Tensor, guided: bool
) -> torch.Tensor:
    """Logits [R, S, K, V]: a whole forward of transformers' own class for each row, without cache and padding."""
    whole = model.model
    columns = columns_of(model, codes)
    inputs = torch.cat([torch.full_like(columns[:, :1], CODES), columns[:, :-1]], 1)  # [B, S, K]
    found = []
    for null in [False, True] if guided else [False]:
        for row in range(len(codes)):
            own = rows_of(condition, [row])
            states = whole.enc_to_dec_proj(own.features) * (not null)
            logits = whole.decoder(input_ids=inputs[row].T, encoder_hidden_states=states).logits  # [K, S, V]
            found.append(logits.transpose(0, 1))
    return torch.stack(found)


# -- against generate -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_bare_language_model_too():
    whole = musicgen(text_width=32)  # as wide as the decoder: no projection
    condition = text_condition(whole, IDS, MASK)
    native = whole.decoder.generate(
        input_ids=torch.full((12, 1), CODES),
        attention_mask=torch.ones(3, 1, dtype=torch.long),  # else the empty step counts as padding
        encoder_hidden_states=condition.features * MASK[..., None],
        encoder_attention_mask=MASK,
        do_sample=False,
        num_return_sequences=1,
        use_cache=False,  # with one, transformers 5.23 appends the keys of the text to those of the codes
        max_new_tokens=FRAMES + 3,
        bos_token_id=CODES,
        pad_token_id=CODES,
        decoder_start_token_id=CODES,
    )
    columns = MusicgenColumnModel(whole.decoder, FRAMES)
    assert torch.equal(greedy(columns, condition, 1.0, 3), native)


# -- windows, progress, rollback ------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("prompt", [0, 2])
@torch.no_grad()
def test_windows_and_single_calls_equal_a_straight_forward(channels, guided, prompt):
    model = MusicgenColumnModel(musicgen(channels), FRAMES, prompt_frames=prompt)
    text, codes = text_condition(model.model, IDS, MASK), random_codes(model, 3)
    condition = MusicCondition(text.features, text.mask, codes[:, :, :prompt])
    want = straight(model, condition, codes, guided)[:, prompt:]
    count = model.grid.width
    assert want.shape == (6 if guided else 3, count, 4, CODES)
    # What is fed at forced entries does not matter.
    fed = columns_of(model, codes)[:, prompt:].where(model.valid, CODES)
    steps = torch.arange(count).expand(3, -1)
    state = model.prefill(condition, batch_size=3, guided=guided, window=count)
    assert (state.logits - want[:, 0]).abs().max() < 1e-10
    wide = model(state, fed, steps)
    assert wide.shape[1] == count and (wide[:, :-1] - want[:, 1:]).abs().max() < 1e-10
    state = model.prefill(condition, batch_size=3, guided=guided, window=1)
    for step in range(count - 1):
        single = model(state, fed[:, step : step + 1], steps[:, step : step + 1])
        assert (single[:, 0] - want[:, step + 1]).abs().max() < 1e-10
    assert want.std(1).mean() > 0.1  # the laws differ from step to step


@torch.no_grad()
def test_rows_move_at_their_own_pace_and_take_back_what_was_rejected():
    model = MusicgenColumnModel(musicgen(), FRAMES)
    condition, codes = text_condition(model.model, IDS, MASK), random_codes(model, 3)
    want, fed = straight(model, condition, codes, True), columns_of(model, codes)
    state = model.prefill(condition, batch_size=3, guided=True, window=3)
    wrong = torch.randint(0, CODES, (3, 40, 4), generator=torch.Generator().manual_seed(9))
    places = torch.tensor([0, 0, 0])
    rows = torch.arange(3)[:, None]
    seen = 0
    # Every call feeds three columns, the last ones wrong; each row then keeps as many as it likes.
    for number, kept in enumerate([[1, 2, 3], [3, 1, 0], [0, 3, 2], [2, 1, 3], [3, 3, 1], [3, 3, 3]]):
        steps = places[:, None] + torch.arange(3)
        right = torch.arange(3) < torch.tensor(kept)[:, None]
        inside = steps < model.grid.width
        tokens = fed[rows, steps.clamp_max(model.grid.width - 1)]
        tokens = tokens.where((right & inside)[..., None], wrong[:, number : number + 3])
        logits = model(state, tokens, steps)
        for row in range(3):
            for column in range(kept[row]):
                step = int(steps[row, column])
                if step + 1 < model.grid.width:
                    for half in (0, 3):
                        assert (logits[row + half, column] - want[row + half, step + 1]).abs().max() < 1e-10
                    seen += 1
        places = (places + torch.tensor(kept)).clamp_max(model.grid.width - 1)
    assert seen > 20


@torch.no_grad()
def test_wide_calls_in_float32_and_with_eager_attention():
    exact = MusicgenColumnModel(musicgen(), FRAMES)
    model = MusicgenColumnModel(musicgen(dtype=torch.float32), FRAMES)
    condition, codes = text_condition(model.model, IDS, MASK), random_codes(model, 3)
    want = straight(exact, text_condition(exact.model, IDS, MASK), codes, False)
    fed, steps = columns_of(model, codes), torch.arange(model.grid.width).expand(3, -1)
    for kind in ("sdpa", "eager"):
        model.model.decoder.set_attn_implementation(kind)
        assert model._attention == kind
        state = model.prefill(condition, batch_size=3, guided=False, window=10)
        got = model(state, fed, steps)
        assert (got[:, :-1] - want[:, 1:]).abs().max() < 1e-3
    model.model.decoder.set_attn_implementation("sdpa")


@torch.no_grad()
def test_other_patterns_and_clips_beyond_the_position_table():
    whole = musicgen()
    condition = text_condition(whole, IDS, MASK)
    flat = MusicgenColumnModel(whole, 3, pattern=CodebookPattern.flat(4))
    codes = random_codes(flat, 3)
    want = straight(flat, condition, codes, False)
    state = flat.prefill(condition, batch_size=3, guided=False, window=12)
    got = flat(state, columns_of(flat, codes), torch.arange(12).expand(3, -1))
    assert (got[:, :-1] - want[:, 1:]).abs().max() < 1e-10
    long = MusicgenColumnModel(whole, 70)
    codes = random_codes(long, 1)
    alone = rows_of(condition, [0])
    state = long.prefill(alone, batch_size=1, guided=False, window=73)
    got = long(state, columns_of(long, codes), torch.arange(73)[None])
    assert whole.decoder.model.decoder.embed_positions.weights.shape[0] == 64  # left as it was
    want = straight(long, alone, codes, False)  # after which it is not: transformers grows it
    assert (got[:, :-1] - want[:, 1:]).abs().max() < 1e-6  # the table is float32


# -- padding ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_padding_is_not_there_or_is_zeros():
    whole = musicgen()
    condition = text_condition(whole, IDS, MASK)
    models = {kind: MusicgenColumnModel(whole, FRAMES, padding=kind) for kind in ("masked", "zeros")}
    codes = random_codes(models["masked"], 3)
    logits = {kind: model.teacher_forced(codes, condition) for kind, model in models.items()}
    # As in audiocraft: states of zeros, and attention goes everywhere.
    states = whole.enc_to_dec_proj(condition.features) * MASK[..., None]
    inputs = torch.nn.functional.pad(columns_of(models["zeros"], codes)[:, :-1], (0, 0, 1, 0), value=CODES)
    theirs = whole.decoder(
        input_ids=inputs.transpose(1, 2).flatten(0, 1), encoder_hidden_states=states
    ).logits
    theirs = models["zeros"].pattern.revert(theirs.unflatten(0, (3, 4)))
    assert (logits["zeros"] - theirs).abs().max() < 1e-10
    apart = (logits["zeros"] - logits["masked"]).abs().amax((1, 2, 3))
    assert apart[1] < 1e-10 and apart[0] > 0.1 and apart[2] > 0.1  # the second caption has no padding
    # Masked padding leaves no trace.
    alone = models["masked"].teacher_forced(codes[:1], rows_of(condition, [0]))
    assert (alone - logits["masked"][:1]).abs().max() < 1e-10


@pytest.mark.parametrize("padding", ["masked", "zeros"])
@torch.no_grad()
def test_a_row_without_text_is_the_unconditional_one(padding):
    model = MusicgenColumnModel(musicgen(), FRAMES, padding=padding)
    condition, codes = text_condition(model.model, IDS, MASK), random_codes(model, 3)
    dropped = torch.tensor([True, False, True])
    got = model.teacher_forced(codes, condition, dropped)
    whole = model.teacher_forced(codes, condition)
    no_text = TextCondition(torch.randn_like(condition.features), torch.zeros_like(condition.mask))
    # Some attention kernels make nan of a row that sees nothing.
    assert model.encoder_states(no_text)[1].any(-1).all()
    null = model.teacher_forced(codes, no_text)
    want = whole.where(~dropped[:, None, None, None], null)
    assert got.isfinite().all() and (got - want).abs().max() < 1e-12
    state = model.prefill(condition, batch_size=3, guided=True, window=1)
    columns = model.pattern.apply(torch.zeros(1, 4, FRAMES), 1)[0, :, 0] == 0  # codebooks of step 0
    assert (state.logits[3:, columns] - null[:, columns, 0]).abs().max() < 1e-10
    assert (whole - null).abs().max() > 0.1


# -- teacher forcing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2])
@torch.no_grad()
def test_teacher_forced_logits_are_those_of_decoding(channels):
    model = MusicgenColumnModel(musicgen(channels), FRAMES)
    condition, codes = text_condition(model.model, IDS, MASK), random_codes(model, 3)
    logits = model.teacher_forced(codes, condition)
    want = straight(model, condition, codes, False)  # [B, S, K, V]
    for codebook in range(4):
        delay = codebook // channels
        assert (logits[:, codebook] - want[:, delay : delay + FRAMES, codebook]).abs().max() < 1e-10


@torch.no_grad()
def test_hidden_steps_are_not_heard():
    model = MusicgenColumnModel(musicgen(), FRAMES)
    condition, codes = text_condition(model.model, IDS, MASK), random_codes(model, 3)
    hidden = torch.zeros(3, model.num_steps - 1, dtype=torch.bool)
    hidden[1] = True
    hidden[2, 3] = True
    logits = model.teacher_forced(codes, condition, hidden_steps=hidden)
    other = codes.clone()
    other[1] = random_codes(model, 3, seed=5)[1]
    for codebook in range(4):  # step 3 holds frame 3 of the first codebook, frame 2 of the second ...
        other[2, codebook, 3 - codebook] = (codes[2, codebook, 3 - codebook] + 1) % CODES
    assert (model.teacher_forced(other, condition, hidden_steps=hidden) - logits).abs().max() < 1e-12
    plain, changed = model.teacher_forced(codes, condition), model.teacher_forced(other, condition)
    assert (plain[0] == changed[0]).all() and (plain[1:] - changed[1:]).abs().amax((1, 2, 3)).min() > 0.1
    assert (logits[1, 0] - logits[1, 0, 0]).abs().max() > 0.1  # positions still tell steps apart


# -- MAGNeT -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_magnet_logits_are_those_of_transformers_under_a_mask_of_its_own():
    whole = musicgen()
    model = MagnetModel(whole, reach=2)
    condition = text_condition(whole, IDS, MASK)
    codes = torch.randint(0, CODES + 1, (3, 4, 9), generator=torch.Generator().manual_seed(2))
    stages = torch.tensor([0, 2, 3])
    got = model.logits(codes, condition, stages)
    for row, stage in enumerate(stages.tolist()):
        mask = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
        if stage:
            for frame in range(9):
                for other in range(9):
                    if abs(frame - other) > 2:
                        mask[..., frame, other] = -torch.inf
        states = whole.enc_to_dec_proj(rows_of(condition, [row]).features)
        want = whole.decoder(
            input_ids=codes[row], attention_mask=mask, encoder_hidden_states=states, use_cache=False
        ).logits[stage]
        assert (got[row] - want).abs().max() < 1e-10
    later = codes.clone()
    later[:, :, 8] = (later[:, :, 8] + 1) % CODES  # frame 8 is seen from frame 0 by the first codebook only
    moved = (model.logits(later, condition, stages) - got).abs().amax(-1)
    assert moved[0, 0] > 1e-3 and moved[1:, :4].max() == 0  # two layers reach four frames


# -- bad input --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    whole = musicgen()
    refuses(TypeError, "Linear.*MusicgenForConditionalGeneration", MagnetModel, torch.nn.Linear(1, 1))
    refuses(ValueError, "padding='left'.*'masked'", MusicgenColumnModel, whole, FRAMES, padding="left")
    refuses(ValueError, "num_frames=0", MusicgenColumnModel, whole, 0)
    refuses(ValueError, "prompt_frames=7.*num_frames=7.*0.*6", MusicgenColumnModel, whole, 7, prompt_frames=7)
    refuses(ValueError, "3 codebooks.*4", MusicgenColumnModel, whole, 7, pattern=CodebookPattern.parallel(3))
    refuses(ValueError, "reach=-1", MagnetModel, whole, reach=-1)
    columns = MusicgenColumnModel(whole, 7, prompt_frames=2)
    text = text_condition(whole, IDS, MASK)
    refuses(TypeError, "TextCondition", columns.prefill, [], batch_size=3, guided=False, window=1)
    refuses(ValueError, r"\[2, T, 24\]", columns.prefill, text, batch_size=2, guided=False, window=1)
    with pytest.raises(ValueError, match=r"prompt_frames=2.*\(3, 4, 2\)"):
        columns.prefill(text, batch_size=3, guided=False, window=1)
    for codes, message in [
        (torch.zeros(3, 4, 3, dtype=torch.long), r"\(3, 4, 3\).*\(3, 4, 2\)"),
        (torch.full((3, 4, 2), CODES), "16.*16.*0.*15"),
    ]:
        with pytest.raises(ValueError, match=message):
            condition = MusicCondition(text.features, text.mask, codes)
            columns.prefill(condition, batch_size=3, guided=False, window=1)
    with pytest.raises(ValueError, match=r"\(1, 4, 5\).*\[B, 4, 7\]"):
        columns.teacher_forced(torch.zeros(1, 4, 5, dtype=torch.long), text)


def test_an_attention_that_takes_no_mask_is_refused(monkeypatch):
    whole = musicgen()
    layer = whole.decoder.model.decoder.layers[0].self_attn
    monkeypatch.setattr(layer.config, "_attn_implementation", "flash_attention_2")
    refuses(ValueError, "attn_implementation='flash_attention_2'", MusicgenColumnModel, whole, FRAMES)
