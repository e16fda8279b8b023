"""ACE-Step's LLMHandler, tiny, and the codes that its public loops drew."""

import enum
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.helpers.written_weights import write_weights

State = enum.Enum("State", "THINK_TAG CODES_GENERATION")


END = 79


class Processor:
    """What the loops read of `MetadataConstrainedLogitsProcessor` in phase "codes"."""

    def __init__(
        self, target: int | None = None, temperature: float | None = None, phase: str = "codes"
    ) -> None:
        self.enabled, self.generation_phase, self.state = True, phase, State.THINK_TAG
        self.target_codes, self.codes_temperature = target, temperature
        self.audio_code_token_ids, self.eos_token_id, self.vocab_size = set(range(20, 70)), END, 80
        self.seen: list[int] = []

    def _input_contains_think_end_tag(self, ids: Tensor) -> bool:
        return 9 in ids[0].tolist()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.state = State.CODES_GENERATION
        return scores

    def update_state(self, code: int) -> None:
        self.seen.append(code)


class LLMHandler:
    """Named as in ACE-Step 1.5; its public loops are not here."""

    def __init__(self) -> None:
        config = Qwen3Config(
            vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
        )  # fmt: skip
        self.llm: Any = Qwen3ForCausalLM(config).eval()
        self.llm_backend = "pt"
        write_weights(self.llm, 0.6)

    def _generate_with_cfg_custom(self, **given: Any) -> str:
        return "its own guided loop"

    def _generate_with_constrained_decoding(self, **given: Any) -> str:
        return "its own loop"


IDS = torch.tensor([[2, 5, 7, 9, 11, 4], [0, 0, 5, 9, 3, 4]])


MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])


LAW: dict[str, Any] = dict(
    temperature=0.85,
    top_k=None,
    top_p=0.9,
    repetition_penalty=1.1,
    pad_token_id=0,
    streamer=None,
    max_new_tokens=30,
)


# Of ACE-Step-1.5's `llm_inference.py`: guidance, codes asked for, temperature of the phase, other settings; then codes,
# and the number that the generator draws next.
RECORDED: list[tuple[float, int | None, float | None, dict[str, Any], list[int], float]] = [
    (
        2.0, 20, None, {},
        [61, 29, 31, 61, 31, 61, 31, 53, 58, 65, 37, 61, 36, 61, 24, 68, 29, 27, 30, 34, END], 0.7655149102210999,
    ),
    (
        1.0, None, 0.8, dict(top_k=12, top_p=None),
        [61, 27, 31, 58, 45, 63, 61, 24, 61, 26, 45, 65, 47, 30, 61, 24, 68, 61, 56, 34, 24, 68, 61, 64, 45, 40, 62, 34,
         30, 61],
        0.2531045079231262,
    ),
    (
        3.0, None, None, dict(temperature=1.1, repetition_penalty=1.0),
        [61, 29, 31, 61, 29, 63, 27, 52, 53, 45, 53, 31, 36, 61, 24, 21, 29, 24, 40, 44, 58, 45, 22, 24, 60, 29, 58, 45,
         30, 58],
        0.2531045079231262,
    ),
    (2.0, 12, None, dict(temperature=0.0), [61, 24, 61, 27, 62, 61, 31, 45, 45, 45, 66, 22, END], 0.0),
]  # fmt: skip


def drawn(handler: Any, guidance: float, processor: Any, **settings: Any) -> Any:
    if guidance == 1:
        return handler._generate_with_constrained_decoding(
            input_ids=IDS[:1], attention_mask=MASK[:1], constrained_processor=processor, **LAW | settings
        )
    return handler._generate_with_cfg_custom(
        batch_input_ids=IDS,
        batch_attention_mask=MASK,
        cfg_scale=guidance,
        constrained_processor=processor,
        **LAW | settings,
    )
