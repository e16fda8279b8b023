"""ACE-Step 1.5's codes by `accelerate`, beside those that its public loops drew with the same weights."""

from typing import Any

import pytest
import torch

import visual_spec
from tests.helpers.musicgen import Heard
from tests.helpers.refusals import refuses
from tests.helpers.tiny_ace_step import IDS, RECORDED, LLMHandler, Processor, drawn

SAMPLERS = ("autoregressive", "speculative-jacobi", "speculative-jacobi:window=16")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("guidance", "target", "temperature", "settings", "codes", "after"), RECORDED)
def test_codes_are_those_of_the_public_loops(
    guidance: float,
    target: int | None,
    temperature: float | None,
    settings: dict[str, Any],
    codes: list[int],
    after: float,
    sampler: str,
) -> None:
    handler = visual_spec.accelerate(LLMHandler(), sampler)
    torch.manual_seed(3)
    processor = Processor(target, temperature)
    result = drawn(handler, guidance, processor, **settings)
    rows = 1 if guidance == 1 else 2
    assert torch.equal(result[:, :6], IDS[:rows])
    assert result[:, 6:].tolist() == [codes] * rows
    assert processor.seen == codes  # its state is that of its own loop
    assert not after or torch.rand(1).item() == after
    assert "same tokens" in visual_spec.summary(handler)


def test_codes_are_handed_on_as_they_are_drawn() -> None:
    heard, handler = Heard(), visual_spec.accelerate(LLMHandler())
    torch.manual_seed(3)
    drawn(handler, 2.0, Processor(20), streamer=heard)
    assert torch.cat([part.flatten() for part in heard.parts]).tolist() == RECORDED[0][4] and heard.ends == 1


def test_other_phases_go_the_handlers_own_way_and_restore_gives_back_its_loops() -> None:
    handler = visual_spec.accelerate(LLMHandler())
    assert drawn(handler, 2.0, Processor(phase="cot")) == "its own guided loop"
    assert drawn(handler, 1.0, Processor(phase="cot")) == "its own loop"
    assert drawn(handler, 1.0, None) == "its own loop"
    visual_spec.restore(handler)
    assert drawn(handler, 2.0, Processor(20)) == "its own guided loop"


def test_a_handler_of_another_engine_is_refused() -> None:
    handler = LLMHandler()
    handler.llm_backend = "vllm"
    refuses(TypeError, "llm_backend='vllm' and a model; call initialize", visual_spec.accelerate, handler)
    empty = LLMHandler()
    empty.llm = None
    refuses(TypeError, "and no model", visual_spec.accelerate, empty)
