"""Drafts of a second source or of earlier frames: lossless by enumeration, the plain tokens, and wrong labels."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumeration, Enumerator, distance
from tests.helpers.drafting_sequences import pair
from tests.helpers.sampler_settings import COMBINATIONS
from tests.helpers.tabular import TabularModel
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.drafts import Draft, Label, copied_slots
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster import jacobi, jacobi_identical, redrafting
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.jacobi_identical import FedWindow, opened, repaired
from visual_spec.samplers.raster.redrafting import Chosen, redrafted

GUMBEL, INDEPENDENT, MAXIMAL = (
    dict(coupling=name, acceptance="exact") for name in ("gumbel", "independent", "maximal")
)
IDENTICAL = dict(coupling="gumbel", acceptance="identical")
WAYS = [IDENTICAL, GUMBEL, INDEPENDENT, MAXIMAL]
EVERY_WAY = pytest.mark.parametrize("way", WAYS, ids=["identical", "gumbel", "independent", "maximal"])
GUIDED = TokenLaw(guidance_scale=1.7, top_k=2)


def enumerated(networks: Any, law: Any = PLAIN, **settings: Any) -> Enumeration:
    model, drafter = networks
    parts = {"drafter": drafter} if settings["drafts"] == "chosen" else {}
    return Enumerator(SpeculativeJacobiSampler(**settings), model, law, **parts).run()


@EVERY_WAY
@pytest.mark.parametrize("redrafts", [1, 2])
@pytest.mark.parametrize("drafts", ["repaired", "chosen"])
def test_every_way_is_lossless(drafts, redrafts, way):
    networks = pair()
    found = enumerated(networks, window=3, drafts=drafts, redrafts=redrafts, **way)
    assert distance(found, networks[0]) < 1e-10
    assert found.calls < 3.3


@EVERY_WAY
@pytest.mark.parametrize("drafts", ["repaired", "chosen"])
def test_lossless_on_a_longer_sequence_of_two_tokens(drafts, way):
    """Behind slot 2 copies are found, and a slot is drafted anew that was drafted anew before."""
    networks = pair(1, height=3, vocab_size=2)
    found = enumerated(networks, window=3, drafts=drafts, redrafts=2, **way)
    assert distance(found, networks[0]) < 1e-10


@EVERY_WAY
@pytest.mark.parametrize("drafts", ["repaired", "chosen"])
def test_lossless_under_guidance_and_filters(drafts, way):
    networks = pair(seed=1)
    found = enumerated(networks, GUIDED, window=2, drafts=drafts, **way)
    assert distance(found, networks[0], GUIDED) < 1e-10


@EVERY_WAY
def test_a_drafter_that_is_the_target_saves_calls(way):
    model, _ = pair(seed=2)
    calls = [
        enumerated((model, model), window=3, drafts=drafts, **way).calls for drafts in ("carried", "chosen")
    ]
    assert calls[1] < calls[0] - 0.1, calls


# ----------------------------------------------------------------------------------------------- planted mistakes


@pytest.mark.parametrize("way", [GUMBEL, INDEPENDENT, MAXIMAL], ids=["gumbel", "independent", "maximal"])
@pytest.mark.parametrize("drafts", ["repaired", "chosen"])
def test_catches_a_new_draft_with_the_label_of_the_carried_one(monkeypatch, drafts, way):
    def wrongly_chosen(*args: Any) -> Draft:
        carried, found = args[2], redrafted(*args)
        assert carried.label is not None and found.label is not None
        found.label.rows = carried.label.rows
        return found

    def wrongly_repaired(*args: Any) -> FedWindow:
        now = opened(*args)
        assert now.replaced is not None
        return now._replace(replaced=torch.zeros_like(now.replaced))

    monkeypatch.setattr(redrafting, "redrafted", wrongly_chosen)
    monkeypatch.setattr(jacobi, "opened", wrongly_repaired)
    networks = pair(1, height=3, vocab_size=2)
    found = enumerated(networks, window=3, drafts=drafts, redrafts=2, initial_draft="last_law", **way)
    assert distance(found, networks[0]) > 1e-3


def test_catches_a_choice_by_the_noise_of_the_slot(monkeypatch):
    """What acceptance "identical" may do: take the drafter's token only if it is probable."""

    def choosy(source: Chosen, place: int, before: Any) -> Any:
        tokens, law, wanted = real(source, place, before)
        return tokens, law, wanted & (law.gather(-1, tokens[..., None])[..., 0].exp() > 0.4)

    real = Chosen.__call__
    monkeypatch.setattr(Chosen, "__call__", choosy)
    networks = pair()
    found = enumerated(networks, window=2, drafts="chosen", initial_draft="last_law", **INDEPENDENT)
    assert distance(found, networks[0]) > 1e-3


