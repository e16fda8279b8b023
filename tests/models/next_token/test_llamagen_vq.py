"""The tokenizer's official key layout, and its quantiser against a plain search."""

import pytest
import torch

from tests.helpers.refusals import refuses
from visual_spec.models.core.vq_blocks import PositionNorm
from visual_spec.models.next_token.llamagen_vq import VQModel


def small() -> VQModel:
    torch.manual_seed(0)
    return (
        VQModel(8, (1, 2, 2), 1, 16, codebook_size=24, codebook_dim=8, norm_groups=4, image_size=32)
        .double()
        .eval()
    )


def test_tokens_are_the_codes_of_largest_cosine():
    model = small()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64) * 2 - 1
    latents = model.encode_latents(images)
    codes = model.quantize.embedding.weight
    tokens = model.encode_tokens(images).view(2, 8, 8)
    for b in range(2):
        for y in range(8):
            for x in range(8):
                cosines = [torch.cosine_similarity(latents[b, :, y, x], code, dim=0).item() for code in codes]
                assert tokens[b, y, x] == max(range(24), key=cosines.__getitem__)


def test_decoding_uses_unit_length_codes_in_raster_order():
    model = small()
    tokens = torch.randint(0, 24, (2, 64))
    pictures = model.decode_tokens(tokens)
    # Lengths must not matter.
    model.quantize.embedding.weight.data *= torch.rand(24, 1, dtype=torch.float64) + 0.5
    assert (model.decode_tokens(tokens) - pictures).abs().max() < 1e-12
    changed = tokens.clone()
    changed[0, 8 * 7 + 7] = (changed[0, 63] + 1) % 24  # the last token of the last row
    before, after = model.quantize.lookup(tokens.view(2, 8, 8)), model.quantize.lookup(changed.view(2, 8, 8))
    assert (before != after).any(1).nonzero().tolist() == [[0, 7, 7]]
    assert pictures.shape == (2, 3, 32, 32) and pictures.abs().max() <= 1


def test_wrong_tokens_are_refused():
    model = small()
    refuses(ValueError, r"decodes \[B, 64\]", model.decode_tokens, torch.zeros(1, 63, dtype=torch.long))
    refuses(ValueError, "0 to 23", model.decode_tokens, torch.full((1, 64), 24))


@pytest.mark.parametrize("norm_groups", [4, None])
def test_only_a_local_tokenizer_is_blind_to_far_pixels(norm_groups: int | None):
    torch.manual_seed(0)
    model = VQModel(8, (1, 2, 2), 1, 16, codebook_size=24, norm_groups=norm_groups, image_size=128).double()
    picture = torch.rand(1, 3, 128, 128, dtype=torch.float64) * 2 - 1
    changed = picture.clone()
    changed[..., :4, :4] *= -1
    # Radius of what a latent sees: 3 + 2 * 3 + 4 * 7 convolutions' worth of pixels, and the strides' rounding.
    # [32, 32]
    difference = (model.encode_latents(picture) - model.encode_latents(changed)).abs().amax((0, 1))
    assert difference[0, 0] > 1e-6
    assert (difference[12:, 12:].max() == 0) == (norm_groups is None)


def test_position_norm_is_that_of_each_pixel_alone():
    torch.manual_seed(0)
    norm = PositionNorm(1, 6, eps=1e-6).double()
    norm.weight.data, norm.bias.data = torch.randn(2, 6, dtype=torch.float64)
    x = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    out = norm(x)
    for b, y, column in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        pixel = x[b, :, y, column]
        want = (pixel - pixel.mean()) / (pixel.var(unbiased=False) + 1e-6).sqrt() * norm.weight + norm.bias
        assert (out[b, :, y, column] - want).abs().max() < 1e-12
