"""Reports in these tests have plots."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _plots() -> None:
    """Replace the fixture that leaves them out."""