# -------------------------------------------------------------------------------------------------- token for token

MODEL, NEAR = (TabularModel(TokenGrid(5, 6), 11, order=2, conditions=5, dependence=0.3) for _ in range(2))
NEAR.logits = MODEL.logits + 0.7 * TabularModel(TokenGrid(5, 6), 11, order=2, conditions=5, seed=1).logits
LAWS = {
    "plain": TokenLaw(),
    "guided": TokenLaw(guidance_scale=3.0, temperature=0.9, top_k=7, top_p=0.95),
    "greedy": TokenLaw(temperature=0.0),
}


@pytest.mark.fast_sets(36)
@pytest.mark.parametrize("redrafts", [1, 5, 99])
@pytest.mark.parametrize("window", [1, 2, 8, 64])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("drafts", ["repaired", "chosen"])
def test_identical_mode_returns_the_autoregressive_tokens(drafts, law, window, redrafts):
    sampler = SpeculativeJacobiSampler(window, drafts=drafts, redrafts=redrafts)
    parts = {"drafter": NEAR} if drafts == "chosen" else {}
    for rows in ([3], [0, 4, 1, 2, 3]):

        def decode(sampler: Any, rows: Any = rows, **parts: Any) -> Any:
            parts |= dict(generator=seeded(*(100 + row for row in rows)), batch_size=len(rows))
            return sampler(MODEL, torch.tensor(rows), law=law, **parts)

        found = decode(sampler, **parts)
        assert torch.equal(found.tokens, decode(AutoregressiveSampler()).tokens)
        if window == 1:
            assert (found.trace.target_calls == 30).all()


FRAME_DRAFTS = ("previous_frame", "moved_frame", "panned_frame")


def frame_distance(sampler: SpeculativeJacobiSampler, model: TabularModel) -> float:
    return distance(Enumerator(sampler, model).run(), model)


@pytest.mark.parametrize("initial_draft", FRAME_DRAFTS)
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("window", [2, 3])
def test_two_frames_are_lossless(window, coupling, acceptance, initial_draft):
    """Slots 2 and 3 copy slots 0 and 1; a window of 3 crosses the border of the frames."""
    model = TabularModel(TokenGrid(1, 2, 2), 3, seed=2)
    sampler = SpeculativeJacobiSampler(window, coupling, acceptance, initial_draft)
    assert frame_distance(sampler, model) < 1e-10


@pytest.mark.parametrize("initial_draft", ["moved_frame", "panned_frame"])
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("grid", [TokenGrid(1, 1, 5), TokenGrid(1, 2, 3)], ids=["1 x 1 x 5", "1 x 2 x 3"])
def test_moved_frames_are_lossless_where_motion_is_seen(grid, coupling, acceptance, initial_draft):
    """With two tokens a frame and more than two frames, blocks are matched, and lags chosen."""
    model = TabularModel(grid, 2, seed=3)
    assert frame_distance(SpeculativeJacobiSampler(3, coupling, acceptance, initial_draft), model) < 1e-10


