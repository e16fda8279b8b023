"""Models of speech codes, tiny: Qwen2.5-Omni's talker, and the parts of others that their loops call.

`T3` and `Qwen2LM` are named as in Chatterbox 0.1.7 and CosyVoice, whose modules are bound to old versions of other
packages. Their weights follow a formula, so that codes of the public loops can stand in a test.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTalkerConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniTalkerForConditionalGeneration

from tests.helpers.written_weights import write_weights

WIDTH = 32
SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def tiny_talker() -> Any:
    config = Qwen2_5OmniTalkerConfig(
        vocab_size=40, embedding_size=24, head_dim=8, max_position_embeddings=256, tts_codec_start_token_id=37,
        tts_codec_end_token_id=38, tts_codec_pad_token_id=36, tts_codec_mask_token_id=35, tts_text_start_token_id=30,
        tts_text_end_token_id=31, tts_text_pad_token_id=32, audio_token_index=33, image_token_index=34,
        video_token_index=39, vision_start_token_id=29, audio_start_token_id=28, audio_end_token_id=27,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1]), **SIZES,
    )  # fmt: skip
    model: Any = Qwen2_5OmniTalkerForConditionalGeneration(config).eval()
    write_weights(model, 0.6)
    return model


class T3(nn.Module):
    """Chatterbox's, a Llama with guided pairs and learned positions; with `turbo` a GPT-2 without both.

    A voice stands as embeddings [1, n, WIDTH] in place of its encoder.
    """

    def __init__(self, turbo: bool = False) -> None:
        super().__init__()
        self.is_gpt = turbo
        self.hp = SimpleNamespace(start_speech_token=48, stop_speech_token=49)
        self.text_emb, self.speech_emb = nn.Embedding(60, WIDTH), nn.Embedding(50, WIDTH)
        self.speech_head = nn.Linear(WIDTH, 50, bias=turbo)
        if turbo:
            config = GPT2Config(n_embd=WIDTH, n_head=4, n_layer=2, n_positions=256, vocab_size=8)
            self.tfmr: Any = GPT2Model(config)
        else:
            sizes: dict[str, Any] = SIZES | dict(num_key_value_heads=4)
            self.tfmr = LlamaModel(LlamaConfig(vocab_size=8, **sizes))
            self.text_pos_emb, self.speech_pos_emb = _Positions(32), _Positions(84)
        write_weights(self, 0.6)
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.speech_head.weight.device

    def prepare_input_embeds(
        self, *, t3_cond: Tensor, text_tokens: Tensor, speech_tokens: Tensor, cfg_weight: float = 0.0
    ) -> tuple[Tensor, int]:
        text, speech = self.text_emb(text_tokens), self.speech_emb(speech_tokens)
        if not self.is_gpt:
            if cfg_weight > 0:
                text[1] = 0
            text = text + self.text_pos_emb(text_tokens)
            speech = speech + self.speech_pos_emb(speech_tokens)
        voice = t3_cond.expand(len(text), -1, -1)
        return torch.cat([voice, text, speech], 1), voice.shape[1]


class _Positions(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(most, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.emb.weight[: tokens.shape[1]]

    def get_fixed_embedding(self, place: int) -> Tensor:
        return self.emb.weight[place][None, None]


class Qwen2LM(nn.Module):
    """CosyVoice 2's: codes 0 to 39, and three that end."""

    def __init__(self, sampling: Any) -> None:
        super().__init__()
        self.speech_token_size, self.stop_token_ids = 40, [40, 41, 42]
        self.llm: Any = nn.Module()
        self.llm.model = Qwen2ForCausalLM(Qwen2Config(vocab_size=99, max_position_embeddings=256, **SIZES))
        self.llm_embedding, self.speech_embedding = nn.Embedding(2, WIDTH), nn.Embedding(43, WIDTH)
        self.llm_decoder = nn.Linear(WIDTH, 43)
        self.sampling = sampling
        write_weights(self, 0.6)
        self.llm_decoder.weight.data *= 100  # all but sure of every code, also of a second draw
        self.eval()

    def inference_wrapper(self, lm_input: Any, sampling: Any, min_len: int, max_len: int, uuid: str) -> Any:
        raise NotImplementedError("the public loop")


LAW: dict[str, Any] = dict(
    max_new_tokens=30, do_sample=True, top_k=20, top_p=0.9, temperature=0.9, eos_token_id=[36, 38], pad_token_id=36,
    repetition_penalty=1.05, suppress_tokens=[37],
)  # fmt: skip


VOICE = torch.arange(3 * WIDTH).mul(0.7).sin().view(1, 3, WIDTH)


TEXT = torch.tensor([[58, 3, 9, 22, 41, 7, 59]] * 2)


# Of Chatterbox 0.1.7 (its T3, PyTorch 2.11, transformers 5.24): settings, codes, and the number drawn next.
CHATTERBOX: list[tuple[dict[str, Any], list[int], float]] = [
    ({}, [22, 28, 35, 49], 0.5487801432609558),
    (
        dict(temperature=1.0, top_p=0.8, min_p=0.0, cfg_weight=1.5, repetition_penalty=1.6),
        [22, 29, 33, 3, 46, 6, 23, 28, 10, 13, 43, 17, 34, 8, 41, 35, 5, 3, 40, 23, 11, 6, 9, 49],
        0.9575355052947998,
    ),
]


TURBO: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [32, 13, 45, 7, 46, 39, 25, 38, 1, 26, 7, 45, 26, 26, 25, 38, 38, 45, 45, 21, 7, 20, 25, 13, 38]),
    (
        dict(temperature=1.0, top_k=6, top_p=0.7, repetition_penalty=3.0),
        [26, 7, 45, 38, 38, 45, 38, 38, 39, 45, 7, 45, 26, 26, 38, 7, 26, 45, 45, 38, 7, 26, 7, 38, 38],
    ),
]


# By hand from CosyVoice's `common.py`: the second draw leaves out the code that repeats.
def ras_sampling(
    weighted_scores: Tensor,
    decoded_tokens: list[int],
    sampling: int,
    top_p=0.8,
    top_k=25,
    win_size=10,
    tau_r=0.1,
) -> int:
    laws = first_and_second(weighted_scores.softmax(0).tolist(), top_p, top_k)
    first = int(torch.tensor(laws[0]).multinomial(1))
    if decoded_tokens[-win_size:].count(first) < win_size * tau_r:
        return first
    return int(torch.tensor(laws[1][first]).multinomial(1))


def first_and_second(law: list[float], top_p: float, top_k: int) -> tuple[list[float], list[list[float]]]:
    """The law of the first draw, and those of the second one after each first."""
    nucleus, total = [0.0] * len(law), 0.0
    for code in sorted(range(len(law)), key=lambda one: -law[one])[:top_k]:
        if total < top_p:
            nucleus[code] = law[code]
            total += law[code]
    others = [
        [0.0 if one == code else law[one] / ((1 - law[code]) or 1) for one in range(len(law))]
        for code in range(len(law))
    ]
    return [share / total for share in nucleus], others


PROMPT = torch.arange(7 * WIDTH).mul(0.7).sin().view(1, 7, WIDTH)


# Of `Qwen2LM.inference_wrapper` of CosyVoice with the transformers 4.51.3 that it asks for; with 4.57 and later its own
# loop attends to fewer places. Its laws are all but certain, so that codes can be compared.
COSYVOICE = [
    31, 28, 39, 34, 1, 38, 21, 1, 33, 2, 8, 1, 36, 31, 34, 20, 6, 4, 29, 4, 19, 28, 39, 38, 3, 39, 38, 34, 20, 6,
]  # fmt: skip
