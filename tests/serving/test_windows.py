"""The pictures in an engine, without an engine: the tokens of the sampler, whatever the batches are."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.serving.request import PictureRequest, settings_of
from visual_spec.serving.windows import Rows, Served, Windows

MODEL = TabularModel(TokenGrid(6, 6), 12, order=2, conditions=3, dependence=0.3)
LENGTH, FIRST = 36, 5  # the ids of the engine are those of the model + 5
SERVED = Served((MODEL.grid,), FIRST, FIRST + 12, end=20)
LAWS = [TokenLaw(guidance_scale=2.0, top_k=6), TokenLaw(temperature=0.8), TokenLaw(guidance_scale=1.5)]


class Engine:
    """Greedy verification of any batch of requests, as an engine does it. Each picture has a model state of its own."""

    def __init__(self, windows: Windows, window: int) -> None:
        self.windows, self.window = windows, window
        self.tokens: dict[str, list[int]] = {}
        self.states: dict[str, tuple[Any, int]] = {}
        self.calls: dict[str, int] = {}

    def enter(self, name: str, label: int, law: TokenLaw, seed: int) -> None:
        state = MODEL.prefill(torch.tensor([label]), batch_size=1, guided=law.guided, window=self.window)
        for member, settings in enumerate(settings_of(law, seed, name)):
            handle = f"{name}/{member}"
            self.windows.join(handle, PictureRequest.of(settings))
            self.tokens[handle], self.states[handle], self.calls[handle] = [], (state, member), 0

    def step(self, order: list[str]) -> None:
        """One call for the requests in this order."""
        batch, logits = [], []
        for handle in order:
            fed = self.windows.next_drafts(handle) if self.tokens[handle] else []
            batch.append(Rows(handle, sum(len(part) for part in logits), len(self.tokens[handle]), fed))
            logits.append(self._logits(handle, fed))
        drawn = self.windows.force(torch.cat(logits), batch).argmax(-1).tolist()
        for rows in batch:
            own = drawn[rows.first : rows.first + rows.count]
            kept = 0
            while kept < len(rows.fed) and rows.fed[kept] == own[kept]:
                kept += 1
            self.tokens[str(rows.handle)] += own[: kept + 1]
            self.calls[str(rows.handle)] += 1

    def _logits(self, handle: str, fed: list[int]) -> Tensor:
        state, member = self.states[handle]
        if not self.tokens[handle]:
            out = state.logits[member, None]
        else:
            inputs = torch.tensor([[self.tokens[handle][-1], *fed]]) - FIRST
            slots = len(self.tokens[handle]) - 1 + torch.arange(inputs.shape[1])[None]
            out = MODEL(state, inputs, slots)[member]
        wide = torch.full((len(out), 21), -torch.inf, dtype=out.dtype)
        wide[:, FIRST : FIRST + 12] = out
        return wide


def by_sampler(label: int, law: TokenLaw, seed: int, window: int) -> tuple[list[int], int]:
    given = dict(law=law, generator=torch.Generator().manual_seed(seed), batch_size=1)
    drawn = SpeculativeJacobiSampler(window)(MODEL, torch.tensor([label]), **given)  # type: ignore[arg-type]
    return (drawn.tokens[0] + FIRST).tolist(), int(drawn.trace.target_calls)


@pytest.mark.parametrize("window", [1, 8])
def test_pictures_of_changing_batches_are_those_of_the_sampler(window):
    """Pictures enter at different times and leave when they are complete; tokens and calls are those of the sampler."""
    windows = Windows(SERVED, window - 1)
    engine = Engine(windows, window)
    waiting = [(f"p{index}", index % 3, LAWS[index % 3], 40 + index) for index in range(6)]
    everyone, turn, steps = list(waiting), torch.Generator().manual_seed(0), 0
    while waiting or any(len(tokens) < LENGTH for tokens in engine.tokens.values()):
        if waiting and steps % 3 == 0:
            engine.enter(*waiting.pop(0))
        going = [handle for handle, tokens in engine.tokens.items() if len(tokens) < LENGTH]
        engine.step([going[index] for index in torch.randperm(len(going), generator=turn)])
        steps += 1
    assert windows.calls == steps
    for name, label, law, seed in everyone:
        tokens, calls = by_sampler(label, law, seed, window)
        for handle in [handle for handle in engine.tokens if handle.startswith(f"{name}/")]:
            assert engine.tokens[handle][:LENGTH] == tokens
            assert engine.calls[handle] == calls


class LayoutEngine:
    """Greedy verification of one request whose places are the slots of two grids, and row ends.

    The logits of a slot are computed anew from the tokens of its grid, so that nothing depends on what was fed.
    """

    def __init__(self, served: Served, window: int, full: bool) -> None:
        self.served, self.windows = served, Windows(served, window - 1)
        # As vLLM's second runner: always so many drafts, zeros if need be.
        self.drafted = window - 1 if full else 0

    def draw(self, law: TokenLaw, seed: int) -> tuple[list[int], int]:
        settings = settings_of(law, seed, "pair" if law.guided else None)
        for member, own in enumerate(settings):
            self.windows.join(member, PictureRequest.of(own))
        tokens: list[int] = []
        calls = 0
        while len(tokens) < len(self.served.places):
            fed = self.windows.next_drafts(0) if tokens else []
            fed = fed + [0] * (self.drafted - len(fed) if tokens else 0)
            width = 1 + len(fed)
            batch = [Rows(member, member * width, len(tokens), fed) for member in range(len(settings))]
            logits = torch.cat([self._logits(tokens, fed, member, law) for member in range(len(settings))])
            drawn = self.windows.force(logits, batch).argmax(-1).tolist()
            assert drawn[:width] == drawn[-width:]
            kept = 0
            while kept < len(fed) and fed[kept] == drawn[kept]:
                kept += 1
            tokens += drawn[: kept + 1]
            calls += 1
        return tokens[: len(self.served.places)], calls

    def _logits(self, tokens: list[int], fed: list[int], member: int, law: TokenLaw) -> Tensor:
        wide = torch.full((1 + len(fed), 21), -torch.inf, dtype=torch.float64)
        for row in range(1 + len(fed)):
            place = len(tokens) + row
            if place >= len(self.served.places) or self.served.places[place][1] < 0:
                wide[row, 3] = 0.0  # what the model would like here is no matter
                continue
            number, slot = self.served.places[place]
            codes = [min(max(code, 0), 11) for code in self.served.codes(tokens + fed[:row])[number]]
            wide[row, FIRST : FIRST + 12] = raw_logits(number, codes, slot, member, law.guided)
        return wide


def raw_logits(number: int, codes: list[int], slot: int, member: int, guided: bool) -> Tensor:
    """Of a slot of grid `number` after its tokens so far; each grid has a condition of its own."""
    model = MODELS[number]
    state = model.prefill(torch.tensor([number]), batch_size=1, guided=guided, window=8)
    if slot == 0:
        return state.logits[member]
    slots = torch.arange(slot)[None]
    return model(state, torch.tensor([codes[:slot]]), slots)[member, -1]


MODELS = [
    TabularModel(TokenGrid(height, width), 12, order=2, conditions=3, dependence=0.3)
    for height, width in ((2, 3), (4, 5))
]
LAYOUTS = {"row ends": dict(row_end=19), "plain": {}}


@pytest.mark.every_set
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("law", LAWS[:2])
def test_grids_and_row_ends_are_those_of_the_sampler(law, layout, window, full):
    """Grids follow each other in one request; the noise of each has a key of its own, as in sampler calls in turn."""
    served = Served(tuple(model.grid for model in MODELS), FIRST, FIRST + 12, end=20, **LAYOUTS[layout])
    tokens, calls = LayoutEngine(served, window, full).draw(law, 7)
    generator, most = torch.Generator().manual_seed(7), 0
    for number, model in enumerate(MODELS):
        given = dict(law=law, generator=generator, batch_size=1)
        drawn = SpeculativeJacobiSampler(window)(model, torch.tensor([number]), **given)  # type: ignore[arg-type]
        assert served.codes(tokens)[number] == drawn.tokens[0].tolist()
        most += int(drawn.trace.target_calls)
    ends = [token for token, (_, slot) in zip(tokens, served.places, strict=True) if slot < 0]
    assert ends == [19] * (6 if layout == "row ends" else 0)
    if window > 1:
        assert calls < len(tokens)
    if layout == "plain" and not full:
        assert calls <= most


@pytest.mark.parametrize("missing", [0, 1])
def test_a_picture_without_its_other_member_ends(missing, caplog):
    """Nothing is guessed; the pictures beside it go on."""
    engine = Engine(Windows(SERVED, 7), 8)
    engine.enter("apart", 0, LAWS[0], 1)
    engine.enter("beside", 1, LAWS[0], 2)
    both = ["apart/0", "apart/1", "beside/0", "beside/1"]
    engine.step(both)
    engine.step([handle for handle in both if handle != f"apart/{missing}"])
    left = engine.tokens[f"apart/{1 - missing}"]
    assert left[1:] and set(left[1:]) == {SERVED.end}
    assert "pair 'apart'" in caplog.text and ("unconditional" in caplog.text) == (missing == 0)
    while len(engine.tokens["beside/0"]) < LENGTH:
        engine.step(["beside/1", "beside/0"])
    assert engine.tokens["beside/0"][:LENGTH] == by_sampler(1, LAWS[0], 2, 8)[0]


def pair(windows: Windows, *names: str) -> None:
    for name in names:
        for member, settings in enumerate(settings_of(LAWS[0], 1, name)):
            windows.join(f"{name}/{member}", PictureRequest.of(settings))


@pytest.mark.every_set
@pytest.mark.parametrize(
    "batch",
    [
        [Rows("a/0", 0, 1, []), Rows("a/1", 1, 0, [])],
        [Rows("a/1", 0, 3, [7, 8]), Rows("a/0", 3, 2, [7, 8])],
        [Rows("a/0", 0, 1, [7]), Rows("a/1", 2, 1, [])],
        [Rows("a/0", 0, 1, [7]), Rows("a/1", 2, 2, [])],
        [Rows("a/0", 0, 1, []), Rows("b/1", 1, 1, [])],
        [Rows("b/0", 0, 1, []), Rows("a/0", 1, 1, [])],
    ],
)
def test_members_that_are_not_at_the_same_places_of_one_picture_end(batch):
    """Each of two members gets the end in all its rows; those of a picture at one place get one token."""
    windows = Windows(SERVED, 3)
    pair(windows, "a", "b")
    together = [Rows("c/1", 9, 2, [7]), Rows("c/0", 7, 2, [7])]
    pair(windows, "c")
    logits = torch.randn(11, 21, generator=torch.Generator().manual_seed(0))
    ids = windows.draw(logits, [*batch, *together]).tolist()
    ended = [rows.first + offset for rows in batch for offset in range(rows.count)]
    assert [ids[row] for row in ended] == [SERVED.end] * len(ended)
    assert ids[7:9] == ids[9:] and all(FIRST <= drawn < FIRST + 12 for drawn in ids[7:])
    assert all(ids[row] == -1 for row in set(range(7)) - set(ended))


@pytest.mark.parametrize("how", ["left", "joined again"])
def test_a_handle_that_is_used_again_begins_anew(how):
    """Tokens, calls and drafts are those of windows that never knew the handle."""
    used, new = Engine(Windows(SERVED, 7), 8), Engine(Windows(SERVED, 7), 8)
    used.enter("p", 0, LAWS[1], 1)
    for _ in range(4):
        used.step(["p/0"])
    assert len(used.windows.next_drafts("p/0")) == 7 and used.windows.handles == {"p/0"}
    if how == "left":
        used.windows.leave(["p/0", "of nobody"])
        assert used.windows.handles == set() and used.windows.next_drafts("p/0") == []
        assert used.windows.draw(torch.zeros(1, 21), [Rows("p/0", 0, 0, [])]).tolist() == [-1]
    for engine in (used, new):
        engine.enter("p", 1, LAWS[1], 2)
        assert engine.windows.next_drafts("p/0") == []
    while len(new.tokens["p/0"]) < LENGTH:
        for engine in (used, new):
            engine.step(["p/0"])
        assert used.windows.next_drafts("p/0") == new.windows.next_drafts("p/0")
    assert used.tokens == new.tokens
    used.windows.join("p/0", None)
    assert used.windows.handles == set() and used.windows.next_drafts("p/0") == []


def test_strange_requests_are_left_as_they_are():
    windows = Windows(SERVED, 3)
    windows.join("text", PictureRequest.of({"other plug-in": 1}))
    logits = torch.randn(3, 21)
    kept = logits.clone()
    assert torch.equal(windows.force(logits, [Rows("text", 0, 0, [4, 4])]), kept)
    assert windows.next_drafts("text") == []


def test_a_prompt_of_another_length_ends(caplog):
    """One request names itself, and does not end the engine."""
    windows = Windows(Served((MODEL.grid,), FIRST, FIRST + 12, 20, prompt_tokens=4, exact_prompt=True), 0)
    for handle in ("long", "right"):
        windows.join(handle, PictureRequest.of({"seed": 0}))
    batch = [Rows("long", 0, 0, [], prompt=5), Rows("right", 1, 0, [], prompt=4)]
    ended, drawn = windows.force(torch.zeros(2, 21), batch).argmax(-1).tolist()
    assert ended == SERVED.end != drawn and "a prompt of 5 tokens" in caplog.text


def test_a_request_past_its_picture_ends():
    windows = Windows(SERVED, 0)
    windows.join("long", PictureRequest.of({"seed": 0}))
    assert windows.force(torch.zeros(1, 21), [Rows("long", 0, LENGTH, [])]).argmax(-1).tolist() == [
        SERVED.end
    ]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"seed": "7"}, "seed='7'"),
        ({"seed": True}, "seed=True"),
        ({"seed": 1, "guidance": 3}, "guidance given"),
        ({"seed": 1, "role": "both"}, "role='both'"),
        ({"seed": 1, "guidance_scale": 2.0}, r"pair=None.*guidance_scale=2\.0"),
        ({"seed": 1, "pair": "a"}, r"pair='a'.*guidance_scale=1\.0"),
        ({"seed": 1, "pair": 3, "guidance_scale": 2.0}, "pair=3"),
        ({"seed": 1, "top_p": 0.0}, "top_p=0.0"),
    ],
)
def test_bad_requests_are_named(settings, named):
    refuses(ValueError, named, PictureRequest.of, settings)


@pytest.mark.parametrize(
    ("settings", "end"),
    [({"grid": [6, 6]}, 20), ({"grid": [0, 6], "image_ids": [0, 4]}, 20), ({"grid": 6, "image_ids": [0, 4]}, 20),
     ({"grid": [6, 6], "image_ids": [0, 30]}, 20), ({"grid": [6, 6], "image_ids": [0, 4]}, None),
     ({"grids": [], "image_ids": [0, 4]}, 20), ({"grid": [6, 6], "image_ids": [0, 4], "row_end": 20}, 20)],
)  # fmt: skip
def test_models_that_say_too_little_are_refused(settings, end):
    refuses(ValueError, "grid|eos_token_id", Served.of, settings, end)
