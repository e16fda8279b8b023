"""VibeVoice and PocketTTS of transformers, real classes but tiny and random. Nothing is downloaded."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, VibeVoiceConfig, VibeVoiceForConditionalGeneration

from tests.models.next_token.tiny_transformers import _ready

transformers.logging.set_verbosity_error()

VOCABULARY, PAD, START, END, AUDIO = 24, 0, 20, 21, 22
LATENT = 6
# Three prompts of different lengths, padded on the left; each ends with the start of audio.
IDS = torch.tensor([[PAD, PAD, 3, 9, START], [5, 7, 11, 2, START], [PAD, 4, 8, 15, START]])
MASK = (IDS != PAD).long()


def tiny_vibevoice(dtype: torch.dtype = torch.float64, **text: Any) -> Any:
    """Two layers of everything; four samples of audio a latent."""
    codec: dict[str, Any] = dict(
        num_filters=2, downsampling_ratios=[2, 2], depths=[1, 1, 1], kernel_size=3, layer_scale_init_value=0.5
    )
    sizes: dict[str, Any] = dict(
        model_type="qwen2", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48
    )
    sizes |= dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512
    )
    config = VibeVoiceConfig(
        audio_config=dict(model_type="vibevoice_acoustic_tokenizer", hidden_size=LATENT, **codec),
        semantic_model_config=dict(model_type="vibevoice_acoustic_tokenizer_encoder", hidden_size=5, **codec),
        text_config=sizes | text,
        diffusion_head_config=dict(num_hidden_layers=2, intermediate_size=40, frequency_embedding_size=16),
        pad_token_id=PAD,
        eos_token_id=END + 2,
        audio_bos_token_id=START,
        audio_eos_token_id=END,
        audio_token_id=AUDIO,
    )
    model = _ready(VibeVoiceForConditionalGeneration(config), dtype)
    model.generation_config.eos_token_id = END + 2
    model.generation_config.pad_token_id = PAD
    return model


class Script(LogitsProcessor):
    """Makes row b of a batch say `rows[b][n]` as its n-th token, and the end of text after the last one."""

    def __init__(self, rows: list[list[int]], given: int = IDS.shape[1]) -> None:
        self.rows, self.given = rows, given

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = input_ids.shape[1] - self.given
        says = [row[number] if number < len(row) else END + 2 for row in self.rows]
        return scores.scatter(1, torch.tensor(says)[:, None], 1e4)


def tiny_pocket(flow: str = "lsd", dtype: torch.dtype = torch.float64) -> Any:
    """Two layers of everything."""
    from transformers import PocketTTSConfig, PocketTTSForConditionalGeneration

    config = PocketTTSConfig(
        flow_head_config=dict(
            hidden_size=24,
            num_hidden_layers=2,
            latent_dim=LATENT,
            condition_dim=32,
            frequency_embedding_size=16,
            flow_type=flow,
        ),
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=512,
        latent_dim=LATENT,
        audio_prompt_token_id=AUDIO - 1,
        audio_latent_token_id=AUDIO,
        audio_prompt_bos_token_id=AUDIO + 1,
        audio_bos_token_id=START,
        pad_token_id=PAD,
    )
    return _ready(PocketTTSForConditionalGeneration(config), dtype)


# What three samples say: audio that ends at different steps; a text that starts again alone, beside others that speak,
# and twice in a row; and audio that comes late, when another one ended.
SCRIPTS = {
    "stops": [[AUDIO] * 4 + [END], [AUDIO] * 2 + [END], [AUDIO] * 6],
    "restarts": [
        [AUDIO, AUDIO, END, START, AUDIO, AUDIO, AUDIO],
        [AUDIO] * 6 + [END],
        [AUDIO, END, START, START, AUDIO],
    ],
    "late": [[END, START, AUDIO, AUDIO], [START, END, START, AUDIO, AUDIO, AUDIO], [AUDIO, END]],
}


def speak(model: Any, script: str = "restarts", rows: slice = slice(None), **settings: Any) -> Any:
    """What a model says, from the same noise every time. Its latents [N, 1, D] a step are `latents`."""
    latents: list[Tensor] = []
    decode = model._decode_audio_latent

    def spy(audio_latent: Tensor, *args: Any, **kwargs: Any) -> Any:
        latents.append(audio_latent)
        return decode(audio_latent, *args, **kwargs)

    model.__dict__["_decode_audio_latent"] = spy
    torch.manual_seed(0)
    try:
        output = model.generate(
            **dict(
                dict(
                    input_ids=IDS[rows],
                    attention_mask=MASK[rows],
                    max_new_tokens=9,
                    guidance_scale=1.3,
                    logits_processor=[Script(SCRIPTS[script][rows])] if script else [],
                    return_dict_in_generate=True,
                ),
                **settings,
            )
        )
    finally:
        del model.__dict__["_decode_audio_latent"]
    output.latents = latents
    return output


def frames(model: Any, steps: int, rows: slice = slice(None), **settings: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(
        **dict(
            dict(
                input_ids=IDS[rows],
                attention_mask=MASK[rows],
                max_new_tokens=12,
                num_flow_steps=steps,
                do_sample=True,
                temperature=0.7,
                frames_after_eos=1,
                eos_threshold=2.0,
                min_frames_before_eos=1,
                return_dict_in_generate=True,
            ),
            **settings,
        )
    )
