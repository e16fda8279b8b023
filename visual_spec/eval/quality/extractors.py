"""What reads features off samples of a set, for `visual_spec.eval.quality.score`.

Each function takes a `Setup` and returns (extract, networks, variant): `extract(samples, first, end)` gives
{"features": [N, D], ...}; the networks, or the checksum of a file, and the variant are what the features depend on.

It raises FileNotFoundError where a folder or a file is not there, ValueError for weights of another network and for
files that hold more than tensors, and ImportError where an extra is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from visual_spec.data import motion_parser, shapes_classes, shapes_parser, things_parser, tunes, tunes_parser
from visual_spec.data.captions import CaptionError
from visual_spec.eval.quality.accuracy import ATTRIBUTES
from visual_spec.eval.quality.audio import resampled
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.features import (
    INCEPTION_FILE,
    FrameStatistics,
    MelStatistics,
    features_of,
    find_inception,
    load_shapes_features,
)
from visual_spec.eval.quality.human_preference import load_preference, pixels
from visual_spec.eval.quality.programs import VideoProgram, checksum
from visual_spec.eval.quality.vggish import EMBEDDING_SIZE, SAMPLE_RATE, load_vggish, spectrograms
from visual_spec.files.extras import extra
from visual_spec.models.core.checkpoints import read_checkpoint
from visual_spec.models.core.saved import check_finite

if TYPE_CHECKING:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    from transformers import BatchEncoding, PreTrainedTokenizerBase

_CLAP_RATE = 48_000  # Hz
Extract = Callable[[SampleFiles, int, int], dict[str, Tensor]]
Extractor = tuple[Extract, Sequence[nn.Module] | str, str]


@dataclass(frozen=True)
class Setup:
    """What extractors are made of.

    Attributes:
        networks: files and folders of weights, by the name of the option that passes them.
        size: pictures are resized to this side first; None: as they are.
        device: where networks run.
        beside: the set that samples are compared with one by one; None: there is none.
        trust_program: run programs in files, with all that the user may do (`visual_spec.eval.quality.programs`).
    """

    networks: Mapping[str, Path] = field(default_factory=dict)
    size: int | None = None
    device: str = "cpu"
    batch_size: int = 50
    trust_program: bool = False
    beside: SampleFiles | None = None


def _in_parts(size: int, part: Extract) -> Extract:
    """`part` for `size` samples at a time."""

    @torch.no_grad()
    def extract(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        parts = [part(samples, start, min(start + size, end)) for start in range(first, end, size)]
        return {name: torch.cat([one[name] for one in parts]) for name in parts[0]}

    return extract


def _of_transformers(setup: Setup, option: str, missing: str, model: str, processor: str) -> tuple[Any, Any]:
    """A model of transformers on the device, in single precision however it is saved, and its processor, of the folder
    that an option passes; `missing` says that there is none, with `{}` for it."""
    folder = setup.networks.get(option)
    if folder is None or not Path(folder).is_dir():
        raise FileNotFoundError(missing.format(folder))
    import transformers

    network = getattr(transformers, model).from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    network.eval().requires_grad_(False).to(setup.device)
    return network, getattr(transformers, processor).from_pretrained(folder, local_files_only=True)


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str], most: int) -> BatchEncoding:
    """Texts as a model that reads at most `most` tokens takes them; a tokenizer may be saved without that limit."""
    most = min(most, tokenizer.model_max_length)
    return tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")


def _resize_variant(size: int | None) -> str:
    return "" if size is None else f"size{size}"


def inception_features(setup: Setup) -> Extractor:
    """torch-fidelity's network with its resampling: features [N, 2048], and logits [N, 1008] without bias."""
    network = _inception(setup, ["2048", "logits_unbiased"])

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        pictures = torch.from_numpy(samples.pictures(first, end, setup.size)).permute(0, 3, 1, 2)
        features, logits = network(pictures.to(setup.device))
        return {"features": features.float().cpu(), "logits": logits.float().cpu()}

    return _in_parts(setup.batch_size, part), [network], _resize_variant(setup.size)


