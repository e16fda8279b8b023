"""The rows of a speech model with random weights: calls by hand, bytes against the weights, both sides alike."""

import pytest
import torch

from benchmarks.sizes import speech as speech_sizes


@pytest.fixture(scope="module")
def model():
    return speech_sizes.vibevoice("tiny", dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(("scale", "own", "ours"), [(1.3, 3 * 4, 4 + 2), (1.0, 2 * 4, 4)])
def test_rows(model, scale, own, ours):
    said: list[str] = []
    plain, fast = speech_sizes.measure_latents(
        model, batch_size=2, latents=4, runs=2, warmup=1, prompt=3, scale=scale, report=said.append
    )
    assert (plain["name"], fast["name"]) == ("transformers generate", "accelerated") and len(said) == 4
    for row, calls in ((plain, own), (fast, ours)):
        assert row["calls"] == calls and row["tokens_per_call"] == 4 / calls and len(row["seconds"]) == 2
        middle = sum(row["seconds"]) / 2
        assert row["ms_per_call"]["p50"] == pytest.approx(1000 * middle / calls)
        assert row["ms_per_image"]["p50"] == pytest.approx(500 * middle)
    assert plain["speed_up"]["p50"] == 1
    assert "generate" not in vars(model)


def test_bytes_of_a_latent(model):
    sizes = {name: weight.numel() * 4 for name, weight in model.named_parameters()}

    def total(*starts: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(starts))

    language = total("model.language_model.layers", "lm_head")
    codec = total("model.audio_tower.decoder", "model.semantic_tokenizer_encoder")
    head = total("model.diffusion_head")
    assert speech_sizes._latent_bytes(model, False, True) == 3 * language + 10 * head + codec
    assert speech_sizes._latent_bytes(model, False, False) == 2 * language + 10 * head + codec
    in_loop = sum(
        size
        for name, size in sizes.items()
        if "diffusion_head" in name and any(part in name for part in ("ffn", "noisy", "linear_2"))
    )
    embedding = total("model.diffusion_head.timestep_proj")  # once a clip
    found = speech_sizes._latent_bytes(model, True, True)
    assert found == language + 10 * in_loop + (head - in_loop - embedding) + codec
