"""Fixtures of the samplers' and the next-token models' tests."""

from tests.models.next_token.conftest import tiny_presets as tiny_presets
from tests.samplers.conftest import operations_of as operations_of
from tests.samplers.conftest import recordings as recordings
from tests.samplers.conftest import whole_batch as whole_batch