class CreditsStoredLaw(SpeculativeJacobiSampler):
    """The likely bug: a copied token is labelled with the law that the token was once drawn from."""

    def redraft(self, run, state, laws, advance, width, drawn=None):
        super().redraft(run, state, laws, advance, width, drawn)
        assert laws is not None and state.label is not None
        slots = state.next_slots(state.label.rows.shape[1])
        newest = (state.lengths - advance + width - 1)[:, None]
        first = (state.lengths - advance)[:, None]  # the slot that row 0 of `laws` predicts
        source = copied_slots("previous_frame", slots, newest, run.model.grid)
        rows = torch.where(state.label.rows < 0, (source - first).clamp(0, width - 1), state.label.rows)
        state.label = Label(laws, rows, state.label.allowed)


@pytest.mark.parametrize("coupling", ["gumbel", "independent", "maximal"])
def test_crediting_the_stored_law_is_biased(coupling):
    model = TabularModel(TokenGrid(1, 1, 4), 3, seed=2)
    settings = (2, coupling, "exact", "previous_frame")
    assert frame_distance(SpeculativeJacobiSampler(*settings), model) < 1e-10
    assert frame_distance(CreditsStoredLaw(*settings), model) > 0.01


FRAMES = TabularModel(TokenGrid(2, 3, 6), 11, order=2, conditions=5, dependence=0.3)
CONDITION = torch.tensor([3, 0, 4, 1, 2])


@pytest.mark.parametrize("initial_draft", FRAME_DRAFTS)
@pytest.mark.parametrize("window", [1, 2, 8, 64])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_identical_mode_with_frame_drafts_returns_the_autoregressive_tokens(
    batch_size, window, initial_draft
):
    law = TokenLaw(guidance_scale=3.0, temperature=0.9, top_k=7)

    def decode(sampler):
        generators = seeded(*range(100, 100 + batch_size))
        condition = CONDITION[:batch_size]
        return sampler(FRAMES, condition, law=law, generator=generators, batch_size=batch_size).tokens

    sampler = SpeculativeJacobiSampler(window, "gumbel", "identical", initial_draft)
    assert torch.equal(decode(sampler), decode(AutoregressiveSampler()))


def test_what_two_calls_have_drawn_is_not_repaired_unless_copies_lead(monkeypatch):
    """Such a draft stays though the token before it has changed; without the rule copies stand in for some."""
    stale = changed = 0

    def watched(tokens: Tensor, inputs: Tensor, lengths: Tensor, fed: Tensor, at: Tensor, *rest: Any) -> Any:
        nonlocal stale, changed
        held = (at[:, 1:] >= lengths[:, None]) & ~lead[-1][:, None]
        known, before = steady[-1].gather(1, at)[:, 1:] & held, inputs.gather(1, at)[:, :-1]
        after, *others = repaired(tokens, inputs, lengths, fed, at, *rest)
        assert torch.equal(after[:, 1:][known], fed[:, 1:][known])
        stale += int((known & (before != after[:, :-1])).sum())
        changed += int((after != fed).sum())
        return after, *others

    class Watched(SpeculativeJacobiSampler):
        def step(self, run: Any, state: Any) -> None:
            before = state.tokens.clone()
            lead.append(state.copies_ahead > 0)
            steady.append(drawn.pop() if drawn else torch.zeros_like(before, dtype=torch.bool))
            super().step(run, state)
            scored = state.commit_call == state.round
            drawn.append((state.tokens == before) & scored)

    steady: list[Tensor] = []
    drawn: list[Tensor] = []
    lead: list[Tensor] = []
    monkeypatch.setattr(jacobi_identical, "repaired", watched)
    Watched(16, graph=False)(MODEL, None, law=TokenLaw(), generator=seeded(3))
    assert stale and changed


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("frames", [1, 2])
def test_copies_of_steady_drafts_and_who_leads_are_those_of_the_definition(frames, at_once, monkeypatch):
    """Both functions beside loops, on random tokens of few kinds."""
    if at_once:
        monkeypatch.setattr(jacobi_identical, "on_host", lambda tensor: False)
    grid, count, won = TokenGrid(4, 5, frames=frames), 4, 0
    back, size = (5, 20)[frames - 1], grid.num_tokens
    for seed in range(30):
        numbers = torch.Generator().manual_seed(seed)
        tokens, inputs, drawn = (
            torch.randint(0, 3, (2, length), generator=numbers) for length in (size + 8, size + 8, 6)
        )
        lengths = torch.randint(back, size - 1, (2,), generator=numbers)
        steady = torch.rand(2, 7, generator=numbers) < 0.7
        ahead = torch.randint(-1, 2, (2,), generator=numbers)
        at = lengths[:, None] - 1 + torch.arange(7)
        held, before = tokens.gather(1, at), inputs.gather(1, at)
        final = torch.randint(1, 7, (2,), generator=numbers)
        fed, _, copies = repaired(tokens, inputs, lengths, held, at, count, grid, None, steady, ahead)
        copies = torch.full((2, count), jacobi_identical.UNKNOWN) if copies is None else copies
        led = jacobi_identical.copies_led(copies, held[:, 1:], drawn, final)
        for row in range(2):
            lead = 0
            for draft in range(count):
                slot = int(at[row, draft + 1])
                alike = [
                    int(tokens[row, place])
                    for place in range(back, int(lengths[row]))
                    if tokens[row, place - 1] == fed[row, draft]
                    and tokens[row, place - back] == tokens[row, slot - back]
                ]
                own, kept = int(held[row, draft + 1]), bool(steady[row, draft + 1])
                stale = bool(before[row, draft] != fed[row, draft])
                other = stale and alike and alike[-1] != own
                copy = alike[-1] if other and kept else jacobi_identical.UNKNOWN
                assert copies[row, draft] == copy
                stays = not other or (kept and ahead[row] <= 0)
                assert fed[row, draft + 1] == (own if stays else alike[-1])
                if copy >= 0 and draft < final[row]:
                    lead += int(drawn[row, draft] == copy) - int(drawn[row, draft] == own)
            assert led[row] == lead
            won += lead != 0
    assert won


