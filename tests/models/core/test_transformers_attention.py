"""Attention of windows inside transformers' decoders: by the kernels, and with the configuration left as it was."""

import pytest
import torch

from tests.helpers.cached_decoders import case
from visual_spec.models.core.transformers_attention import window_calls


def test_a_decoder_is_left_as_it_was():
    config = case("emu3")[0].decoder.config
    before = config._attn_implementation
    places, mask = torch.zeros(1, 2).long(), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="stops"), window_calls(case("emu3")[0].decoder, places, mask):
        assert config._attn_implementation != before
        raise RuntimeError("stops")
    assert config._attn_implementation == before