def inception_maps(setup: Setup) -> Extractor:
    """Maps within the same network, which sFID is of (Nash et al. 2021), [N, 2023].

    As ADM's evaluator takes them: 7 channels of 17 x 17 of `mixed_6/conv`, which is `Mixed_6d.branch1x1` here.
    """
    network = _inception(setup, ["768"])
    maps: list[Tensor] = []
    network.Mixed_6d.branch1x1.register_forward_hook(
        lambda module, inputs, output: maps.append(output[:, :7])
    )

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        pictures = torch.from_numpy(samples.pictures(first, end, setup.size)).permute(0, 3, 1, 2)
        network(pictures.to(setup.device))
        # Channels last, in which order ADM's files state their moments.
        return {"features": maps.pop().permute(0, 2, 3, 1).float().flatten(1).cpu()}

    return _in_parts(setup.batch_size, part), [network], _resize_variant(setup.size)


@torch.no_grad()
def _inception(setup: Setup, outputs: list[str]) -> FeatureExtractorInceptionV3:
    """torch-fidelity's network with some of its features, by the file that is passed or the one in PyTorch's cache."""
    path = setup.networks.get("feature_weights") or find_inception()
    if path is None or not Path(path).is_file():
        raise FileNotFoundError(
            f"no Inception weights{'' if path is None else f' at {path}'}; download {INCEPTION_FILE} of "
            "torch-fidelity and pass it as --feature-weights (to eval as --inception)"
        )
    with extra("eval", "Inception features need torch-fidelity"):
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    try:  # torch-fidelity itself would unpickle more than tensors
        check_finite(read_checkpoint(path).weights, str(path))
    except ValueError as error:
        raise ValueError(f"{error} The file of this name is {INCEPTION_FILE}") from error
    try:
        network = FeatureExtractorInceptionV3(
            "inception-v3-compat", outputs, feature_extractor_weights_path=str(path)
        )
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"{path} holds other weights than Inception's ({reason}); pass {INCEPTION_FILE}"
        ) from error
    return network.eval().to(setup.device)


