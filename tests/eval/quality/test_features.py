"""The networks behind the distances: the embedded one reads pictures, and weights are recognised."""

import json

import numpy as np
import pytest
import torch

from scripts.train import classifier
from scripts.train.classifier import HEADS, ClassifierTraining, judge, labels, train_classifier
from tests.helpers.refusals import refuses
from visual_spec.data.shapes import Scene, ShapeObject, sample_dataset
from visual_spec.eval.quality import features
from visual_spec.eval.quality.features import features_of, load_shapes_features
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.shapes_features import ShapesFeatures
from visual_spec.pipelines.embedded import embedded_folder, embedded_models


def small_network() -> ShapesFeatures:
    torch.manual_seed(0)
    return ShapesFeatures(heads=HEADS, num_features=6, image_size=16, channels=2)


def test_the_embedded_network_reads_held_out_scenes():
    found = judge(load_shapes_features(), 60)
    for name in ("background", "texture", "count", "layout", "size"):
        assert found[name] >= 0.95
    assert found["shape"] >= 0.85 and found["colour"] >= 0.8 and found["centre_pixels"] < 4
    record = json.loads((embedded_folder("shapes_features") / "training.json").read_text())
    assert record["held_out"]["pictures"] == 1000
    assert sum(path.stat().st_size for path in embedded_folder("shapes_features").iterdir()) < 1e6
    assert "shapes_features" not in embedded_models()  # it draws nothing


def test_features_are_standardised_on_true_scenes():
    _, pictures = sample_dataset(150, 4321)
    found = features_of(load_shapes_features(), pictures)
    assert found.dtype == torch.float32 and found.shape == (150, 96)
    assert found.mean(0).abs().max() < 0.4 and 0.7 < found.std(0).mean() < 1.3


def test_features_do_not_depend_on_the_batch():
    network = small_network().eval()
    pictures = np.random.default_rng(0).integers(0, 256, (7, 20, 20, 3), np.uint8)
    parts = [features_of(network, pictures[i : i + 1]) for i in range(7)]
    assert torch.allclose(features_of(network, pictures, chunk=3), torch.cat(parts), atol=1e-5)


def test_pictures_of_another_kind_are_refused():
    network = small_network().eval()
    for wrong in (
        torch.zeros(1, 3, 8, 8),
        torch.zeros(1, 8, 8, 3, dtype=torch.uint8),
        torch.zeros(3, 8, 8).byte(),
    ):
        refuses(ValueError, r"pass uint8 \[B, 3, H, W\]", network, wrong)


def test_labels_say_what_the_picture_shows():
    def item(shape, colour, size, x, y):
        return ShapeObject(shape, colour, size, x, y)

    pair = (item("circle", "red", "small", 32, 64), item("star", "blue", "large", 96, 64))
    column = tuple(item("cross", "black", "small", 64, y) for y in (32, 64, 96))
    scenes = [
        Scene(pair, "mint", "dotted", "left of"),
        Scene(pair[::-1], "mint", "dotted", "right of"),
        Scene(column, "pink", "plain"),
        Scene((item("square", "white", "large", 40, 80),), "grey", "checked"),
    ]
    found = labels(scenes)
    for target in found.values():  # two ways to say the same picture
        assert torch.equal(target[0], target[1])
    assert [classifier.LAYOUTS[i] for i in found["layout"]] == [
        "side by side",
        "side by side",
        "stacked",
        "alone",
    ]
    assert found["count"].tolist() == [1, 1, 2, 0]
    shapes_found = [{classifier.SHAPES[i] for i in row.nonzero()[:, 0]} for row in found["shape"]]
    assert shapes_found == [{"circle", "star"}, {"circle", "star"}, {"cross"}, {"square"}]
    assert found["size"].tolist() == [[1, 1], [1, 1], [1, 0], [0, 1]]
    assert found["centre"][3].tolist() == [40 / 128, 80 / 128]


def test_training_goes_on_where_it_stopped(tmp_path, monkeypatch):
    settings = ClassifierTraining(steps=6, batch_size=4, scenes=12)
    monkeypatch.setattr(classifier, "judge", lambda model: {})  # draws a thousand scenes
    straight = small_network()
    record = train_classifier(straight, settings, tmp_path / "straight", every=2)
    assert len(record["loss"]) == 1 and not (tmp_path / "straight" / "resume.pt").exists()

    seen = []

    def stopping(outputs, wanted, loss_of=classifier.loss_of):
        seen.append(len(seen))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return loss_of(outputs, wanted)

    monkeypatch.setattr(classifier, "loss_of", stopping)
    with pytest.raises(KeyboardInterrupt):
        train_classifier(small_network(), settings, tmp_path / "cut", every=2)
    resumed = small_network()
    train_classifier(resumed, settings, tmp_path / "cut", every=2)
    assert len(seen) == 4 + 4  # steps 2 to 5 again
    for one, two in zip(straight.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    loaded = load_shapes_features(tmp_path / "cut")
    assert fingerprint([loaded]) == fingerprint([resumed]) and loaded.centre.dtype == torch.float32


def test_inception_weights_are_looked_for_in_the_cache_only(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert features.find_inception() is None
    path = tmp_path / "checkpoints" / features.INCEPTION_FILE
    path.parent.mkdir()
    path.write_bytes(b"")
    assert features.find_inception() == path
