"""Does the doctor find KV tiers that only take, that nobody serves, and that give back other bytes?"""

import pytest

from penstock_kv.cli.kv_tier_checks import check_tiers


def metrics(**values: float) -> str:
    return "".join(f'penstock_{name}{{engine="0"}} {value}\n' for name, value in values.items())


@pytest.mark.parametrize(
    ("values", "level", "word"),
    [
        ({"guard_stored_blocks_total": 5000.0}, "warning", "5,000 blocks stored, 0 served"),
        (
            {"tier_stored_blocks_total": 5000.0, "tier_served_blocks_total": 3.0, "tier_connected": 1.0},
            "ok",
            "3 served",
        ),
        ({"tier_stored_blocks_total": 10.0, "tier_connected": 1.0}, "ok", "10 blocks stored"),
        ({"tier_stored_blocks_total": 10.0, "tier_connected": 0.0}, "error", "no tier process"),
        ({"guard_stored_blocks_total": 10.0, "guard_readback_ok": 0.0}, "error", "read-back failed"),
        ({"guard_stored_blocks_total": 10.0, "guard_refused_blocks_total": 2.0}, "error", "2 refused"),
    ],
)
def test_what_an_engine_s_metrics_say(values: dict[str, float], level: str, word: str) -> None:
    (finding,) = check_tiers("w0", metrics(**values))
    assert finding.level == level and word in finding.text


def test_most_engines_have_none() -> None:
    assert list(check_tiers("w0", "vllm:num_requests_running 1\n")) == []
    assert list(check_tiers("w0", None)) == []
