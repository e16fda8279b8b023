"""Every load of a folder computes the same bits, which are those of the pipeline that was saved."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.helpers.odd_addresses import misplaced, put_at_odd_addresses
from tests.helpers.pipelines import KINDS, Kind
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from visual_spec.pipelines.loading import load_pipeline

ALL = {
    **KINDS,
    "latents": Kind(partial(tiny_latent_pipeline, "mar"), 3),
    "causal latents": Kind(partial(tiny_latent_pipeline, "causal"), 3),
}


@pytest.mark.parametrize("name", ALL)
def test_loads_stand_at_aligned_addresses_and_agree(name, tmp_path):
    """Of our own models, of diffusers' and of transformers' that our pipelines hold."""
    saved = ALL[name].make()
    saved.save_pretrained(tmp_path)
    assert put_at_odd_addresses(tmp_path) > 1
    drawn = []
    for pipe in (saved, load_pipeline(tmp_path), type(saved).from_pretrained(tmp_path)):
        pipe.set_progress_bar_config(disable=True)
        assert misplaced(*pipe.components.values()) == []
        for one, other in zip(pipe.components.values(), saved.components.values(), strict=True):
            if isinstance(one, torch.nn.Module):
                same = zip(one.parameters(), other.parameters(), strict=True)
                assert all(torch.equal(here, there) for here, there in same)
        drawn.append(ALL[name].ask(pipe)[0])
    assert torch.equal(drawn[1], drawn[0]) and torch.equal(drawn[2], drawn[0])
