"""Windows of blocks are lossless: every setting of `BlockJacobiSampler`, by enumeration."""

import pytest

from tests.exactness.enumeration import PLAIN, Enumerator
from tests.exactness.regions import total_variation
from tests.helpers.column_laws import with_tries
from tests.helpers.order_laws import blocks_of_two, product_law
from tests.helpers.tabular import TabularOrderModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.blocks import BlockJacobiSampler

GRID = TokenGrid(2, 4)
MODEL = TabularOrderModel(GRID, 2, "blocks2", first=(0, 1, 4, 5))
GUIDED = TokenLaw(guidance_scale=1.7, temperature=0.9)
ROWS = [
    ("gumbel", "identical", "column"),
    ("gumbel", "exact", "codebook"),
    ("independent", "exact", "codebook"),
    ("maximal", "exact", "column"),
]


def distance(law: TokenLaw, sampler: BlockJacobiSampler) -> float:
    found = Enumerator(with_tries(sampler, 1), MODEL, law).run()
    want = product_law(MODEL, law, blocks_of_two, law.guided)
    assert float(found.law.sum()) == pytest.approx(1, abs=1e-10)
    by_block = want.view([2] * 8).permute(0, 1, 4, 5, 2, 3, 6, 7).flatten()
    return float(total_variation(found.law, by_block))


@pytest.mark.parametrize(("coupling", "acceptance", "unit"), ROWS)
@pytest.mark.parametrize("law", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_every_setting_follows_the_law_of_one_block_a_call(coupling, acceptance, unit, law):
    assert distance(law, BlockJacobiSampler(2, coupling, acceptance, unit)) < 1e-10
