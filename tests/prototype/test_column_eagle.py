"""The drafter of columns: against a straight-line computation, its own unrolled training, and a MusicGen's laws."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.column_drafters import BATCH, FRAMES, SCALE, columns, condition, drafter_for
from tests.helpers.refusals import refuses
from tests.helpers.tiny_audio import BOOKS, CODES, tiny_decoder
from visual_spec.models.columns.musicgen import MusicgenColumnModel, MusicgenState
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.drafted_columns.eagle import ColumnEagleDrafter, ColumnEagleState

STEPS = FRAMES + BOOKS - 1


def texts(length: int = STEPS, seed: int = 1) -> Tensor:
    return torch.randint(0, CODES, (BATCH, length, BOOKS), generator=torch.Generator().manual_seed(seed))


def start(
    target: MusicgenColumnModel, drafter: ColumnEagleDrafter, *, guided: bool = True, prompt_frames: int = 0
) -> tuple[MusicgenState, ColumnEagleState]:
    """Both states after the prefill."""
    state = target.prefill(condition(prompt_frames), batch_size=BATCH, guided=guided, window=STEPS)
    return state, drafter.follow(target, state, window=STEPS, guidance_scale=SCALE if guided else 1.0)


def steps_from(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count).expand(BATCH, -1)


def norm(values: Tensor, layer: Any) -> Tensor:
    centred = values - values.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def straight_line(drafter: Any, target: MusicgenColumnModel, sequence: Tensor, fused: Tensor) -> Tensor:
    """Hidden states [N, dim] of one sample, all columns sequence [N, K] with given features [N, dim], one by one."""
    tables = target.decoder.embed_tokens
    positions = target.position_table(1 + STEPS)
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in drafter.blocks]
    outputs = []
    for place, (column, feature) in enumerate(zip(sequence, fused, strict=True), start=1):
        embedding: Any = sum(tables[k].weight[column[k]] for k in range(BOOKS))
        mixed = torch.cat([norm(embedding, drafter.embedding_norm), norm(feature, drafter.state_norm)])
        hidden = drafter.mix.weight @ mixed + positions[place]
        for block, cache in zip(drafter.blocks, caches, strict=True):
            query, key, value = (block.qkv.weight @ norm(hidden, block.attention_norm)).chunk(3)
            cache.append((key, value))
            parts = []
            for head in range(4):
                of_head = slice(8 * head, 8 * head + 8)
                weights = torch.stack([query[of_head] @ k[of_head] / 8**0.5 for k, _ in cache]).softmax(0)
                parts.append(sum(w * v[of_head] for w, (_, v) in zip(weights, cache, strict=True)))
            hidden = hidden + block.out.weight @ torch.cat(parts)
            up = block.up.weight @ norm(hidden, block.ffn_norm)
            hidden = hidden + block.down.weight @ (up * 0.5 * (1 + torch.erf(up / 2**0.5)))
        outputs.append(hidden)
    return torch.stack(outputs)


def fused_by_hand(drafter: ColumnEagleDrafter, layers: list[Tensor], guided: bool, sample: int) -> Tensor:
    """Features [N, dim] of one sample from the target's layers [R, N, dim]."""
    last, early = layers[-1][sample], layers[0][sample]
    if guided:
        other = layers[-1][sample + BATCH]
        last = other + SCALE * (last - other)
    norms: Any = drafter.feature_norms
    return torch.cat([norm(last, norms[0]), norm(early, norms[1])], -1) @ drafter.fuse.weight.T


