"""Scores by networks of the real classes, tiny and random, against the same networks called sample by sample."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    AutoTokenizer,
    ClapFeatureExtractor,
    ClapModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
)

from tests.helpers.command import check_refused
from tests.helpers.networks import (
    PROMPTS,
    exact_distance,
    make_pictures,
    save_clap,
    scores,
    spread,
    with_manifest,
    words_tokenizer,
    write_clips,
)
from visual_spec.cli import main
from visual_spec.eval.quality import extractors
from visual_spec.eval.quality.extractors import Setup
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.features import load_shapes_features
from visual_spec.eval.quality.media_files import read_video
from visual_spec.eval.quality.programs import VideoProgram


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    text = dict(
        vocab_size=10, max_position_embeddings=5, bos_token_id=0, eos_token_id=9, pad_token_id=1, **size
    )
    model = CLIPModel(
        CLIPConfig(
            text_config=text, vision_config=dict(image_size=16, patch_size=8, **size), projection_dim=6
        )
    )
    spread(model)
    folder = tmp_path_factory.mktemp("clip")
    model.save_pretrained(folder)
    pictures = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(pictures, words_tokenizer(("<s>", "<pad>", "<unk>"), 5)).save_pretrained(folder)
    return folder


def test_clip_scores_are_the_models_own_logits(tmp_path, clip, capsys):
    drawn = make_pictures(tmp_path / "drawn", 6, 0, size=24)
    with_manifest(drawn, [PROMPTS[i % 4] for i in range(6)])
    found = scores(capsys, drawn, "--metrics", "clip", "--clip", clip, "--batch-size", 4)["clip_score"]
    model: Any = CLIPModel.from_pretrained(clip).eval()
    tokenizer = words_tokenizer(("<s>", "<pad>", "<unk>"), 5)
    mean, deviation = (
        torch.tensor(numbers)[:, None, None]
        for numbers in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    )
    expected = []
    for i in range(6):
        picture = Image.open(drawn / f"{i:03d}.png").resize((16, 16), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
        words = tokenizer(PROMPTS[i % 4], return_tensors="pt", truncation=True)
        with torch.no_grad():
            logits = model(pixel_values=((pixels - mean) / deviation)[None], **words).logits_per_image
        expected.append(max(0.0, 100 * (logits / model.logit_scale.exp()).item()))
    assert found["value"] == pytest.approx(np.mean(expected), rel=1e-3)
    assert np.std(expected) > 1 and found["samples"] == 6
    reach = 1.96 * np.std(expected, ddof=1) / 6**0.5
    assert found["high"] - found["value"] == pytest.approx(reach, rel=1e-2)


def clips_with_prompts(
    folder: Path, count: int, seed: int, rate: int = 48_000
) -> tuple[Path, list[np.ndarray]]:
    """Clips of half a second, and what their files hold."""
    clips = [clip.astype(np.float32) / 32768 for clip in write_clips(folder, count * [0.5], seed, rate)]
    return with_manifest(folder, [PROMPTS[index % 4] for index in range(count)], "wav"), clips


def test_clap_scores_and_frechet_audio_distances_are_those_of_the_model(tmp_path, capsys):
    save_clap(tmp_path / "clap")
    drawn, clips = clips_with_prompts(tmp_path / "drawn", 8, 0)
    true, other_clips = clips_with_prompts(tmp_path / "true", 9, 1)
    asked = (drawn, "--reference", true, "--metrics", "clap,fad-clap", "--clap", tmp_path / "clap")
    found = scores(capsys, *asked)
    model: Any = ClapModel.from_pretrained(tmp_path / "clap").eval()
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path / "clap")

    def embed(clip: np.ndarray, prompt: str) -> tuple[torch.Tensor, float]:
        ten = np.pad(np.tile(clip, 480_000 // len(clip)), (0, 480_000 % len(clip)))
        inputs = ClapFeatureExtractor(truncation="rand_trunc")(ten, sampling_rate=48_000, return_tensors="pt")
        with torch.no_grad():
            output = model(**inputs, **tokenizer(prompt, return_tensors="pt"))
        return output.audio_embeds[0], (output.logits_per_audio / model.logit_scale_a.exp()).item()

    one = [embed(clip, PROMPTS[i % 4]) for i, clip in enumerate(clips)]
    other = [embed(clip, PROMPTS[0]) for clip in other_clips]
    cosines = [cosine for _, cosine in one]
    assert found["clap_score"]["value"] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert np.std(cosines) > 0.01
    expected = exact_distance(torch.stack([row for row, _ in one]), torch.stack([row for row, _ in other]))
    assert found["fad_clap"]["value"] == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert "fad" not in found  # which papers take of VGGish
    assert found["fad_clap"]["extractor"] == "clap" and found["fad_clap"]["reference_samples"] == 9


def save_tagger(folder: Path) -> tuple[Any, ASTFeatureExtractor]:
    """An audio spectrogram transformer, tiny and random, saved with its extractor."""
    torch.manual_seed(1)
    size = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=5
    )
    mel: Any = dict(num_mel_bins=16, max_length=32)
    model: Any = ASTForAudioClassification(
        ASTConfig(**size, **mel, patch_size=8, frequency_stride=8, time_stride=8)
    ).eval()
    spread(model)
    model.save_pretrained(folder)
    extractor = ASTFeatureExtractor(**mel, sampling_rate=16_000)
    extractor.save_pretrained(folder)
    return model, extractor


def test_the_divergence_of_labels_is_that_of_the_tagger(tmp_path, capsys):
    model, extractor = save_tagger(tmp_path / "tagger")
    drawn, clips = clips_with_prompts(tmp_path / "drawn", 5, 2, rate=16_000)
    true, other_clips = clips_with_prompts(tmp_path / "true", 5, 3, rate=16_000)
    asked = ("--metrics", "kl", "--tagger", tmp_path / "tagger", "--reference")
    found = scores(capsys, drawn, *asked, true)["kl"]
    expected = []
    for clip, other in zip(clips, other_clips, strict=True):
        with torch.no_grad():
            p, q = (
                torch.softmax(
                    model(**extractor(one, sampling_rate=16_000, return_tensors="pt")).logits[0], -1
                ).double()
                for one in (other, clip)
            )
        expected.append(float((p * (p / q).log()).sum()))
    assert found["value"] == pytest.approx(np.mean(expected), rel=1e-4) and np.mean(expected) > 1e-3
    short, _ = clips_with_prompts(tmp_path / "short", 4, 4, rate=16_000)
    assert main(["score", *map(str, (drawn, *asked, short))]) == 2
    assert "compares clip by clip" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_judges_that_are_saved_in_16_bits_compute_in_32(dtype, tmp_path, clip, i3d):
    """Their features are those of the same weights saved in 32 bits."""
    save_clap(tmp_path / "clap")
    save_tagger(tmp_path / "tagger")
    pictures = with_manifest(make_pictures(tmp_path / "pictures", 3, 0), PROMPTS[:3])
    clips, _ = clips_with_prompts(tmp_path / "clips", 3, 2, rate=16_000)
    for make, option, model, folder, samples in (
        (extractors.clip_features, "clip", CLIPModel, clip, pictures),
        (extractors.clap_features, "clap", ClapModel, tmp_path / "clap", clips),
        (extractors.tag_features, "tagger", ASTForAudioClassification, tmp_path / "tagger", clips),
    ):
        found = []
        for kind in (dtype, torch.float32):
            copy = tmp_path / f"{option}-{kind}"
            shutil.copytree(folder, copy)
            network: Any = model.from_pretrained(folder)
            network.to(dtype).to(kind).save_pretrained(copy)
            extract, _, _ = make(Setup({option: copy}))
            found.append(extract(SampleFiles.open(samples), 0, 3))
        for name, rows in found[1].items():
            torch.testing.assert_close(found[0][name], rows, rtol=1e-5, atol=1e-5)
    program: Any = torch.jit.load(i3d)
    videos = make_videos(2, 0)
    found = []
    for kind in (dtype, torch.float32):
        program.to(dtype).to(kind).save(tmp_path / f"{kind}.pt")
        found.append(VideoProgram(tmp_path / f"{kind}.pt", "cpu")(videos))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_prompts_are_cut_at_what_a_judge_reads_where_its_tokenizer_was_saved_without_that(
    tmp_path, clip, capsys
):
    long = [" ".join(PROMPTS)] * 3
    pictures = with_manifest(make_pictures(tmp_path / "pictures", 3, 0), long)
    save_clap(tmp_path / "clap")
    clips, _ = clips_with_prompts(tmp_path / "clips", 3, 2, rate=16_000)
    with_manifest(clips, long, "wav")
    for option, folder, samples in (("clip", clip, pictures), ("clap", tmp_path / "clap", clips)):
        free = tmp_path / f"free-{option}"
        shutil.copytree(folder, free)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.model_max_length = int(1e30)
        tokenizer.save_pretrained(free)
        one, other = (
            scores(capsys, samples, "--metrics", option, f"--{option}", judge, "--out", tmp_path / judge.name)
            for judge in (folder, free)
        )
        assert one[f"{option}_score"]["value"] == other[f"{option}_score"]["value"] != 0


class VideoNetwork(nn.Module):
    """Stands in for the I3D file: the same arguments, 4 features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(3, 4, (3, 5, 5), stride=(1, 4, 4))

    def forward(
        self, x: torch.Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False
    ) -> torch.Tensor:
        if rescale:
            x = x * (2.0 / 255.0) - 1.0
        if resize:
            x = F.interpolate(x, [x.shape[2], 32, 32], mode="trilinear")
        x = self.layer(x).relu().mean([2, 3, 4])
        return x if return_features else x.softmax(1)


