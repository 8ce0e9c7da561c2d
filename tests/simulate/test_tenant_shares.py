"""Does a tenant that floods leave the others' TTFT as it was? On virtual time: it comes out the same each time."""

import pytest

from bench import tenants, tenants_elsewhere
from penstock.router.settings import QueueSettings


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_ten_times_its_share_moves_the_others_p95_ttft_by_no_more_than_a_tenth(seed: int) -> None:
    before, after = tenants.moved(seed, tenants.SHARES)
    assert after <= 1.10 * before, f"from {before * 1e3:.0f} ms to {after * 1e3:.0f} ms"


@pytest.mark.slow
def test_without_shares_the_flood_drowns_them() -> None:
    before, after = tenants.moved(1, QueueSettings())
    assert after > 10 * before


@pytest.mark.slow
def test_the_flooder_itself_gets_at_least_what_it_had() -> None:
    def tokens(times: float) -> int:
        records = tenants.run(1, times, tenants.SHARES)
        return sum((r.isl or 0) + r.osl for r in records if r.tenant == tenants.FLOODER and r.outcome == "ok")

    assert tokens(tenants.TIMES) > 0.9 * tokens(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 3], ids=lambda place: tenants_elsewhere.CASES[place].name)
def test_on_traffic_that_the_rule_was_not_chosen_on(place: int) -> None:
    """Those of the page that kept the bound; it also has two that do not."""
    before, after = tenants_elsewhere.moved(tenants_elsewhere.CASES[place], tenants_elsewhere.SEEDS)
    assert after <= 1.10 * before, f"from {before * 1e3:.0f} ms to {after * 1e3:.0f} ms"


@pytest.mark.slow
@pytest.mark.parametrize("spread", list(tenants_elsewhere.FRONTENDS))
def test_a_flood_over_two_frontends_gains_nothing(spread: str) -> None:
    case, second = tenants_elsewhere.PLAIN, tenants_elsewhere.FRONTENDS[spread]
    before, after = tenants_elsewhere.moved(case, tenants_elsewhere.SEEDS, second())
    assert after <= 1.10 * before, f"from {before * 1e3:.0f} ms to {after * 1e3:.0f} ms"
