"""The multi-scale tokenizer's start from a LlamaGen tokenizer is that tokenizer, up to a shift and a scale."""

import pytest
import torch

from scripts.train.var_tokenizer import start_from
from tests.helpers.refusals import refuses
from visual_spec.data.shapes import sample_dataset
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.training.tokens import to_signed

WIDTHS = {"base_channels": 4, "channel_multipliers": (1, 2, 4, 8), "blocks_per_level": 1, "norm_groups": None}


@pytest.fixture
def trained() -> VQModel:
    torch.manual_seed(0)
    return VQModel(**WIDTHS, latent_channels=12, codebook_size=16, codebook_dim=8, image_size=128).eval()


def new_model(code_dim: int = 8) -> MultiscaleVQModel:
    return MultiscaleVQModel(**WIDTHS, codebook_size=16, code_dim=code_dim, scales=(1, 4, 16)).eval()


@torch.no_grad()
def test_networks_go_on_where_the_trained_ones_stopped(trained: VQModel) -> None:
    model = new_model()
    start_from(model, trained)
    pictures = to_signed(torch.from_numpy(sample_dataset(100, 7)[1]))
    known, found = trained.encode_latents(pictures), model.encode_latents(pictures)
    torch.testing.assert_close(found.mean((0, 2, 3)), torch.zeros(8), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.var((0, 2, 3)).mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
    # One shift for every channel and one scale for all: the spread of the ratio is nothing.
    scale = (
        known - known.mean((0, 2, 3), keepdim=True)
    ).square().mean().sqrt() / found.square().mean().sqrt()
    shift = known.mean((0, 2, 3), keepdim=True)
    torch.testing.assert_close(found * scale + shift, known, atol=1e-4, rtol=1e-3)

    length = known.norm(dim=1).mean()
    # On a map large enough for a middle that does not see the zeros around it, which stand for other codes in the two.
    codes = torch.randn(1, 8, 40, 40)
    drawn, expected = model.decode_latents(codes), trained.decode_latents((codes * scale + shift) / length)
    torch.testing.assert_close(
        drawn[..., 128:-128, 128:-128], expected[..., 128:-128, 128:-128], atol=1e-4, rtol=1e-3
    )


def test_other_widths_are_refused(trained: VQModel) -> None:
    refuses(ValueError, "code_dim", start_from, new_model(code_dim=16), trained)
