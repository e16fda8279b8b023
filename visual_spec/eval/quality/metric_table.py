"""The metrics of `visual-spec score`, one entry each: features, statistic, interval, label. Plain data.

The options of the command, its help, what it refuses and the chart of the report follow from the two tables. A metric
of features that are there already is one entry of `METRICS`; one of new features has an entry of `EXTRACTORS` too.

Distances under different extractors do not compare; nor do Frechet distances of sets of different size.
"""

from __future__ import annotations

from dataclasses import dataclass

_JACKKNIFE = "delete-a-group jackknife, 20 groups, about the mean at this number of samples"
_NORMAL = "normal law"
NEIGHBOURS = 3  # of precision and recall


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        medium: "image", "audio" or "video"; "" for all of them.
        figure: what its figure is called in `scores.json`.
        label: what it measures, in words.
        features: of which extractor.
        statistic: function of `visual_spec.eval.quality.statistics`. It returns figures by name, each {value, low,
            high} and maybe a note; or, with `each`, the value of every sample [N].
        interval: what the interval is.
        reference, prompts, beside: whether it needs true samples, prompts, and another set for the same seeds.
        distance: whether it is a Frechet distance, whose difference to another set is reported and which pages draw.
        moments: names of the mean and the covariance that ADM's reference files state of these features; (): none.
        fewest: samples of each set without which there is no figure.
    """

    medium: str
    figure: str
    label: str
    features: str
    statistic: str
    interval: str
    each: bool = False
    reference: bool = True
    prompts: bool = False
    beside: bool = False
    distance: bool = False
    moments: tuple[str, ...] = ()
    fewest: int = 2


@dataclass(frozen=True)
class Source:
    """An extractor.

    Attributes:
        make: function of `visual_spec.eval.quality.extractors`.
        option: of the command, which passes its network; "": it needs none.
        what: the network, in words.
        folder: whether a folder is passed, else a file.
        optional: whether it may be found elsewhere.
        program: whether the file is a program, which is run only where the user trusts it.
    """

    make: str
    option: str = ""
    what: str = ""
    folder: bool = True
    optional: bool = False
    program: bool = False


def _distance(
    medium: str,
    figure: str,
    label: str,
    features: str,
    statistic: str = "frechet",
    moments: tuple[str, ...] = (),
) -> Metric:
    return Metric(medium, figure, label, features, statistic, _JACKKNIFE, distance=True, moments=moments)


def _to_beside(figure: str, label: str, features: str) -> Metric:
    return Metric(
        "image", figure, label, features, figure, _NORMAL, each=True, reference=False, beside=True, fewest=1
    )


def _to_prompt(medium: str, figure: str, label: str, features: str) -> Metric:
    return Metric(
        medium, figure, label, features, "scores", _NORMAL, each=True, reference=False, prompts=True, fewest=1
    )


METRICS: dict[str, Metric] = {
    "fid": _distance(
        "image",
        "fid",
        "Frechet Inception distance",
        "inception",
        "frechet_inception",
        moments=("mu", "sigma"),
    ),
    "sfid": _distance(
        "image",
        "sfid",
        "sFID: Frechet distance of maps within Inception, as ADM's evaluator has it",
        "inception-maps",
        moments=("mu_s", "sigma_s"),
    ),
    "kid": Metric(
        "image",
        "kid",
        "kernel Inception distance",
        "inception",
        "kernel_inception",
        "delete-one jackknife, and the choice of subsets",
        fewest=3,
    ),
    "is": Metric(
        "image",
        "inception_score",
        "Inception score",
        "inception",
        "inception_score",
        "standard error over the splits, by Student's law",
        reference=False,
        fewest=10,
    ),
    "is-adm": Metric(
        "image",
        "inception_score_adm",
        "Inception score as ADM's evaluator has it, splits of 5,000 in order",
        "inception",
        "inception_score_adm",
        "delete-a-group jackknife",
        reference=False,
    ),
    "dino": _distance("image", "fd_dinov2", "Frechet distance of DINOv2 features (FD-DINOv2)", "dino"),
    "cmmd": Metric(
        "image", "cmmd", "CLIP maximum mean discrepancy", "clip", "clip_discrepancy", "delete-one jackknife"
    ),
    "psnr": _to_beside("psnr", "peak signal to noise ratio in dB to the set of --compare-to", "pixels"),
    "ssim": _to_beside("ssim", "structural similarity to the set of --compare-to", "pixels"),
    "lpips": _to_beside("lpips", "learned perceptual distance (AlexNet) to the set of --compare-to", "lpips"),
    "prc": Metric(
        "image",
        "precision",
        "precision and recall, 3 neighbours, as ADM's evaluator has them",
        "inception",
        "precision_recall",
        "Wilson, for the binomial variance and a jackknife over balls",
        fewest=NEIGHBOURS + 1,
    ),
    "clip": _to_prompt(
        "image", "clip_score", "CLIP score: 100 cos of picture and prompt, at least 0", "clip"
    ),
    "hps": _to_prompt("image", "hps_v2", "Human Preference Score v2: 100 cos of picture and prompt", "hps"),
    "shapes": _distance(
        "image",
        "frechet_shapes",
        "Frechet distance, precision and recall of the embedded classifier of `shapes`; no FID",
        "shapes",
        "frechet_shapes",
    ),
    "fad": _distance(
        "audio",
        "fad",
        "Frechet audio distance: of VGGish embeddings of seconds, as MusicGen and MAGNeT print it",
        "vggish",
        "frechet_audio",
    ),
    "fad-clap": _distance(
        "audio",
        "fad_clap",
        "Frechet distance of CLAP embeddings (Gui et al. 2024); does not compare with FAD",
        "clap",
    ),
    "kad": Metric(
        "audio", "kad", "kernel audio distance", "clap", "kernel_audio", "delete-one jackknife", fewest=3
    ),
    "clap": _to_prompt("audio", "clap_score", "cosine of clip and prompt", "clap"),
    "mel": _distance(
        "audio", "frechet_mel", "Frechet distance of mean and spread of 64 mel bands; no FAD", "mel"
    ),
    "kl": Metric(
        "audio",
        "kl",
        "Kullback-Leibler divergence of a tagger's labels, reference to drawn, clip by clip",
        "tags",
        "label_divergence",
        _NORMAL,
        each=True,
        fewest=1,
    ),
    "fvd": _distance("video", "fvd", "Frechet video distance", "i3d"),
    "frames": _distance(
        "video",
        "frechet_frames",
        "Frechet distance of the classifier of `shapes` over the frames; no FVD",
        "frames",
    ),
    "parser": Metric(
        "",
        "all_correct",
        "share of samples of the procedural data with all that their prompts ask for, and of each attribute",
        "parser",
        "parsed",
        "Wilson",
        reference=False,
        prompts=True,
        fewest=1,
    ),
}
_INCEPTION = (
    "Inception weights of torch-fidelity (https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
    "weights-inception-2015-12-05-6726825d.pth)"
)
EXTRACTORS: dict[str, Source] = {
    "parser": Source("parsed_attributes"),
    "inception": Source("inception_features", "feature_weights", _INCEPTION, folder=False, optional=True),
    "inception-maps": Source("inception_maps", "feature_weights", _INCEPTION, folder=False, optional=True),
    "shapes": Source("shapes_features"),
    "clip": Source(
        "clip_features",
        "clip",
        "a CLIP model of transformers, such as https://huggingface.co/openai/clip-vit-large-patch14",
    ),
    "hps": Source(
        "preference_features",
        "hps",
        "CLIP ViT-H/14's config and tokenizer (laion/CLIP-ViT-H-14-laion2B-s32B-b79K) with HPS_v2*.pt",
    ),
    "vggish": Source("vggish_features", "vggish", "vggish-10086976.pth of torchvggish", folder=False),
    "clap": Source("clap_features", "clap", "a CLAP model of transformers"),
    "dino": Source("dino_features", "dino", "a DINOv2 model of transformers"),
    "pixels": Source("pixel_features"),
    "lpips": Source(
        "lpips_features",
        "lpips",
        "AlexNet weights of torchvision (alexnet-owt-7be5be79.pth), for LPIPS",
        folder=False,
    ),
    "mel": Source("mel_features"),
    "frames": Source("frame_features"),
    "i3d": Source(
        "video_features",
        "i3d",
        "the I3D network of FVD as TorchScript (https://www.dropbox.com/s/ge9e5ujwgetktms/i3d_torchscript.pt?dl=1)",
        folder=False,
        program=True,
    ),
    "tags": Source("tag_features", "tagger", "an audio classifier of transformers"),
}
OWN = {"image": "shapes", "audio": "mel", "video": "frames"}  # by medium: a metric that needs no files
DISTANCES = tuple(metric.figure for metric in METRICS.values() if metric.distance)


def names_of(medium: str) -> tuple[str, ...]:
    """The metrics of a medium."""
    return tuple(name for name, metric in METRICS.items() if metric.medium in ("", medium))


def options() -> dict[str, Source]:
    """The options of the command that pass networks."""
    return {source.option: source for source in EXTRACTORS.values() if source.option}