@pytest.mark.parametrize("lead", (True, False))
def test_steady_drafts_give_way_where_copies_lead(lead, monkeypatch):
    """The count decides, and no token depends on it."""

    def decode(sampler: Any) -> Any:
        return sampler(MODEL, None, law=TokenLaw(), generator=seeded(3))

    changed, real = 0, cast(Any, repaired)

    def watched(*given: Any) -> Any:
        nonlocal changed
        fed, steady, ahead = given[3], given[8], given[9]
        found: Any = real(*given[:9], torch.full_like(ahead, 9 if lead else -9))
        changed += int(((found[0] != fed) & steady).sum())
        return found

    monkeypatch.setattr(jacobi_identical, "repaired", watched)
    drawn = decode(SpeculativeJacobiSampler(16, graph=False))
    assert torch.equal(drawn.tokens, decode(AutoregressiveSampler()).tokens)
    assert (changed > 0) == lead


def test_a_count_of_copies_that_were_right_decides_in_each_picture(monkeypatch):
    """Beside a count of its own: where copies were right more often than steady drafts, they replace them."""
    seen: list[int] = []
    want: list[int] = []

    def watched(*given: Any) -> Any:
        seen.append(int(given[-1]))
        return repaired(*given)

    def counted(copies: Tensor, drafts: Tensor, drawn: Tensor, num_final: Tensor) -> Tensor:
        asked = zip(copies[0].tolist(), drafts[0].tolist(), drawn[0].tolist(), strict=False)
        settled = list(asked)[: int(num_final)]
        want.append(sum((copy == truth) - (draft == truth) for copy, draft, truth in settled if copy >= 0))
        return copies_led(copies, drafts, drawn, num_final)

    copies_led = jacobi_identical.copies_led
    monkeypatch.setattr(jacobi_identical, "repaired", watched)
    monkeypatch.setattr(jacobi_identical, "copies_led", counted)
    counts = []
    for seed in range(12):
        seen.clear()
        want.clear()
        SpeculativeJacobiSampler(16, graph=False)(MODEL, None, law=TokenLaw(), generator=seeded(seed))
        assert seen[0] == 0 and seen[-1] in (sum(want), sum(want[:-1]))
        counts.append(seen[-1])
    assert any(counts)