@pytest.fixture(scope="module")
def i3d(tmp_path_factory) -> Path:
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("i3d") / "i3d_torchscript.pt"
    torch.jit.script(VideoNetwork().eval()).save(str(path))
    return path


def make_videos(count: int, seed: int, frames: int = 6) -> np.ndarray:
    """Squares of one colour that move, uint8 [N, T, H, W, 3]. GIF files hold them exactly."""
    rng = np.random.default_rng(seed)
    videos = np.zeros((count, frames, 24, 20, 3), np.uint8)
    for video in videos:
        video[:] = rng.integers(0, 256, 3)
        colour, (top, left), speed = rng.integers(0, 256, 3), rng.integers(0, 8, 2), 1 + rng.integers(0, 2)
        for time in range(frames):
            video[time, top : top + 9, left + speed * time : left + speed * time + 7] = colour
    return videos


def write_gifs(folder: Path, videos: np.ndarray) -> Path:
    folder.mkdir()
    for index, video in enumerate(videos):
        first, *rest = (Image.fromarray(frame) for frame in video)
        first.save(folder / f"{index:03d}.gif", save_all=True, append_images=rest, duration=100, disposal=2)
    return folder


def test_frechet_video_distances_are_those_of_the_given_network(tmp_path, i3d, capsys):
    drawn, true = make_videos(9, 0), make_videos(11, 1)
    folders = write_gifs(tmp_path / "drawn", drawn), write_gifs(tmp_path / "true", true)
    assert np.array_equal(read_video(folders[0] / "003.gif"), drawn[3])
    network = torch.jit.load(str(i3d))

    def embed(videos: np.ndarray) -> torch.Tensor:
        rows = []
        for video in videos:
            x = torch.from_numpy(video).permute(3, 0, 1, 2)[None].float() * (2 / 255) - 1
            x = F.interpolate(x, (len(video), 32, 32), mode="trilinear")
            rows.append(network(x, False, False, True)[0].detach())
        return torch.stack(rows)

    expected = exact_distance(embed(drawn), embed(true))
    asked = (
        "--metrics",
        "fvd",
        "--i3d",
        i3d,
        "--trust-program",
        "--batch-size",
        4,
        "--reference",
        folders[1],
    )
    found = scores(capsys, folders[0], *asked)["fvd"]
    assert found["value"] == pytest.approx(expected, rel=1e-4, abs=1e-9) and expected > 1e-4
    assert found["extractor"] == "i3d" and (found["samples"], found["reference_samples"]) == (9, 11)
    np.savez(tmp_path / "drawn.npz", arr_0=drawn)
    again = scores(capsys, tmp_path / "drawn.npz", *asked, "--out", tmp_path / "again")["fvd"]
    assert again["value"] == pytest.approx(found["value"], rel=1e-6)


