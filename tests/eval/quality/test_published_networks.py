"""sFID, the Frechet audio distance and HPSv2 against straight-line computations of what public code does.

Each network is drawn at random in the layout of its released file.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.command import check_refused
from tests.helpers.networks import (
    PROMPTS,
    exact_distance,
    make_pictures,
    scores,
    spread,
    with_manifest,
    words_tokenizer,
    write_clips,
)
from visual_spec.cli import main
from visual_spec.eval.quality import published
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.published import Gaussian
from visual_spec.eval.quality.vggish import VGGish, spectrograms

# -- sFID --------------------------------------------------------------------------------------------------------------


def spatial_maps(weights: dict[str, torch.Tensor], pictures: np.ndarray) -> torch.Tensor:
    """The 7 first channels of `mixed_6/conv`, channels last, by torch-fidelity's blocks one after the other."""
    source = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "load_state_dict_from_url", lambda *_, **__: weights)
        network = source.FeatureExtractorInceptionV3("x", ["2048"])
    values = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
    values = source.interpolate_bilinear_2d_like_tensorflow1x(values, size=(299, 299), align_corners=False)
    values = (values - 128) / 128
    for name in (
        "Conv2d_1a_3x3 Conv2d_2a_3x3 Conv2d_2b_3x3 MaxPool_1 Conv2d_3b_1x1 Conv2d_4a_3x3 MaxPool_2 "
        "Mixed_5b Mixed_5c Mixed_5d Mixed_6a Mixed_6b Mixed_6c"  # mixed, mixed_1, ... mixed_5 of the graph
    ).split():
        values = getattr(network, name)(values)
    branch = network.Mixed_6d.branch1x1  # 1 x 1, without a bias
    values = torch.einsum("nchw,oc->nhwo", values, branch.conv.weight[:7, :, 0, 0])
    batchnorm = branch.bn
    shift, scale = batchnorm.running_mean[:7], (batchnorm.running_var[:7] + batchnorm.eps).rsqrt()
    values = (values - shift) * scale * batchnorm.weight[:7] + batchnorm.bias[:7]
    return values.clamp_min(0).flatten(1).detach()


@pytest.mark.slow
def test_sfid_is_of_the_maps_of_adms_evaluator(tmp_path, inception, capsys):
    drawn, true = make_pictures(tmp_path / "drawn", 6, 0), make_pictures(tmp_path / "true", 7, 1)
    asked = ("--metrics", "sfid", "--feature-weights", inception)
    found = scores(capsys, drawn, "--reference", true, *asked)["sfid"]
    weights = torch.load(inception, weights_only=True)
    sets = [
        spatial_maps(weights, SampleFiles.open(path).pictures(0, n)) for path, n in ((drawn, 6), (true, 7))
    ]
    assert sets[0].shape == (6, 17 * 17 * 7)
    assert found["value"] == pytest.approx(exact_distance(*sets), rel=1e-4) and found["value"] > 1e-3
    # A reference file of ADM states the moments of the maps too, in this order.
    moments = {"mu": np.zeros(2048), "sigma": np.eye(2048)}
    moments |= {
        "mu_s": sets[1].double().mean(0).numpy(),
        "sigma_s": np.cov(sets[1].double().numpy(), rowvar=False),
    }
    np.savez(tmp_path / "stats.npz", **moments)
    asked = ("--reference", tmp_path / "stats.npz", *asked, "--out", tmp_path / "s")
    again = scores(capsys, drawn, *asked)["sfid"]
    assert again["value"] == pytest.approx(found["value"], rel=1e-4) and again["reference_samples"] is None


# -- Frechet audio distance --------------------------------------------------------------------------------------------


def published_examples(samples: np.ndarray) -> np.ndarray:
    """What Google's program feeds its network, by loops: [W, 96, 64] of 16-bit samples at 16 kHz."""
    scaled = samples.astype(np.float64) / max(0.1, samples.max())
    lowest, highest = (1127 * math.log(1 + hertz / 700) for hertz in (125, 7500))
    edges = np.linspace(lowest, highest, 66)
    bins = 1127 * np.log(1 + np.linspace(0, 8000, 257) / 700)
    filters = np.zeros((257, 64))
    for band in range(64):
        low, middle, high = edges[band : band + 3]
        filters[:, band] = np.maximum(
            0, np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle))
        )
    filters[0] = 0
    window = 0.5 - 0.5 * np.cos(2 * np.pi / 400 * np.arange(400))
    examples = []
    for start in range(0, len(scaled) - 16_000 + 1, 8_000):
        second = scaled[start : start + 16_000]
        spectra = [
            np.abs(np.fft.rfft(second[at : at + 400] * window, 512)) for at in range(0, 16_000 - 399, 160)
        ]
        examples.append(np.log(np.stack(spectra) @ filters + 0.01)[:96])
    return np.stack(examples)


