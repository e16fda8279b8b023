"""What a model, a drafter or another part returns in another shape is refused, in every kind of call.

Logits [R, 1, V] for [R, W, V], or rows of another batch, are spread over what was asked for or cut to it unseen, and a
prefill that ignores `guided` switches guidance off. None of that is an error of PyTorch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.refusals import refuses
from tests.helpers.sampler_kinds import CHANGED, KINDS, decode
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.registry import CHUNKS, SamplerEntry, all_samplers, sampler_class

WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "one slot": lambda given: given[:, :1] if given.dim() > 2 else given,
    "one row": lambda given: given[:1],
    "a row more": lambda given: torch.cat([given, given[:1]]),
    "rows twice": lambda given: torch.cat([given, given]),
    "a word less": lambda given: given[..., :-1],
    "a word more": lambda given: torch.cat([given, given[..., :1]], -1),
}


def samplers_of(entry: SamplerEntry) -> Iterator[Any]:
    """With the default settings, and with all others."""
    kind = sampler_class(entry)
    yield kind()
    settings = dict(CHANGED[entry.class_name])
    if entry.class_name == "ColumnJacobiSampler":
        settings["relaxation"] = {**settings["relaxation"], "code_distance": None}
    yield kind(**settings)


def parts_of(entry: SamplerEntry) -> dict[str, Any]:
    """The model, and what else answers a sampler, by name."""
    kind = KINDS[entry.calls]
    found = {"model": kind.model}
    for name, part in kind.parts(sampler_class(entry)()).items():
        found |= {name: part} if isinstance(part, nn.Module) else {}
    if entry.name == "multiscale":
        drafter = found.pop("drafter")
        found |= {"upsampler": drafter.upsampler, "small model": drafter.transformer}
    elif entry.calls == "distilled":
        found["teacher"] = kind.given["teacher"]
    return found


# A model of chunks answers by `forward` alone, without logits: tests/samplers/continuous/test_chunks.py bends that.
CASES = [(entry, name) for entry in all_samplers() if entry.calls != CHUNKS for name in parts_of(entry)]
EVERY = pytest.mark.parametrize(
    ("entry", "name"), CASES, ids=[f"{entry.name}-{name}" for entry, name in CASES]
)
# Asked for one slot a call whatever the settings are.
ONE_AT_A_TIME = {
    ("multiscale", "small model"),
    ("continuous", "model"),
    ("reusing-continuous", "model"),
    ("speculative-continuous", "drafter"),
    ("head-speculation", "model"),
    ("reusing-continuous", "model"),
}


class Bender:
    """Returns what a part returns in another shape; remembers the shapes."""

    def __init__(self, wrong: Callable[[Tensor], Tensor]) -> None:
        self.wrong, self.shapes = wrong, []

    def bent(self, given: Any) -> Any:
        """A tensor, or an answer with logits."""
        if not isinstance(given, Tensor):
            return given._replace(logits=self.bent(given.logits))
        bent = self.wrong(given)
        if bent.shape != given.shape:
            self.shapes.append(str(tuple(bent.shape)))
        return bent

    def calls(self, part: Any, patch: pytest.MonkeyPatch) -> None:
        """Bend what its calls return."""
        owner, name = (part, "forward") if isinstance(part, nn.Module) else (type(part), "__call__")
        call = getattr(owner, name)
        patch.setattr(owner, name, lambda *given, **named: self.bent(call(*given, **named)))

    def prefills(self, part: Any, patch: pytest.MonkeyPatch) -> None:
        """Bend what its prefill predicts."""
        prefill = part.prefill

        def bent(*given: Any, **named: Any) -> Any:
            state = prefill(*given, **named)
            for name in ("logits", "conditions"):
                if isinstance(getattr(state, name, None), Tensor):
                    setattr(state, name, self.bent(getattr(state, name)))
            return state

        patch.setattr(part, "prefill", bent)


@EVERY
@pytest.mark.parametrize("how", WRONG)
def test_a_call_that_returns_another_shape_is_refused(entry, name, how, monkeypatch):
    bender = Bender(WRONG[how])
    bender.calls(parts_of(entry)[name], monkeypatch)
    for sampler in samplers_of(entry):
        bender.shapes.clear()
        try:
            decode(entry, sampler)
        except ValueError as error:
            assert f"returned shape {bender.shapes[-1]}" in str(error)
            return
        assert not bender.shapes, "decoded unseen"
    assert how == "one slot" and (entry.name, name) in ONE_AT_A_TIME


@EVERY
@pytest.mark.parametrize("how", [how for how in WRONG if how != "one slot"])
def test_a_prefill_that_returns_another_shape_is_refused(entry, name, how, monkeypatch):
    part = parts_of(entry)[name]
    if not hasattr(part, "prefill") or (entry.calls, name) == ("distilled", "model"):
        return  # it predicts nothing
    bender = Bender(WRONG[how])
    bender.prefills(part, monkeypatch)
    for sampler in samplers_of(entry):
        bender.shapes.clear()
        if not _uses(sampler, name):
            continue
        refuses(ValueError, r"returned shape \(", decode, entry, sampler)
        assert bender.shapes


@EVERY
@pytest.mark.parametrize("guided", [True, False])
def test_a_prefill_that_ignores_guided_is_refused(entry, name, guided, monkeypatch):
    part = parts_of(entry)[name]
    begin = next((name for name in ("prefill", "prepare") if hasattr(part, name)), None)
    if begin is None or (entry.calls, name) == ("distilled", "model"):
        return  # it knows no guidance
    real = getattr(part, begin)
    monkeypatch.setattr(part, begin, lambda *given, **named: real(*given, **named | {"guided": not guided}))
    for sampler in samplers_of(entry):
        if _uses(sampler, name):
            law: dict[str, Any] = {} if guided else {"law": TokenLaw()}
            with pytest.raises(
                ValueError, match=rf"guided={guided}\) returned a state with guided={not guided}"
            ):
                decode(entry, sampler, **law)


# Of chunks see above; the features of a self-speculative model would be bad as well, and those are looked at.
LAWFUL = [
    entry for entry in all_samplers() if entry.calls != CHUNKS and entry.name != "self-speculative-masked"
]


@pytest.mark.parametrize("entry", LAWFUL, ids=lambda entry: entry.name)
def test_what_defines_no_law_is_named_by_its_sample(entry, monkeypatch):
    def broken(given: Tensor) -> Tensor:
        return given.index_fill(0, torch.tensor([1]), torch.nan)

    Bender(broken).calls(KINDS[entry.calls].model, monkeypatch)
    for sampler in samplers_of(entry):
        refuses(FloatingPointError, "sample 1[ ,]|in the drafter: ", decode, entry, sampler)


def _uses(sampler: Any, name: str) -> bool:
    return name != "teacher" or sampler.config.teacher_from is not None