def test_without_a_network_the_built_in_features_of_frames_are_told_under_their_own_name(tmp_path, capsys):
    videos = make_videos(4, 0), make_videos(5, 1)
    paths = tmp_path / "drawn.npz", tmp_path / "true.npz"
    for path, one in zip(paths, videos, strict=True):
        np.savez(path, arr_0=one)
    found = scores(capsys, paths[0], "--reference", paths[1], "--out", tmp_path / "s")
    assert list(found) == ["frechet_frames"]
    network = load_shapes_features()
    rows = []
    for one in videos:
        frames = torch.from_numpy(one).permute(0, 1, 4, 2, 3)
        seen = [torch.stack([network(frame[None])[0] for frame in video]) for video in frames]
        rows.append(
            torch.stack([torch.cat([one.mean(0), (one[1:] - one[:-1]).abs().mean(0)]) for one in seen])
        )
    assert found["frechet_frames"]["value"] == pytest.approx(exact_distance(*rows), rel=1e-4)


def test_videos_that_cannot_be_scored_are_refused(tmp_path, i3d, capsys):
    folder = write_gifs(tmp_path / "drawn", make_videos(3, 0))
    write_gifs(tmp_path / "long", make_videos(1, 0, frames=8))
    (tmp_path / "long" / "000.gif").rename(folder / "zzz.gif")
    (tmp_path / "other.pt").write_bytes(b"no program")
    asked = ["score", str(folder), "--reference", str(folder), "--metrics"]
    for arguments, message in (
        (["fvd"], "pass --i3d"),
        (["fid"], "holds clips; pass some of fvd frames"),
        (["fvd", "--i3d", str(tmp_path / "none.pt")], "no I3D network at"),
        (["fvd", "--trust-program", "--i3d", str(tmp_path / "other.pt")], "is no TorchScript file"),
        (["fvd", "--i3d", str(i3d)], "pass --trust-program; its SHA-256 is"),
        (["fvd", "--trust-program", "--i3d", str(i3d)], "all need one shape"),
    ):
        check_refused(main([*asked, *arguments]), message, capsys)
    content = (folder / "001.gif").read_bytes()
    (folder / "zzz.gif").unlink()
    (folder / "001.gif").write_bytes(content[:40])
    refused = main([*asked, "fvd", "--trust-program", "--i3d", str(i3d)])
    check_refused(refused, "001.gif is no whole video", capsys)


def test_other_videos_are_read_by_pyav(tmp_path):
    av = pytest.importorskip("av")
    video = make_videos(1, 5)[0][:, :, :16]
    with av.open(str(tmp_path / "a.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.bit_rate = 16, 24, 4_000_000
        for frame in video:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        file.mux(stream.encode())
    found = read_video(tmp_path / "a.mp4")
    assert found.shape == video.shape
    assert np.abs(found.astype(int) - video).mean() < 16
    assert SampleFiles.open(tmp_path).medium == "video"