@pytest.fixture(scope="module")
def vggish(tmp_path_factory) -> Path:
    """Random weights under torchvggish's names."""
    torch.manual_seed(0)
    network = VGGish()
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    stored = network.state_dict()
    assert sorted({key.rpartition(".")[0] for key in stored}) == sorted(
        [f"features.{place}" for place in (0, 3, 6, 8, 11, 13)]
        + [f"embeddings.{place}" for place in (0, 2, 4)]
    )
    path = tmp_path_factory.mktemp("vggish") / "vggish.pth"
    torch.save(stored | {"pproc.pca_matrix": torch.eye(128), "pproc.pca_means": torch.zeros(128, 1)}, path)
    return path


def published_embeddings(weights: dict[str, torch.Tensor], examples: np.ndarray) -> torch.Tensor:
    values = torch.from_numpy(examples).float()[:, None]
    for place in (0, 3, 6, 8, 11, 13):
        values = F.conv2d(
            values, weights[f"features.{place}.weight"], weights[f"features.{place}.bias"], padding=1
        )
        values = values.relu() if place in (6, 11) else F.max_pool2d(values.relu(), 2, 2)
    values = values.transpose(1, 3).transpose(1, 2).reshape(len(values), -1)
    for place in (0, 2, 4):
        values = F.linear(values, weights[f"embeddings.{place}.weight"], weights[f"embeddings.{place}.bias"])
        values = values.relu() if place < 4 else values
    return values


def test_spectrograms_of_seconds_are_the_published_ones():
    samples = np.random.default_rng(0).integers(-9000, 9000, 27_000).astype(np.int16)
    found = spectrograms(torch.from_numpy(samples.astype(np.float32) / 32768))
    assert found.shape == (2, 96, 64)
    assert np.allclose(found.numpy(), published_examples(samples), atol=2e-4)
    assert not len(spectrograms(torch.ones(15_999))) and spectrograms(torch.zeros(16_000)).isfinite().all()


def test_frechet_audio_distances_are_of_all_seconds(tmp_path, vggish, capsys):
    drawn, true = (tmp_path / name for name in ("drawn", "true"))
    sets = []
    for folder, seconds, seed in ((drawn, (2.6, 1.0, 1.5), 0), (true, (2, 2, 1, 3), 1)):
        clips = write_clips(folder, seconds, seed)
        weights = torch.load(vggish, weights_only=True)
        sets.append([published_embeddings(weights, published_examples(clip)) for clip in clips])
    assert [len(clip) for clip in sets[0]] == [4, 1, 2]
    found = scores(capsys, drawn, "--reference", true, "--metrics", "fad", "--vggish", vggish)["fad"]
    assert found["value"] == pytest.approx(exact_distance(*map(torch.cat, sets)), rel=1e-4)
    assert (found["samples"], found["reference_samples"]) == (3, 4) and found["value"] > 1e-3
    write_clips(tmp_path / "short", (0.9, 0.9), 2)
    asked = ("score", tmp_path / "short", "--reference", true, "--metrics", "fad", "--vggish")
    check_refused(main([*map(str, asked), str(vggish)]), "000.wav", capsys)
    torch.save({"features.0.weight": torch.zeros(64, 1, 3, 3)}, tmp_path / "other.pth")
    check_refused(main([*map(str, asked), str(tmp_path / "other.pth")]), "other.pth", capsys)


def test_seconds_of_a_clip_are_left_out_together():
    """The jackknife over clips, by hand; and rows of one clip each are as no owners at all."""
    generator = torch.Generator().manual_seed(0)
    owners = torch.arange(12).repeat_interleave(torch.tensor([1, 4, 2] * 4))
    clips = torch.randn(12, 3, generator=generator)
    rows = clips[owners] + 0.1 * torch.randn(len(owners), 3, generator=generator)
    reference = Gaussian.of(torch.randn(50, 3, generator=generator))
    figure, _ = published.frechet_with_limit(rows, reference, None, owners)
    dealt = published.deal(12, 6)[owners]
    without = [
        published.gaussian_distance(Gaussian.of(rows[dealt != group]), reference) for group in range(6)
    ]
    error = math.sqrt(5 / 6 * sum((one - np.mean(without)) ** 2 for one in without))
    assert figure["high"] - figure["value"] == pytest.approx(1.96 * error, rel=1e-3)
    alone = published.frechet_with_limit(rows, reference, None, torch.arange(len(rows)))
    assert alone == published.frechet_with_limit(rows, reference)