def parsed_attributes(setup: Setup) -> Extractor:
    """What the parser of the procedural data reads: [N, A], 1 or 0 for each of `ATTRIBUTES`, -1 if it is not asked for.

    Prompts are captions of `shapes`, `things`, `motion` or `tunes`, or names of classes of `shapes`. Another prompt
    asks for nothing that the parser knows.
    """

    def extract(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        assert samples.prompts is not None
        prompts, rows = samples.prompts[first:end], []
        for prompt, sample in zip(prompts, _one_by_one(samples, first, end), strict=True):
            hits = _parse(samples.medium, prompt, sample)
            rows.append([float(hits.get(name, -1)) for name in ATTRIBUTES])
        return {"features": torch.tensor(rows)}

    return extract, [], ""


def _one_by_one(samples: SampleFiles, first: int, end: int) -> Iterator[np.ndarray]:
    """Samples as parsers take them."""
    if samples.medium == "video":
        yield from samples.videos(first, end)
    elif samples.medium == "image":
        yield from (samples.pictures(index, index + 1)[0] for index in range(first, end))
    else:
        for clip, rate in samples.clips(first, end):
            if rate != tunes.SAMPLE_RATE:
                raise ValueError(
                    f"{samples.path} holds clips at {rate} Hz, and the parser reads tunes at {tunes.SAMPLE_RATE} Hz"
                )
            yield clip.numpy()


def _parse(medium: str, prompt: str, sample: np.ndarray) -> dict[str, bool]:
    if medium == "image" and prompt in shapes_classes.CLASS_NAMES:
        return shapes_classes.score_class(prompt, sample)
    if medium == "image" and things_parser.is_caption(prompt):
        return things_parser.score(prompt, sample)
    parser = {"image": shapes_parser, "video": motion_parser, "audio": tunes_parser}[medium]
    try:
        return parser.score(prompt, sample)
    except CaptionError:
        return {}


def shapes_features(setup: Setup) -> Extractor:
    """The embedded classifier of `shapes` pictures."""
    network: Any = load_shapes_features()
    network = network.to(setup.device)

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        return {"features": features_of(network, samples.pictures(first, end, setup.size))}

    return _in_parts(setup.batch_size, part), [network], _resize_variant(setup.size)


def clip_features(setup: Setup) -> Extractor:
    """Of a CLIP model (Radford et al. 2021): features of pictures, and scores: 100 cos with the prompt, at least 0.

    As torchmetrics' `CLIPScore` (Hessel et al. 2021, without its factor 2.5), sample by sample. Prompts are cut at what
    the model reads. Sets without prompts have no scores.
    """
    missing = "no CLIP model at {}; pass a folder such as openai/clip-vit-large-patch14 holds"
    model, processor = _of_transformers(setup, "clip", missing, "CLIPModel", "AutoProcessor")
    longest = model.config.text_config.max_position_embeddings

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        pictures = torch.from_numpy(samples.pictures(first, end, setup.size)).permute(0, 3, 1, 2)
        inputs = processor(images=list(pictures), return_tensors="pt").to(setup.device)
        image = F.normalize(_pooled(model.get_image_features(**inputs)).float(), dim=-1)
        features = {"features": image.cpu()}
        if samples.prompts is not None:
            tokens = _tokens(processor.tokenizer, samples.prompts[first:end], longest)
            text = _pooled(model.get_text_features(**tokens.to(setup.device)))
            features["scores"] = (
                (100 * (image * F.normalize(text.float(), dim=-1)).sum(-1)).clamp_min(0).cpu()
            )
        return features

    return _in_parts(setup.batch_size, part), [model], _resize_variant(setup.size)


def _pooled(output: Any) -> Tensor:
    """Embeddings, which older versions of transformers return bare."""
    return output if isinstance(output, Tensor) else output.pooler_output


def preference_features(setup: Setup) -> Extractor:
    """Features of the Human Preference Score v2, and scores: 100 cos with the prompt. In single precision.

    Prompts are cut at what the model reads.
    """
    network, tokenizer = load_preference(setup.networks["hps"])
    network = network.to(setup.device)
    side, longest = (
        network.config.vision_config.image_size,
        network.config.text_config.max_position_embeddings,
    )

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        assert samples.prompts is not None
        pictures = _channels_first(samples.pictures(first, end, setup.size), setup.device)
        image = F.normalize(_pooled(network.get_image_features(pixel_values=pixels(pictures, side))), dim=-1)
        tokens = _tokens(tokenizer, samples.prompts[first:end], longest)
        text = F.normalize(_pooled(network.get_text_features(**tokens.to(setup.device))), dim=-1)
        return {"features": image.cpu(), "scores": 100 * (image * text).sum(-1).cpu()}

    return _in_parts(setup.batch_size, part), [network], _resize_variant(setup.size)


def vggish_features(setup: Setup) -> Extractor:
    """VGGish embeddings of the seconds of clips, [N, W * 128], and how many each clip has, `rows` [N].

    Shorter clips are filled up with zeros; a clip of less than a second is refused.
    """
    network = load_vggish(setup.networks["vggish"]).to(setup.device)

    @torch.no_grad()
    def extract(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        clips = []
        for place, (clip, rate) in enumerate(samples.clips(first, end), first):
            seconds = spectrograms(torch.from_numpy(resampled(clip, rate, SAMPLE_RATE)))
            if not len(seconds):
                raise ValueError(
                    f"{samples.path / samples.files[place]} has {len(clip) / rate:.2f} s; fad needs 1 s or more"
                )
            embeddings = [network(part.to(setup.device)).cpu() for part in seconds.split(setup.batch_size)]
            clips.append(torch.cat(embeddings).flatten())
        counts = torch.tensor([len(clip) / EMBEDDING_SIZE for clip in clips])
        return {"features": pad_sequence(clips, batch_first=True), "rows": counts}

    return extract, [network], ""


def clap_features(setup: Setup) -> Extractor:
    """Of a CLAP model (Wu et al. 2023): features of clips, and scores: the cosine with the prompt.

    Clips are resampled to 48 kHz. One shorter than ten seconds is repeated as often as it fits, one longer is cut at a
    place drawn for it alone, so nothing depends on the batch. A model with feature fusion, which takes other inputs, is
    refused.
    """
    from transformers import AutoTokenizer

    missing = "no CLAP model at {}; pass a folder such as laion/larger_clap_music holds"
    model, extractor = _of_transformers(setup, "clap", missing, "ClapModel", "ClapFeatureExtractor")
    tokenizer = AutoTokenizer.from_pretrained(setup.networks["clap"], local_files_only=True)
    if model.config.audio_config.enable_fusion:
        raise ValueError(
            f"the CLAP model at {setup.networks['clap']} fuses features of several cuts; pass one that does not"
        )
    # Not the stored setting: "fusion", the default, makes four spectrograms of a clip where the model takes one.
    extractor.truncation, extractor.padding = "rand_trunc", "repeatpad"
    longest, texts = extractor.nb_max_samples, model.config.text_config
    most = texts.max_position_embeddings - texts.pad_token_id - 1  # positions begin behind the padding's

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        rows = []
        for place, (clip, rate) in enumerate(samples.clips(first, end), first):
            wave = resampled(clip, rate, _CLAP_RATE)
            start = int(np.random.default_rng((place, 0)).integers(max(0, len(wave) - longest) + 1))
            cut = [wave[start : start + longest]]
            inputs = extractor(cut, sampling_rate=_CLAP_RATE, return_tensors="pt").to(setup.device)
            rows.append(_pooled(model.get_audio_features(**inputs)).float().cpu())
        features = {"features": torch.cat(rows)}
        if samples.prompts is not None:
            tokens = _tokens(tokenizer, samples.prompts[first:end], most)
            text = _pooled(model.get_text_features(**tokens.to(setup.device))).float().cpu()
            features["scores"] = (features["features"] * text).sum(-1)
        return features

    return _in_parts(setup.batch_size, part), [model], ""


def mel_features(setup: Setup) -> Extractor:
    """Mean and spread of mel bands: no network."""

    def extract(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        rows = [MelStatistics(rate)(clip[None]) for clip, rate in samples.clips(first, end)]
        return {"features": torch.cat(rows)}

    return extract, [], ""


def frame_features(setup: Setup) -> Extractor:
    """The embedded classifier of `shapes` pictures over the frames of videos, see `FrameStatistics`."""
    network = FrameStatistics(load_shapes_features()).to(setup.device)

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        return {"features": features_of(network, _stacked(samples, first, end))}

    return _in_parts(setup.batch_size, part), [network], ""


def _stacked(samples: SampleFiles, first: int, end: int) -> np.ndarray:
    """Videos of one shape, uint8 [B, T, H, W, 3]."""
    videos = list(samples.videos(first, end))
    if len(shapes := sorted({video.shape for video in videos})) > 1:
        raise ValueError(f"{samples.path}: videos of {shapes[0]} and {shapes[1]}; all need one shape")
    return np.stack(videos)


def video_features(setup: Setup) -> Extractor:
    """Of the I3D network of FVD (Unterthiner et al. 2018): its 400 logits, [N, 400].

    Args:
        weights: TorchScript, as StyleGAN-V's authors release it (`i3d_torchscript.pt`). It takes videos [B, 3, T, H, W]
            of 0 to 255, and resizes them to 224 pixels and to -1 to 1 itself. One that is not trusted is refused.
    """
    program = VideoProgram(trusted_program(setup.networks.get("i3d"), setup.trust_program), setup.device)

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        return {"features": program(_stacked(samples, first, end))}

    return _in_parts(setup.batch_size, part), program.checksum[:12], ""


def trusted_program(path: Path | None, trusted: bool) -> Path:
    """The file of a program that may be run: one that is there, and that the user trusts."""
    if path is None or not Path(path).is_file():
        raise FileNotFoundError(f"no I3D network at {path}; pass the TorchScript file i3d_torchscript.pt")
    if not trusted:
        raise ValueError(
            f"{path} is a program (TorchScript), which may do all that you may. If you trust where it comes from, pass "
            f"--trust-program; its SHA-256 is {checksum(Path(path))}"
        )
    return Path(path)


def tag_features(setup: Setup) -> Extractor:
    """Log probabilities [N, C] of the labels of a classifier of clips, such as an audio spectrogram transformer."""
    missing = "no tagger at {}; pass a folder of an audio classifier of transformers"
    model, extractor = _of_transformers(
        setup, "tagger", missing, "AutoModelForAudioClassification", "AutoFeatureExtractor"
    )

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        ((clip, rate),) = samples.clips(first, end)
        wave = resampled(clip, rate, extractor.sampling_rate)
        inputs = extractor(wave, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return {"features": model(**inputs.to(setup.device)).logits.float().log_softmax(-1).cpu()}

    return _in_parts(1, part), [model], ""


@torch.no_grad()
def dino_features(setup: Setup) -> Extractor:
    """The class token [N, D] of a DINOv2 model (Oquab et al. 2023), as FD-DINOv2 takes it (Stein et al. 2023).

    Pictures are resized whole to the side that the model's processor crops to, as clean-fid resizes them.
    """
    missing = "no DINOv2 model at {}; pass a folder such as facebook/dinov2-large holds"
    model, processor = _of_transformers(setup, "dino", missing, "AutoModel", "AutoImageProcessor")
    side = processor.crop_size["height"]
    mean, spread = (
        torch.tensor(numbers, device=setup.device)[:, None, None]
        for numbers in (processor.image_mean, processor.image_std)
    )

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        pictures = _channels_first(samples.pictures(first, end, side), setup.device)
        output = model(pixel_values=(pictures / 255 - mean) / spread)
        return {"features": output.pooler_output.float().cpu()}

    return _in_parts(setup.batch_size, part), [model], f"size{side}"


def pixel_features(setup: Setup) -> Extractor:
    """Mean squared difference of 0 to 255, and structural similarity (Wang et al. 2004), of pairs with `beside`."""
    with extra("eval", "ssim and psnr need torchmetrics"):
        from torchmetrics.functional.image import structural_similarity_index_measure as similarity

    def compared(one: Tensor, other: Tensor) -> dict[str, Tensor]:
        value = similarity(one, other, data_range=255.0, reduction="none")
        return {"squared_error": (one - other).square().mean((1, 2, 3)).cpu(), "ssim": _rows(value, len(one))}

    return _pairs(setup, compared), [], _beside_variant(setup)


def lpips_features(setup: Setup) -> Extractor:
    """LPIPS (Zhang et al. 2018) of pairs with `beside`: AlexNet, with the linear layers that torchmetrics holds."""
    weights = setup.networks.get("lpips")
    if weights is None or not Path(weights).is_file():
        raise FileNotFoundError(
            f"no AlexNet weights at {weights}; pass alexnet-owt-7be5be79.pth of torchvision"
        )
    stored = read_checkpoint(weights).weights
    with extra("eval", "lpips needs torchmetrics and torchvision"):
        from torchmetrics.functional.image.lpips import _LPIPS
    network = _LPIPS(pretrained=True, net="alex", pnet_rand=True)
    own = network.net.state_dict()
    wanted = {name: f"features.{name.split('.', 1)[1]}" for name in own}
    if wrong := [
        key for name, key in wanted.items() if key not in stored or stored[key].shape != own[name].shape
    ]:
        raise ValueError(
            f"{weights} holds no {wrong[0]} of AlexNet; pass alexnet-owt-7be5be79.pth of torchvision"
        )
    network.net.load_state_dict({name: stored[key] for name, key in wanted.items()})
    network = network.eval().requires_grad_(False).to(setup.device)

    def compared(one: Tensor, other: Tensor) -> dict[str, Tensor]:
        value = network(one / 255, other / 255, normalize=True)
        return {"lpips": _rows(value, len(one))}

    return _pairs(setup, compared), [network], _beside_variant(setup)


def _rows(values: Any, count: int) -> Tensor:
    return values.reshape(count).float().cpu()


def _channels_first(pictures: np.ndarray, device: str) -> Tensor:
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float().to(device)


def _beside_variant(setup: Setup) -> str:
    assert setup.beside is not None
    return "-".join(filter(None, [f"to-{setup.beside.fingerprint}", _resize_variant(setup.size)]))


def _pairs(setup: Setup, compared: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> Extract:
    beside = setup.beside
    assert beside is not None

    def part(samples: SampleFiles, first: int, end: int) -> dict[str, Tensor]:
        one, other = (
            _channels_first(files.pictures(first, end, setup.size), setup.device)
            for files in (samples, beside)
        )
        if one.shape != other.shape:
            raise ValueError(
                f"pictures of {samples.path} have {list(one.shape[2:])} pixels, pictures of {beside.path} "
                f"{list(other.shape[2:])}; pass --size N"
            )
        return compared(one, other)

    return _in_parts(setup.batch_size, part)