@pytest.mark.parametrize("guided", [False, True])
def test_logits_equal_a_straight_line_computation(guided):
    target = columns()
    drafter = drafter_for(target)
    state, drafting = start(target, drafter, guided=guided)
    tokens, seen = texts(), [layer.clone() for layer in state.features]
    target(state, tokens[:, :5], steps_from(0, 5))  # columns 0 to 4, which gives the features up to step 5
    layers = [torch.cat(pair, 1) for pair in zip(seen, state.features, strict=True)]  # [R, 6, dim]
    drafter.observe(drafting, drafting.beside.features, steps_from(0, 5))
    exact = drafter(drafting, tokens[:, :6], steps_from(0, 6))  # [B, 6, K, V]
    guessed = drafter(drafting, tokens[:, 6:7], steps_from(6, 1))  # on the drafter's own feature
    assert exact.shape == (BATCH, 6, BOOKS, CODES) and not drafting.guided
    heads = target.heads
    for sample in range(BATCH):
        sequence = torch.where(target.valid[:7], tokens[sample, :7], target.special_id)
        fused = fused_by_hand(drafter, layers, guided, sample)
        hidden = straight_line(drafter, target, sequence[:6], fused)
        hidden = straight_line(drafter, target, sequence, torch.cat([fused, hidden[-1:]]))
        for k in range(BOOKS):
            wanted = norm(hidden, drafter.final_norm) @ heads[k].weight.T
            assert (exact[sample, :, k] - wanted[:6]).abs().max() < 1e-10
            assert (guessed[sample, 0, k] - wanted[6]).abs().max() < 1e-10


def test_guided_features_give_the_targets_guided_logits():
    """What the drafter goes on from carries the guided law: the heads are linear."""
    target = columns()
    state = target.prefill(condition(), batch_size=BATCH, guided=True, window=4)
    logits = target(state, texts()[:, :4], steps_from(0, 4))
    conditional, unconditional = logits.chunk(2)
    c, u = state.features[-1].chunk(2)
    guided = unconditional + SCALE * (conditional - unconditional)
    assert (target.score(u + SCALE * (c - u)) - guided).abs().max() < 1e-10


@pytest.mark.parametrize("prompt_frames", [0, 4])
def test_ragged_rows_that_are_drafted_refused_and_fed_again_equal_a_fresh_computation(prompt_frames):
    """As the sampler goes: catch up with the text, draft two columns, have the target score them, keep some.

    A call that finds no replacement commits nothing (-1). The newest column is then fed again.
    """
    target = columns(prompt_frames)
    drafter, width = drafter_for(target), target.grid.width
    tokens, wrong = texts(width + 4), texts(width + 4, seed=2)
    every = steps_from(0, width - 1)
    _, whole = start(target, drafter, prompt_frames=prompt_frames)
    target(whole.beside, tokens[:, : width - 1], every)
    drafter.observe(whole, whole.beside.features, every)
    expected = drafter(whole, tokens[:, : width - 1], every)

    def at(text: Tensor, steps: Tensor) -> Tensor:
        return text.gather(1, steps[..., None].expand(-1, -1, BOOKS))

    _, drafting = start(target, drafter, prompt_frames=prompt_frames)
    lengths, fed, compared = torch.tensor([1, 1]), torch.tensor([0, 0]), 0
    for kept in ([0, 2], [1, -1], [-1, 0], [2, 0], [0, 1]):
        fed = torch.minimum(fed, lengths - 1)
        steps = fed[:, None] + torch.arange(3)
        known = (steps < lengths[:, None])[..., None]
        logits = drafter(drafting, torch.where(known, at(tokens, steps), at(wrong, steps)), steps)
        for row, length in enumerate(lengths.tolist()):
            if length < width:
                newest = length - 1
                assert (logits[row, newest - fed[row]] - expected[row, newest]).abs().max() < 1e-10
                compared += 1
        steps = lengths[:, None] + torch.arange(2)  # of the drafts
        right = (torch.arange(2) < torch.tensor(kept)[:, None])[..., None]
        drafts = torch.where(right, at(tokens, steps), at(wrong, steps))
        for index in range(2):
            drafter(drafting, drafts[:, index, None], steps[:, index, None])
        steps = lengths[:, None] - 1 + torch.arange(3)
        target(drafting.beside, torch.cat([at(tokens, steps[:, :1]), drafts], 1), steps)
        drafter.observe(drafting, drafting.beside.features, steps)
        fed, lengths = lengths, (lengths + torch.tensor(kept) + 1).clamp(max=width)
    assert compared >= 9


