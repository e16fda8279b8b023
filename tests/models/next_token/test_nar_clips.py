"""NAR over clips: its three heads beside straight lines, and its tokens beside those of the public code."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.nar import scores
from tests.helpers.official import random_weights, transformer_shapes
from tests.helpers.refusals import refuses
from tests.models.next_token import straight
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.orders.tables import order_of
from visual_spec.training.flashar import Pass

FRAMES, SIDE, VOCAB, CLASSES, DIM, TRUNK = 3, 3, 12, 7, 16, 2
LENGTH = FRAMES * SIDE * SIDE
LABELS = torch.tensor([3, 0])
TOKENS = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
PLACES = [(slot // SIDE**2, slot // SIDE % SIDE, slot % SIDE) for slot in range(LENGTH)]
HEADS = {"": (0, 0, 1), "medusa_": (0, 1, 0), "later_": (1, 0, 0)}  # the step that each head predicts

# github.com/ThisisBillhe/NAR, 225c1fb, NAR-videos: `LARP_AR` with `latent_shape` (3, 3, 3), two blocks and one of each
# head, `abs_pe` the sum of our three tables, and `ar.generate(sample_logits=False)` of labels 3 and 0, by `cfg_scale`.
PUBLIC = {
    1.0: [
        [5, 4, 4, 9, 0, 6, 4, 4, 4, 4, 2, 7, 0, 10, 2, 0, 1, 6, 4, 4, 5, 1, 4, 4, 4, 4, 0],
        [8, 9, 4, 8, 10, 2, 1, 2, 2, 7, 2, 7, 0, 0, 3, 8, 2, 1, 4, 4, 4, 2, 4, 0, 0, 1, 5],
    ],
    2.0: [
        [5, 4, 4, 9, 0, 6, 4, 4, 4, 4, 2, 7, 0, 6, 4, 0, 1, 6, 0, 1, 5, 11, 4, 4, 4, 4, 1],
        [8, 8, 4, 11, 11, 7, 1, 4, 5, 7, 3, 7, 0, 8, 5, 8, 7, 2, 4, 4, 1, 11, 4, 4, 0, 4, 8],
    ],
}


def weights_of() -> dict[str, Tensor]:
    shapes = transformer_shapes(TRUNK + 2, DIM, vocab=VOCAB, classes=CLASSES)
    for name in ("medusa", "later"):
        shapes |= {f"{name}_norm.weight": (DIM,), f"{name}_output.weight": (VOCAB, DIM)}
    shapes |= {f"place_embeddings.{axis}": (size, DIM) for axis, size in enumerate((FRAMES, SIDE, SIDE))}
    return random_weights(shapes, torch.float64)


def model_of(weights: dict[str, Tensor]) -> Any:
    model = LlamaGenTransformer(
        VOCAB, DIM, TRUNK, 2, SIDE, 1, CLASSES, num_frames=FRAMES, order="nar", zero_prefix_keys=False
    ).double()
    model.load_state_dict(weights)
    return model.eval()


def straight_line(weights: dict[str, Tensor], label: int, tokens: Tensor, table: Tensor) -> Tensor:
    """Logits [L, V] of all slots of one clip: no cache, no calls. `table`: the model's turns [L, D / 2, 2]."""
    places = torch.tensor(PLACES)
    embedded = weights["tok_embeddings.weight"][tokens]
    for axis in range(3):
        embedded = embedded + weights[f"place_embeddings.{axis}"][places[:, axis]]
    x = torch.cat([weights["cls_embedding.embedding_table.weight"][[label]], embedded])
    distance = places.sum(1)
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    mask[1:, 1:] = distance[:, None] >= distance
    turn = torch.cat([torch.ones(1, table.shape[1]), torch.view_as_complex(table)])[:, None]
    taps = []
    for layer in range(TRUNK + 2):
        x = straight.layer(weights, layer, x, mask, turn)
        taps.append(x)
    predicted = [
        straight.norm(weights, tap, f"{name}norm") @ weights[f"{name}output.weight"].T
        for name, tap in zip(HEADS, taps[TRUNK - 1 :], strict=True)
    ]
    logits = [torch.stack([head[0] for head in predicted]).mean(0)]
    for place in PLACES[1:]:
        votes = []
        for head, step in zip(predicted, HEADS.values(), strict=True):
            frame, row, column = (here - moved for here, moved in zip(place, step, strict=True))
            if min(frame, row, column) >= 0:
                votes.append(head[1 + PLACES.index((frame, row, column))])
        logits.append(torch.stack(votes).mean(0))
    return torch.stack(logits)


def expected(weights: dict[str, Tensor], tokens: Tensor, table: Tensor) -> Tensor:
    """`straight_line` of a batch, conditional rows, then unconditional ones: [2B, L, V]."""
    labels = [*LABELS.tolist(), *[CLASSES] * len(LABELS)]
    rows = zip(labels, tokens.repeat(2, 1), strict=True)
    return torch.stack([straight_line(weights, label, row, table) for label, row in rows])


def test_steps_and_one_pass_compute_straight_lines():
    weights = weights_of()
    model = model_of(weights)
    want = expected(weights, TOKENS, model.rotary_table())
    order = order_of("nar", model.grid)
    assert order.heads == ("right", "below", "later") and len(order.steps) == FRAMES + 2 * SIDE - 2
    for steps in (order.steps[1:], (order.joined(),)):
        logits = scores(model, LABELS, TOKENS, steps)
        assert float((logits - want).abs().max()) < 1e-12 * float(want.abs().max())
    forced = Pass(model)
    merged = forced(model, TOKENS, LABELS)[0].detach()
    assert forced.targets.sort().values.tolist() == list(range(LENGTH))
    assert float((merged - want[:2, forced.targets]).abs().max()) < 1e-12 * float(want.abs().max())


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_sampler_draws_the_tokens_of_the_public_code(scale):
    model = model_of(weights_of())
    # The public code turns nothing.
    unturned = F.pad(torch.ones(LENGTH, DIM // 4, 1, dtype=torch.float64), (0, 1))
    model.rotary_table = lambda: unturned
    result = OrderedSampler()(model, LABELS, law=TokenLaw(guidance_scale=scale, top_k=1), batch_size=2)
    assert result.tokens.tolist() == PUBLIC[scale]
    assert (result.trace.target_calls == FRAMES + 2 * SIDE - 2).all() and result.trace.lossless


def test_fewer_frames_are_refused():
    """Tokens of early frames see some of later ones."""
    refuses(ValueError, "num_frames=2", model_of(weights_of()).first_frames, 2)
