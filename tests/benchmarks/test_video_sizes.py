"""The rows of a causal Wan with random weights: calls by hand, arithmetic against PyTorch's counter, bounded caches."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.sizes import video as video_sizes
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import Full
from visual_spec.samplers.continuous.chunks import ChunkWiseSampler

SIZE = video_sizes.SIZES["tiny"]


@pytest.fixture(scope="module")
def model():
    return video_sizes.wan("tiny", dtype=torch.float32, device=torch.device("cpu"))


def test_rows(model):
    said: list[str] = []
    sampler = ChunkWiseSampler(steps=(1000, 500))
    full, sliding = video_sizes.measure_chunks(
        model,
        SIZE,
        ("full", "sliding:window=9"),
        batch_size=2,
        frames=18,
        chunks=3,
        sampler=sampler,
        report=said.append,
    )
    assert (full["name"], sliding["name"]) == ("full", "sliding:window=9") and len(said) == 2
    for row in (full, sliding):
        assert row["calls"] == 3 and row["tokens_per_call"] == 1 and len(row["seconds"]) == 3
        middle = sorted(row["seconds"])[1]
        assert row["ms_per_call"]["p50"] == pytest.approx(1000 * middle / 3)
        assert row["ms_per_image"]["p50"] == pytest.approx(500 * middle)
    # Where the last chunk begins, one cache holds 15 frames of four tokens, the other the last 9 that were read.
    token, sums = 2 * 24 * 4 + 3 * 8, 3 * 24 * 4  # key, value and place; the queries of a chunk
    for row, frames in ((full, 15), (sliding, 9)):
        assert row["cache_bytes"] == 2 * SIZE.layers * (frames * 4 * token + sums)
        assert row["flops_per_call"] == video_sizes.call_flops(model, SIZE, 2, 3, row["cache_bytes"])
    assert full["speed_up"] == 1


def test_operations_are_those_that_run(model):
    causal = CausalWan(model, Full())
    embeds = torch.zeros(1, SIZE.text, SIZE.text_dim)
    state = causal.begin(embeds, SIZE.height, SIZE.width, 9)
    latents = torch.zeros(1, SIZE.channels, 3, SIZE.height, SIZE.width)
    # Only this attention is made of products that the counter knows.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        causal.commit(state, latents)
        causal.commit(state, latents)
        before = counter.get_total_flops()
        causal.forward(state, latents, 500.0)
    causal.release()
    counted = video_sizes.call_flops(model, SIZE, 1, 3, state.nbytes)
    # Around the blocks: patches, the timestep in three layers, three words in two, and the way back to patches.
    around = 12 * 16 * 24 + (16 + 24 + 6 * 24) * 24 + 3 * (8 + 24) * 24 + 12 * 24 * 16
    assert counter.get_total_flops() - before == counted + 2 * around


def test_too_few_chunks_are_refused(model):
    with pytest.raises(ValueError, match="pass 1 to 2"):
        video_sizes.measure_chunks(model, SIZE, ("full",), batch_size=1, frames=9, chunks=3)


def test_the_official_size_has_the_published_parameters():
    with torch.device("meta"):
        one = video_sizes.SIZES["1.3b"]
        model = video_sizes.WanTransformer3DModel(
            num_attention_heads=one.heads, attention_head_dim=one.head_dim, text_dim=one.text_dim,
            freq_dim=one.freq_dim, ffn_dim=one.inner, num_layers=one.layers,
        )  # fmt: skip
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_418_996_800
