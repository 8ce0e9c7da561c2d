"""Do tenants get what their keys allow, no more, and is what they took counted to the token?"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import PROXIED_ROUTES, FrontendSettings, SecuritySettings
from penstock.config.settings.tenant_settings import TenantSettings, hashed
from penstock.frontend.http.api_keys import ApiKeys, tenant_keys
from penstock.frontend.prompt.request_body import PATHS, TRANSLATED
from penstock.frontend.tenants.budget_ledger import BudgetLedger, period_left, period_of
from penstock.frontend.tenants.tenant_desk import TokenBucket
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Slo, SloClass
from penstock.router.settings import QueueSettings, RouterSettings
from penstock.runtime.records.usage_table import summed
from tests.frontend.stand import Stand, stand

ACME, BETA, PLAIN = ({"authorization": f"Bearer {name}"} for name in ("acme-key", "beta-key", "plain-key"))


@asynccontextmanager
async def cluster(**tenants: Any) -> AsyncIterator[Stand]:
    """A stand with tenant acme as given, tenant beta, and a key of no tenant."""
    acme = TenantSettings(keys=("acme-key", "acme-other"), **tenants)
    settings = ClusterSettings(
        models={name: ModelSettings(pools={"main": PoolSettings()}) for name in ("m", "other")},
        tenants={"acme": acme, "beta": TenantSettings(keys=("beta-key",))},
        slo=Slo(classes={"gold": SloClass(), "bronze": SloClass()}),
        router=RouterSettings(queue=QueueSettings(shares={"acme": 2.0})),
        frontend=FrontendSettings(security=SecuritySettings(api_keys=("plain-key",))),
    )
    async with stand(settings=settings) as s:
        s.join(s.engines[0], id="o0", model="other")
        yield s


def test_settings_hold_digests_alone() -> None:
    settings = TenantSettings(keys=("secret", hashed("other")))
    assert "secret" not in repr(settings) and settings.keys == (hashed("secret"), hashed("other"))
    assert msgspec.structs.replace(settings).keys == settings.keys
    assert ApiKeys((), {"t": settings.keys}).name("secret") == f"t/key-{hashed('secret')[7:15]}"
    assert ApiKeys((), {"t": settings.keys}).name(settings.keys[0]) is None, "a digest is not a key"


def test_keys_come_from_files_too_and_belong_to_one_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of acme\none\n\n{hashed('two')}\n")
    file.chmod(0o600)
    tenants = {"acme": TenantSettings(key_files=(str(file),))}
    assert tenant_keys(tenants) == {"acme": [hashed("one"), hashed("two")]}
    with pytest.raises(ConfigError, match="have the same key key-"):
        tenant_keys({**tenants, "b": TenantSettings(keys=("two",))})
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        tenant_keys(tenants)


async def test_a_tenant_is_known_by_any_of_its_keys_and_records_name_it() -> None:
    async with cluster() as s:
        for key in (ACME, {"x-api-key": "acme-other"}, BETA, PLAIN):
            assert (await s.chat(headers=key)).status == 200
        assert (await s.chat(headers={"authorization": "Bearer nobody"})).status == 401
        found = [(record.tenant, record.key) for record in s.records]
        assert [tenant for tenant, _ in found] == ["acme", "acme", "beta", None]
        assert found[0][1] == f"acme/key-{hashed('acme-key')[7:15]}" and found[3][1].startswith("key-")
        text = await (await s.http.get("/metrics")).text()
        label = f'key="{found[0][1]}"'
        assert f'penstock_tenant_tokens_total{{{label},kind="output",tenant="acme"}} 5' in text
        assert 'tenant="None"' not in text


async def test_usage_sums_equal_the_records() -> None:
    async with cluster() as s:
        for key in (ACME, ACME, BETA, PLAIN):
            await s.chat(headers=key)
        records = s.records
        rows = summed(map(msgspec.json.encode, records))
        assert sum(row.requests for row in rows) == len(records) == 4
        for row in rows:
            own = [record for record in records if record.key == row.key]
            assert row.prompt_tokens == sum(record.isl for record in own)
            assert row.output_tokens == sum(record.osl for record in own) == 5 * len(own)
            assert row.cached_tokens == sum(record.cached for record in own) and row.ok == len(own)


async def test_models_of_others_are_refused_and_not_listed() -> None:
    async with cluster(models=("m",)) as s:
        refused = await s.chat(headers=ACME, model="other")
        assert refused.status == 403
        error = (await refused.json())["error"]
        assert (error["code"], error["param"]) == ("model_not_allowed", "model")
        assert (await s.chat(headers=BETA, model="other")).status == 200
        listed = [each["id"] for each in (await (await s.http.get("/v1/models", headers=ACME)).json())["data"]]
        assert listed == ["m"]
        assert (await s.http.get("/v1/models/other", headers=ACME)).status == 404


@pytest.mark.parametrize("route", [*PROXIED_ROUTES, *PATHS.values(), *TRANSLATED, "GET /v1/models/none"])
async def test_no_route_names_models_to_a_tenant_that_may_not_use_them(route: str) -> None:
    body: dict[str, Any] = {"input": "x"}
    if "/responses" not in route:
        body |= {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tokens": [1]}
    async with cluster(models=("m",)) as s:
        for key, known in ((ACME, "m"), (BETA, "m, other"), (PLAIN, "m, other")):
            method, _, path = route.rpartition(" ")
            answer = await s.http.request(method or "POST", path, json={**body, "model": "none"}, headers=key)
            assert answer.status == 404 and f"'none' does not exist; known models: {known}" in await answer.text()
        unnamed = await s.http.post(route.rpartition(" ")[2], json=body, headers=ACME)
        assert "other" not in await unnamed.text()


async def test_classes_and_priorities_are_held() -> None:
    async with cluster(classes=("bronze",), priority_max=3) as s:
        nvext = {"agent_hints": {"priority": 99, "strict_priority": 7}}
        assert (await s.chat(headers=ACME, nvext=nvext)).status == 200
        refused = await s.chat(headers=ACME, nvext={"agent_context": {"context_type": "gold"}})
        assert refused.status == 403 and (await refused.json())["error"]["code"] == "class_not_allowed"
        assert s.records[-1].service_class == "bronze"


async def test_a_rate_in_tokens_refuses_with_what_openai_clients_read() -> None:
    async with cluster(tokens_per_minute=2000) as s:
        first = await s.chat(headers=ACME, max_tokens=1500)
        assert first.status == 200
        assert first.headers["x-ratelimit-limit-tokens"] == "2000"
        assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 500
        assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
        # What was reserved and not used is given back when the answer ends.
        assert (await s.chat(headers=ACME, max_tokens=1500)).status == 200
        answers = await asyncio.gather(*(s.chat(headers=ACME, max_tokens=1900) for _ in range(3)))
        assert sorted(answer.status for answer in answers) == [200, 429, 429]
        refused = next(answer for answer in answers if answer.status == 429)
        error = (await refused.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["param"] == "tenants.acme.tokens_per_minute"
        assert int(refused.headers["retry-after"]) > 10 and refused.headers["x-ratelimit-limit-tokens"] == "2000"
        assert (await s.chat(headers=BETA, max_tokens=1900)).status == 200
        text = await (await s.http.get("/metrics")).text()
        assert 'penstock_tenant_refusals_total{tenant="acme",limit="tokens_per_minute"} 2' in text


async def test_a_budget_ends_and_says_until_when() -> None:
    async with cluster(budget=200, budget_period="day") as s:
        statuses = []
        while not statuses or statuses[-1] == 200:
            answer = await s.chat(headers=ACME, max_tokens=100)
            statuses.append(answer.status)
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["param"]) == (429, "insufficient_quota", "tenants.acme.budget")
        assert 0 < int(answer.headers["retry-after"]) <= 86_400
        own = [record for record in s.records if record.tenant == "acme"]
        assert s.service.budgets.used("acme") == sum(record.isl + record.osl for record in own)


async def test_the_router_is_told_whose_share_a_request_is_of() -> None:
    async with cluster() as s:
        waits = asyncio.Event()

        async def slow(request: Any, body: dict[str, Any]) -> Any:
            await waits.wait()
            from tests.frontend.stand import answer_well

            return await answer_well(request, body)

        s.engines[0].reply = slow
        running = [asyncio.create_task(s.chat(headers=key)) for key in (ACME, BETA)]
        while len(s.engines[0].bodies) < 2:
            await asyncio.sleep(0.005)
        fair = s.router.pools["m"].fair
        assert fair is not None and set(fair.serving) == {"acme", ""}
        waits.set()
        assert [(await each).status for each in running] == [200, 200]
        assert fair.serving == {}


async def test_budgets_survive_a_restart_and_add_up_over_processes(tmp_path: Path) -> None:
    now = [1_764_000_000.0]
    tenants = {"acme": TenantSettings(keys=("k",), budget=1000)}
    store = SqliteStore(tmp_path)
    one, other = (BudgetLedger(store, name, tenants, lambda: now[0]) for name in ("frontend-0", "frontend-1"))
    one.add("acme", 300)
    other.add("acme", 40)
    for ledger in (one, other, one):
        await ledger.sync()
    assert one.used("acme") == other.used("acme") == 340
    await store.close()
    again = BudgetLedger(SqliteStore(tmp_path), "frontend-0", tenants, lambda: now[0])
    await again.sync()
    assert again.used("acme") == 340
    again.add("acme", 1)
    assert again.used("acme") == 341
    now[0] += again.left("acme") + 1
    assert again.used("acme") == 40, "its own begins anew at once, the others' at the next sync"
    await again.sync()
    assert again.used("acme") == 0


def test_periods_are_those_of_the_calendar() -> None:
    at = 1_764_115_200.0  # 2025-11-26 00:00 UTC
    assert (period_of("day", at), period_of("month", at)) == ("2025-11-26", "2025-11")
    assert period_left("day", at + 100) == 86_300
    assert period_left("month", at) == 5 * 86_400


def test_a_bucket_owes_what_was_taken_beyond_it_and_halves_with_two_processes() -> None:
    bucket = TokenBucket(600, 0.0)
    assert bucket.wait(5000) == 0.0, "a full bucket lets even a larger request in"
    bucket.take(1200)
    assert bucket.wait(60) == pytest.approx(66.0)
    bucket.fill(66.0)
    assert bucket.wait(60) == pytest.approx(0.0)
    bucket.take(-10_000)
    assert bucket.level == 600
    bucket.use(300)
    assert (bucket.level, bucket.wait(301)) == (300, 0.0)
