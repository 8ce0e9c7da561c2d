"""A storm of three minutes in the whole check; `make soak` lets it last for twenty."""

import os
from pathlib import Path

import pytest

from tests.soak.storm import soak

SECONDS = float(os.environ.get("PENSTOCK_SOAK_SECONDS", "180"))


@pytest.mark.slow
@pytest.mark.live
def test_nothing_is_lost_or_answered_twice_whatever_dies(tmp_path: Path) -> None:
    happened, found = soak(SECONDS, tmp_path)
    assert not found, "\n".join([str(happened), *found[:50]])
    assert happened["engines killed"] > SECONDS / 10 and happened["requests"] > 10 * SECONDS / 3
