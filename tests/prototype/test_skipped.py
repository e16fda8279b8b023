"""A target without some of its blocks, as a drafter: its weights, its logits, and the tokens it leaves alone."""

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_pipeline, tiny_transformer
from visual_spec import DraftedSampler
from visual_spec.models.next_token.llamagen_blocks import TextCondition
from visual_spec.prototype.skipped import skip_layers

CONDITION = TextCondition(torch.ones(2, 6, 8), torch.ones(2, 6, dtype=torch.bool))


def test_it_is_a_model_with_fewer_blocks_and_the_same_weights() -> None:
    model = tiny_transformer(num_layers=4)
    fewer = skip_layers(model, (0, 3))
    other = tiny_transformer(num_layers=2)  # built from the weights by name
    names = {name: name.replace("layers.1.", "layers.3.") for name in other.state_dict()}
    other.load_state_dict({name: model.state_dict()[source] for name, source in names.items()})
    tokens = torch.randint(0, 12, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = other.teacher_forced(tokens, CONDITION)
    assert torch.equal(fewer.teacher_forced(tokens, CONDITION), expected)
    state = fewer.prefill(CONDITION, batch_size=2, guided=False, window=16)
    stepped = fewer(state, tokens[:, :-1], torch.arange(15).expand(2, -1))
    torch.testing.assert_close(stepped, expected[:, 1:], rtol=1e-4, atol=1e-4)
    matrix = "layers.{}.attention.wqkv.weight"
    assert fewer.get_parameter(matrix.format(1)) is model.get_parameter(matrix.format(3))
    assert (len(model.layers), model.config["num_layers"]) == (4, 4)


@pytest.mark.parametrize("kept", [(0,), (0, 2), (1, 2, 3), (0, 1, 2, 3)])
def test_drafts_of_it_leave_the_tokens_alone(kept: tuple[int, ...]) -> None:
    pipe = tiny_pipeline()
    pipe.register_modules(transformer=tiny_transformer(num_layers=4).double())
    generators = [[torch.Generator().manual_seed(seed) for seed in (1, 2, 3)] for _ in range(2)]
    plain = pipe(["red"] * 3, output_type="latent", generator=generators[0])
    pipe.drafter = skip_layers(pipe.transformer, kept)
    pipe.sampler = DraftedSampler(num_drafts=3, acceptance="identical")
    drafted = pipe(["red"] * 3, output_type="latent", generator=generators[1])
    assert torch.equal(drafted.images, plain.images)
    if len(kept) == 4:  # the target itself: every draft stands
        assert (drafted.trace.target_calls == 5).all()


@pytest.mark.parametrize("kept", [(), (2, 1), (1, 1), (0, 4), (-1,)])
def test_other_blocks_are_refused(kept: tuple[int, ...]) -> None:
    refuses(ValueError, r"4 blocks", skip_layers, tiny_transformer(num_layers=4), kept)