# -- HPSv2 -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """open_clip's residual block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 2 * width))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, 2) for _ in range(layers))


class OpenClip(nn.Module):
    """A CLIP under open_clip's names, as its forward says: features of length 1."""

    def __init__(self) -> None:
        super().__init__()
        wide, narrow, out = 12, 8, 6
        self.visual = nn.Module()
        self.visual.class_embedding = nn.Parameter(torch.randn(wide))
        self.visual.positional_embedding = nn.Parameter(torch.randn(5, wide))
        self.visual.conv1 = nn.Conv2d(3, wide, 8, 8, bias=False)
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.visual.transformer = Tower(wide, 2)
        self.visual.proj = nn.Parameter(torch.randn(wide, out))
        self.token_embedding = nn.Embedding(10, narrow)
        self.positional_embedding = nn.Parameter(torch.randn(5, narrow))
        self.transformer, self.ln_final = Tower(narrow, 1), nn.LayerNorm(narrow)
        self.text_projection = nn.Parameter(torch.randn(narrow, out))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def image(self, pixels: torch.Tensor) -> torch.Tensor:
        visual: Any = self.visual
        patches = visual.conv1(pixels).flatten(2).transpose(1, 2)
        first = visual.class_embedding.expand(len(patches), 1, -1)
        x = visual.ln_pre(torch.cat([first, patches], 1) + visual.positional_embedding)
        for block in visual.transformer.resblocks:
            x = block(x)
        return F.normalize(visual.ln_post(x[:, 0]) @ visual.proj, dim=-1)

    def text(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1], tokens.shape[1]), -math.inf).triu(1)
        for block in self.transformer.resblocks:
            x = block(x, mask)
        x = self.ln_final(x)
        return F.normalize(x[torch.arange(len(x)), tokens.argmax(-1)] @ self.text_projection, dim=-1)


def test_preference_scores_are_those_of_open_clip(tmp_path, capsys):
    from transformers import CLIPConfig

    transforms = pytest.importorskip("torchvision.transforms")
    torch.manual_seed(0)
    network = OpenClip().eval()
    spread(network)
    folder = tmp_path / "hps"
    text = dict(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    text |= dict(max_position_embeddings=5, hidden_act="gelu", eos_token_id=2)
    vision = dict(hidden_size=12, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    vision |= dict(image_size=16, patch_size=8, hidden_act="gelu")
    CLIPConfig(text_config=text, vision_config=vision, projection_dim=6).save_pretrained(folder)
    tokenizer = words_tokenizer(("<s>", "<pad>", "<unk>"), 5)
    tokenizer.save_pretrained(folder)
    drawn = make_pictures(tmp_path / "drawn", 6, 0, size=24)
    prompts = [PROMPTS[place % 4] for place in range(6)]
    with_manifest(drawn, prompts)
    asked = ("score", drawn, "--metrics", "hps", "--hps", folder)
    check_refused(main([*map(str, asked)]), str(folder), capsys)
    torch.save({"state_dict": network.state_dict()}, folder / "HPS_v2.1_compressed.pt")
    found = scores(capsys, *asked[1:], "--batch-size", 4)["hps_v2"]
    prepare = transforms.Compose(
        [
            transforms.ToTensor(),
            transforms.Resize(16, interpolation=transforms.InterpolationMode.BICUBIC, antialias=True),
            transforms.CenterCrop(16),
            transforms.Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
        ]
    )
    expected = []
    for picture, prompt in zip(SampleFiles.open(drawn).pictures(0, 6), prompts, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt", truncation=True).input_ids
        with torch.no_grad():
            expected.append(100 * (network.image(prepare(picture)[None]) @ network.text(tokens).T).item())
    assert found["value"] == pytest.approx(np.mean(expected), abs=1e-3) and np.std(expected) > 1
    assert found["high"] - found["value"] == pytest.approx(1.96 * np.std(expected, ddof=1) / 6**0.5, rel=1e-2)


def test_pictures_that_are_not_square_are_cut_to_the_middle():
    transforms = pytest.importorskip("torchvision.transforms.functional")
    from visual_spec.eval.quality.human_preference import pixels

    pictures = torch.randint(0, 256, (2, 3, 37, 50), generator=torch.Generator().manual_seed(0)).float()
    mode = transforms.InterpolationMode.BICUBIC
    resized = transforms.center_crop(transforms.resize(pictures / 255, 16, mode, antialias=True), 16)
    mean, spread = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    assert torch.allclose(pixels(pictures, 16), transforms.normalize(resized, mean, spread), atol=1e-5)
