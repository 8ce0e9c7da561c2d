"""A real Prometheus scrapes a real frontend: silences and lies of a source are told apart from no traffic."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.sources.prometheus_source import MetricsSource, PrometheusSource, queries
from penstock.config.settings.planning_settings import PrometheusSettings
from penstock.kernel.errors import ConfigError
from tests.contracts.test_etcd_store import certificate
from tests.frontend.stand import Stand, stand
from tests.servers import Prometheus

PATIENCE = 30.0
WINDOW = 2.0


def source(url: str, models: tuple[str, ...] = ("m",), **settings: Any) -> PrometheusSource:
    known = PrometheusSettings(url=url, **settings)
    return PrometheusSource(known, models=models, window=WINDOW)


@asynccontextmanager
async def scraped(folder: Path, **more: Any) -> AsyncIterator[tuple[Stand, Prometheus]]:
    """A frontend with one engine, and a Prometheus that scrapes it."""
    async with stand() as s:
        s.join(s.engines[0])
        server = Prometheus(folder, [s.server.url.removeprefix("http://")], **more)
        await asyncio.to_thread(server.start)
        try:
            yield s, server
        finally:
            server.kill()


async def until(found: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not (value := await found()):
            await asyncio.sleep(0.05)
        return value


async def reading(mine: PrometheusSource, at: float = 100.0) -> Any:
    found = (await mine.read(at)).models["m"]
    return found


async def asked(s: Stand, count: int) -> None:
    for number in range(count):
        answer = await s.chat(f"hello {number}", stream=True, stream_options={"include_usage": True})
        assert answer.status == 200
        await answer.read()


async def test_requests_that_were_made_are_counted(tmp_path):
    async with scraped(tmp_path) as (s, server):
        await asked(s, 2)  # a counter is seen to rise only once it has stood in a scrape
        for metrics in ("frontend", "router"):
            mine = source(server.url, throughput_metrics_source=metrics)
            try:
                await until(lambda mine=mine: _read(mine, lambda read: read.traffic is not None))

                async def seen(metrics: str = metrics) -> Any:
                    await asked(s, 20)  # how many of them a window sees is for the machine to say
                    fresh = source(server.url, throughput_metrics_source=metrics)  # its first look has the whole window
                    found = await reading(fresh)
                    await fresh.close()
                    traffic = found.traffic
                    return found if traffic is not None and traffic.arrived >= 15 and traffic.answered >= 15 else None

                found = await until(seen)
                traffic = found.traffic
                assert found.health == "fresh"
                assert traffic.seconds == WINDOW
                assert traffic.prompt_tokens == pytest.approx(traffic.arrived * traffic.shape.isl)
                assert traffic.shape.osl == pytest.approx(5, rel=0.3)
                assert 0 < traffic.ttft_mean < 5
                assert not traffic.at_end
            finally:
                await mine.close()


async def _read(mine: PrometheusSource, fits: Callable[[Any], bool]) -> Any:
    found = await reading(mine)
    return found if fits(found) else None


async def test_a_model_that_nobody_asks_for_has_no_traffic_and_is_not_unknown(tmp_path):
    async with scraped(tmp_path) as (_, server):
        mine = source(server.url)
        found = await until(lambda: _read(mine, lambda found: found.traffic is not None))
        assert (found.traffic.arrived, found.health) == (0, "fresh")
        silent = {tested.query.name for tested in mine.tested if not tested.series}
        assert "started" in silent  # it says which of its queries matches nothing
        assert "alive" not in silent
        await mine.close()


async def test_what_nobody_scrapes_is_unknown_then_broken_and_never_none(tmp_path):
    server = Prometheus(tmp_path, ["127.0.0.1:1"])
    await asyncio.to_thread(server.start)
    mine = source(server.url)
    try:
        first = await reading(mine, 10.0)
        assert (first.traffic, first.health) == (None, "stale")
        assert "none of the queries matches anything" in first.why
        assert (await reading(mine, 69.0)).health == "stale"
        assert (await reading(mine, 70.0)).health == "broken"
    finally:
        server.kill()
    gone = await reading(mine, 80.0)
    assert "does not answer" in gone.why
    await mine.close()


@pytest.mark.slow
async def test_a_frontend_that_goes_away_is_unknown(tmp_path):
    async with scraped(tmp_path) as (s, server):
        await asked(s, 2)
        mine = source(server.url)
        await until(lambda: _read(mine, lambda found: found.traffic is not None))
        await s.server.close()
        await until(lambda: _read(mine, lambda found: found.traffic is None and "nothing is scraped" in found.why))
        await mine.close()


async def test_a_token_and_more_parameters_are_sent(tmp_path):
    # A Prometheus itself knows no tokens, what stands before it does: what matters is that ours are sent.
    seen: list[tuple[str | None, dict[str, str]]] = []

    async def query(request: web.Request) -> web.Response:
        form = await request.post()
        seen.append((request.headers.get("authorization"), {name: str(value) for name, value in form.items()}))
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": []}})

    async with answering(query) as url:
        (tmp_path / "token").write_text("from a file\n")
        mine = source(url, token_file=str(tmp_path / "token"), params={"tenant": "seven"})
        await reading(mine)
        assert all(header == "Bearer from a file" and form["tenant"] == "seven" for header, form in seen)
        await mine.close()


async def test_a_prometheus_behind_tls_is_known_by_its_certificate(tmp_path):
    cert, key = certificate(tmp_path)
    async with scraped(tmp_path / "server", tls=(cert, key)) as (_, server):
        for settings in ({"ca": str(cert)}, {"verify": False}):
            mine = source(server.url, **settings)
            assert await until(lambda mine=mine: _read(mine, lambda seen: seen.traffic is not None))
            await mine.close()
        doubting = source(server.url)
        assert "certificate" in (await reading(doubting)).why
        await doubting.close()


@asynccontextmanager
async def answering(query: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/api/v1/query", query)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Told:
    """Answers of a Prometheus by part of the query; what is not named has no series."""

    def __init__(self, **numbers: float | str) -> None:
        self.numbers: dict[str, float | str] = {"timestamp": 1.0, "model_ready": 1, **numbers}
        self.empty = 0
        """How many questions come before the first scrape."""

    async def query(self, request: web.Request) -> web.Response:
        text = str((await request.post())["query"])
        result = []
        if self.empty > 0:
            self.empty -= 1
            return web.json_response({"status": "success", "data": {"resultType": "vector", "result": []}})
        for part, value in self.numbers.items():
            tested = text.startswith("count(")
            if part in text if part == "timestamp" or tested else f"{part}[" in text:
                result = [{"metric": {"model": "M"}, "value": [0, "1" if tested else str(value)]}]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


REQUESTS = {"requests_started_total": 10, "input_sequence_tokens_sum": 1000, "input_sequence_tokens_count": 10}


async def test_each_look_takes_its_share_of_the_window_and_loses_nothing():
    told = Told(**REQUESTS, output_sequence_tokens_sum=333, output_sequence_tokens_count=10)
    async with answering(told.query) as url:
        mine = source(url)
        await reading(mine, 100.0)
        parts = [(await reading(mine, 100.0 + 0.3 * (n + 1))).traffic for n in range(20)]
        assert sum(part.arrived for part in parts) == 30  # 6 s of 10 requests in 2 s
        assert sum(part.prompt_tokens for part in parts) == 3000
        assert sum(part.output_tokens for part in parts) == pytest.approx(999, abs=1)
        assert sum(part.seconds for part in parts) == pytest.approx(6.0)
        late = (await reading(mine, 200.0)).traffic
        assert (late.seconds, late.arrived) == (WINDOW, 10)  # of what was before the window nobody knows
        await mine.close()


@pytest.mark.parametrize("empty", [1, 2, 9, 17, 18, 19, 20, 30])
async def test_a_first_scrape_between_two_questions_is_no_missing_series(empty):
    told = Told(**REQUESTS)
    told.empty = empty
    async with answering(told.query) as url:
        mine = source(url)
        for n in range(4):
            found = await reading(mine, 100.0 + n)
            if found.traffic is not None:
                break
            assert "nothing is scraped" in found.why or "none of the queries" in found.why
        assert (found.traffic.arrived, found.traffic.at_end) == (10, False)
        silent = {tested.query.name for tested in mine.tested if not tested.series}
        assert silent.isdisjoint({"alive", "started", "input_sum", "input_count"})
        await mine.close()


async def test_a_planner_that_takes_over_goes_on_with_what_was_left_over():
    told = Told(**REQUESTS)
    async with answering(told.query) as url:
        one, total = source(url), 0
        await reading(one, 100.0)
        for n in range(20):
            state = one.snapshot()
            await one.close()
            one = source(url)
            one.restore(state)
            total += (await reading(one, 100.0 + 0.05 * (n + 1))).traffic.arrived
        assert total == 5
        await one.close()


async def test_averages_that_are_no_number_are_unknown_and_requests_that_are_none_are_not_zero():
    async with answering(Told(**REQUESTS, time_to_first_token_seconds_sum="NaN").query) as url:
        mine = source(url)
        assert (await reading(mine)).traffic.ttft_mean is None
        await mine.close()
    async with answering(Told(**{**REQUESTS, "requests_started_total": "NaN"}).query) as url:
        mine = source(url)
        found = await reading(mine)
        assert (found.traffic, found.health) == (None, "stale")
        assert "the number of requests is nan" in found.why
        await mine.close()


async def test_a_count_at_the_end_stands_in_where_there_is_none_of_the_start():
    numbers = {name: value for name, value in REQUESTS.items() if name != "requests_started_total"}
    async with answering(Told(**numbers, requests_total=8).query) as url:
        mine = source(url)
        traffic = (await reading(mine)).traffic
        assert (traffic.arrived, traffic.at_end) == (8, True)
        await mine.close()


async def test_a_scrape_that_is_old_is_not_taken_for_now():
    async with answering(Told(**REQUESTS, timestamp=45.0).query) as url:
        mine = source(url)
        assert "the newest scrape is 45 s old" in (await reading(mine)).why
        await mine.close()


async def test_prompts_of_unknown_length_are_not_of_no_length():
    async with answering(Told(requests_started_total=3).query) as url:
        mine = source(url)
        found = await reading(mine)
        assert found.traffic is None
        assert "how long their prompts are is not known" in found.why
        await mine.close()


def test_what_can_not_be_is_said_before_the_start(tmp_path):
    with pytest.raises(ConfigError, match="the router's metrics are of one model"):
        source("http://x", ("a", "b"), throughput_metrics_source="router")
    with pytest.raises(ConfigError, match=r"planner\.prometheus\.token_file .* can't be read"):
        source("http://x", token_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"planner\.prometheus\.ca .* can't be read"):
        source("https://x", ca=str(tmp_path / "none"))


RELEASES = {
    "1.0": ("requests_total", "model_context_length", "model_kv_cache_block_size", "model_migration_limit"),
    "1.2": ("requests_total", "requests_started_total", "model_context_length", "model_kv_cache_block_size"),
    "1.4": ("requests_total", "requests_started_total", "model_context_length", "model_kv_cache_block_size"),
    "1.5": ("requests_total", "requests_started_total", "model_context_length", "model_ready"),
    "1.7": ("requests_total", "requests_started_total", "model_context_length", "model_ready"),
    "1.7, before a worker": ("requests_total", "requests_started_total"),
}
"""Series of a model beside its histograms: `requests_started_total` and `model_ready` came later than 1.0."""


class Exposed:
    """A frontend or router of Dynamo as it is scraped; between two scrapes a hundred requests come and end."""

    def __init__(self, prefix: str, series: tuple[str, ...], labels: str) -> None:
        self.prefix, self.series, self.labels = prefix, series, labels
        self.requests = 0

    async def metrics(self, _: web.Request) -> web.Response:
        self.requests += 100
        values = {name: self.requests if name.endswith("_total") else 1 for name in self.series}
        for name, each in (("input_sequence_tokens", 100), ("output_sequence_tokens", 7)):
            values |= {f"{name}_sum": each * self.requests, f"{name}_count": self.requests}
        text = "".join(f"{self.prefix}{name}{{{self.labels}}} {value}\n" for name, value in values.items())
        return web.Response(text=text)


@asynccontextmanager
async def exposed(folder: Path, frontend: Exposed) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/metrics", frontend.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = Prometheus(folder, [f"127.0.0.1:{runner.addresses[0][1]}"])
    await asyncio.to_thread(server.start)
    try:
        yield server.url
    finally:
        server.kill()
        await runner.cleanup()


@pytest.mark.parametrize("release", RELEASES)
async def test_a_frontend_of_any_release_is_read(release, tmp_path):
    frontend = Exposed("dynamo_frontend_", RELEASES[release], 'model="m",dynamo_namespace="team-a"')
    async with exposed(tmp_path, frontend) as url:
        found = await until(lambda: _counted(url, namespace="team-a"))
        assert (found.health, found.traffic.shape.isl) == ("fresh", pytest.approx(100, rel=0.3))
        assert found.traffic.at_end == ("requests_started_total" not in RELEASES[release])
        other = source(url, namespace="team-b")
        why = (await reading(other)).why
        assert 'dynamo_namespace="team-b"' in why
        await other.close()


@pytest.mark.parametrize("series", [("requests_total",), ("requests_total", "worker_registered")])
async def test_a_router_of_any_release_is_read(series, tmp_path):
    router = Exposed("dynamo_component_router_", series, 'dynamo_namespace="team_a"')
    async with exposed(tmp_path, router) as url:
        found = await until(lambda: _counted(url, throughput_metrics_source="router", namespace="team-a"))
        assert (found.health, found.traffic.at_end) == ("fresh", True)


async def _counted(url: str, **settings: Any) -> Any:
    """Return a first reading, which has the whole window, once requests are counted in it."""
    mine = source(url, **settings)
    try:
        return await _read(
            mine, lambda read: read.traffic is not None and read.traffic.arrived > 0 and read.traffic.answered > 0
        )
    finally:
        await mine.close()


async def test_a_model_of_another_name_is_said_with_the_names_there_are(tmp_path):
    frontend = Exposed("dynamo_frontend_", RELEASES["1.4"], 'model="org/other"')
    async with exposed(tmp_path, frontend) as url:
        mine = source(url)
        found = await until(lambda: _read(mine, lambda read: "no series names" in read.why))
        assert "the model m: those that are scraped name org/other" in found.why
        await mine.close()


@given(st.sampled_from(["frontend", "router"]), st.text(min_size=1, max_size=12), st.floats(0.1, 1e4))
def test_every_query_has_the_label_of_its_namespace(metrics: MetricsSource, namespace: str, window: float):
    spelt = namespace if metrics == "frontend" else namespace.replace("-", "_")
    label = spelt.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    found = queries(metrics, window, namespace)
    for query in (*found.numbers, found.alive):
        for text in (query.text, query.selector):
            filtered = f'dynamo_namespace="{label}"'
            names = re.findall(r"dynamo_(?:frontend|component_router)_\w+", text.replace(filtered, ""))
            assert len(names) == text.count(filtered) > 0, text
    assert "dynamo_namespace" not in "".join(query.text for query in queries(metrics, window, None).numbers)
