"""Weights that several modules of scores need."""

import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def inception(tmp_path_factory):
    """Inception weights drawn at random, in the layout of the released file."""
    source = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(nn.Module, "load_state_dict", lambda *_, **__: None)
        network = source.FeatureExtractorInceptionV3("x", ["2048"])
    torch.manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.save(network.state_dict(), path)
    return path
