"""Are a request's hints read from kv_transfer_params, and are wrong ones said?"""

from typing import Any

import pytest

from penstock_kv.inside.request_hints import TierParams, tier_params
from penstock_kv.inside.tier_protocol import RequestHints


def test_hints_are_read() -> None:
    read = tier_params({"penstock": {"priority": 3, "pin": 60, "deadline": 0.5, "tenant": "t", "prefetch": True}})
    assert read == TierParams(priority=3, pin=60.0, deadline=0.5, tenant="t", prefetch=True)
    assert read.hints == RequestHints(priority=3, pin=60.0, deadline=0.5, tenant="t")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "text", {"penstock": None}])
def test_most_requests_have_none(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert tier_params(params) == TierParams()
    assert caplog.text == ""


@pytest.mark.parametrize("hints", [{"priority": "high"}, {"ttl": 5}, 7])
def test_hints_that_cannot_be_read_are_said(hints: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert tier_params({"penstock": hints}) == TierParams()
    assert "not heeded" in caplog.text
