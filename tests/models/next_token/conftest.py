"""Official files of miniatures are recognised by size, as released ones are."""

import pytest

from tests.helpers.official import add_tiny_presets


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    add_tiny_presets(monkeypatch)