def test_a_prompt_is_read_like_text_that_was_decoded():
    """The same codes as a prompt, or decoded before: the drafter predicts the same."""
    plain, given = columns(), columns(4)
    drafter = drafter_for(plain)
    codes = condition(4).codes
    assert codes is not None
    whole = F.pad(codes, (0, FRAMES - 4))
    sequence = plain.pattern.apply(whole, plain.special_id).transpose(1, 2)[:, : given.first_step]
    _, drafting = start(plain, drafter)
    text = steps_from(0, given.first_step)
    plain(drafting.beside, sequence, text)
    drafter.observe(drafting, drafting.beside.features, text)
    drafter(drafting, sequence, text)
    # In place of what the drafter left after its newest column.
    drafter.observe(drafting, drafting.beside.features, text)
    _, prompted = start(given, drafter, prompt_frames=4)
    tokens = sequence.new_zeros(BATCH, 1, BOOKS).masked_fill(~given.valid[:1], 0)
    column = torch.where(given.valid[0], tokens, prompted.beside.forced[:, given.first_step, None])
    one = drafter(drafting, column, steps_from(given.first_step, 1))
    other = drafter(prompted, tokens, steps_from(0, 1))
    assert (one - other).abs().max() < 1e-10


@pytest.mark.parametrize("steps", [1, 3])
def test_unrolled_training_equals_cached_decoding(steps):
    target = columns()
    drafter = drafter_for(target)
    tokens = texts()
    sequence = torch.where(target.valid, tokens, target.special_id)
    states, seen = target.encoder_states(condition(), guided=True)
    layers = target.features(sequence.repeat(2, 1, 1), states, seen)
    with torch.no_grad():
        outputs = drafter.unrolled(target, sequence[:, :-1], drafter.read(layers, True, SCALE)[:, :-1], steps)
    for step, predicted in enumerate(outputs):
        for at in range(step, STEPS - 1):
            _, drafting = start(target, drafter)
            known = at - step + 1  # steps whose features are the target's
            if known > 1:
                target(drafting.beside, tokens[:, : known - 1], steps_from(0, known - 1))
                drafter.observe(drafting, drafting.beside.features, steps_from(0, known - 1))
            logits = drafter(drafting, tokens[:, :known], steps_from(0, known))
            for later in range(known, at + 1):
                logits = drafter(drafting, tokens[:, later, None], steps_from(later, 1))
            assert (target.score(predicted[:, at, None]) - logits[:, -1:]).abs().max() < 1e-9


def test_unrolled_steps_pass_gradients_back_to_the_first():
    target = columns()
    drafter = drafter_for(target)
    features = torch.randn(BATCH, STEPS - 1, 32, dtype=torch.float64, requires_grad=True)
    last = drafter.unrolled(target, texts(STEPS - 1), features, 3)[2]
    last[:, 8].sum().backward()  # drafted from steps 0 to 6: step 7 reads a feature made up after step 6
    assert features.grad is not None
    touched = features.grad.abs().amax((0, 2)) > 0
    assert touched.tolist() == [step <= 6 for step in range(STEPS - 1)]


def test_owns_neither_embeddings_nor_heads_of_the_target(tmp_path):
    target = columns()
    drafter = drafter_for(target)
    assert not any({CODES, CODES + 1} & set(parameter.shape) for parameter in drafter.parameters())
    drafter.save_pretrained(tmp_path)
    loaded = ColumnEagleDrafter.from_pretrained(tmp_path).double().eval()
    assert isinstance(loaded, ColumnEagleDrafter) and loaded.config["taps"] == [1]
    outputs = [made(start(target, made)[1], texts()[:, :3], steps_from(0, 3)) for made in (drafter, loaded)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4  # saved in double, loaded in single precision


def test_half_precision_runs_in_half_and_gives_logits_in_single():
    target = columns(dtype=torch.bfloat16)
    drafter = drafter_for(target)
    own = condition()
    state = target.prefill(
        TextCondition(own.features.bfloat16(), own.mask), batch_size=BATCH, guided=True, window=4
    )
    drafting = drafter.follow(target, state, window=4, guidance_scale=SCALE)
    logits = drafter(drafting, texts()[:, :4], steps_from(0, 4))
    assert drafting.features.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_refuses_another_target_and_says_what_it_was_made_for():
    drafter = drafter_for(columns())
    other = MusicgenColumnModel(tiny_decoder(torch.float64, num_hidden_layers=2), FRAMES)
    refuses(ValueError, "num_layers=3.*num_layers=2", drafter.check_target, other)
    refuses(ValueError, "Linear", drafter.check_target, torch.nn.Linear(2, 2))
    refuses(ValueError, r"taps=\(3,\).*1.*2", ColumnEagleDrafter.for_target, columns().model, taps=(3,))
