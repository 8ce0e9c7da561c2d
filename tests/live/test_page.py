"""The page in a real headless Chromium: over a live cluster, over a simulated run, and when the server goes away."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.listen_address import free_port
from penstock.kernel.time_windows import columns_of
from penstock.router.status_rows import StepsStatus, WorkerStatus
from penstock.runtime.records.timeline_view import RecordedWorker
from tests.live.browser import CONTRAST, Page, browsed, chromium
from tests.live.cluster import Served, post, served, until
from tests.page.documents import charts, document_of, words

FAST = ["--frontend.port", "0", "--set", "models.sim.pools.main.sim.timing.speed_up=20"]
PROMISED = [*FAST, "--set", "slo.ttft=0.5", "--set", "slo.itl=0.03"]
CHARTS = ("slo", "ttft", "itl", "demand", "tokens", "load", "replicas", "cache")
DRAWN = "document.getElementById('chart-{}')?.figure.plot?.data.slice(1).flat().some(one => one != null)"


@pytest.fixture(scope="module", autouse=True)
def there_is_a_browser() -> None:
    chromium()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("cluster"), "up", *PROMISED) as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run of four minutes with a fault."""
    folder = tmp_path_factory.mktemp("simulated")
    words = ["--rate", "6", "--duration", "240", "--workers", "3", "--slo-ttft", "0.2"]
    return simulated(folder, *words, "--fault", "at=60,kind=fail,worker=main-1,restart=60")


def simulated(folder: Path, *words: str) -> Path:
    """Simulate chats; return the run's folder."""
    command = [sys.executable, "-m", "penstock", "simulate", "--workload", "chat", "--json", *words]
    subprocess.run([*command, "--out", str(folder / "runs")], check=True, capture_output=True, timeout=120)
    (found,) = (folder / "runs").iterdir()
    return found


@asynccontextmanager
async def recorded(run: Path, folder: Path, *flags: str) -> AsyncIterator[Page]:
    """Serve a run with ``penstock ui`` and open it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "ui", str(run), "--port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        async with browsed(folder, line.split()[0]) as page:
            yield page
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) in (0, -signal.SIGKILL)


async def ask_some(cluster: Served, count: int = 8) -> None:
    def stream(number: int) -> None:
        status, _, _ = cluster.chat(f"question {number % 3} " * 60, stream=True)
        assert status == 200

    for number in range(count):
        await asyncio.to_thread(stream, number)


async def painted(page: Page, chart: str, value: float, colour: str) -> float:
    """Return over which share of a chart a colour of the style stands at a value's height, left of what is written."""
    found = await page.ask(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {"
        f"const {{plot}} = document.querySelector('#chart-{chart}').figure, {{left, width}} = plot.bbox;"
        f"const at = Math.round(plot.valToPos({value}, 'y', true));"
        "const pixels = plot.ctx.getImageData(left, at - 1, width, 3).data, wide = Math.round(width);"
        "const read = wide - 110;"
        f"const probe = document.createElement('i'); probe.style.color = 'var(--{colour})';"
        "document.body.append(probe);"
        "const ink = getComputedStyle(probe).color.match(/\\d+/g).map(Number); probe.remove();"
        "let hits = 0; for (let x = 0; x < read; x++) hits += [0, 1, 2].some(row => ink.every((part, i) =>"
        " Math.abs(part - pixels[4 * (row * wide + x) + i]) < 8) && pixels[4 * (row * wide + x) + 3] > 100);"
        "done(hits / read); })))"
    )
    return float(found)


async def centre(page: Page, selector: str) -> tuple[float, float]:
    x, y = await page.ask(
        f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
        " found.scrollIntoView({block: 'center'});"
        " const box = found.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    return float(x), float(y)


# --- a live cluster ---------------------------------------------------------------------------------------------------


async def test_charts_have_data_after_traffic(cluster: Served, tmp_path: Path) -> None:
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await ask_some(cluster)
        for chart in CHARTS:
            await page.until(DRAWN.format(chart))
        await page.until(DRAWN.format("ttft"))
        text = await page.text("main")
        for word in ("in SLO", "TTFT p95", "replicas ready", "hit rate", "main-0", "main-3", "Because"):
            assert word in text, word
        assert page.complaints == []
        assert all(url.startswith((cluster.url, "about:")) for url in page.asked), page.asked


async def test_a_decision_shows_its_reason_and_every_candidate(cluster: Served, tmp_path: Path) -> None:
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await ask_some(cluster, 2)
        request = cluster.get("/admin/decisions?limit=1")[1]["decisions"][0]["request"]
        await page.until(f"document.querySelector('#decisions td button')?.innerText === '{request}'")
        record = cluster.get(f"/admin/explain/{request}")[1]["decisions"][-1]
        assert record["reason"] in await page.text("#decisions")
        await page.click(*await centre(page, "#decisions td button"))
        await page.until("document.querySelector('#explain').open")
        shown = await page.text("#explain")
        for word in (record["reason"], "Prefill", "Decode", "Queue", "Transfer", "(chosen)", request):
            assert word in shown, word
        assert await page.ask("document.querySelectorAll('#explain tbody tr').length") == len(record["candidates"]) == 4
        await page.key("Escape", 27)
        await page.until("!document.querySelector('#explain').open")


async def test_programs_are_listed_with_their_sub_agents(cluster: Served, tmp_path: Path) -> None:
    def ask(agent: str) -> None:
        headers = {"x-penstock-program-id": "build-42", "x-penstock-session-id": agent}
        body = {"model": "sim", "messages": [{"role": "user", "content": agent}], "max_tokens": 3}
        assert post(f"{cluster.url}/v1/chat/completions", body, headers)[0] == 200

    for agent in ("plan", "edit", "edit"):
        await asyncio.to_thread(ask, agent)
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await page.until("document.querySelectorAll('#programs tbody tr').length === 1")
        cells = await page.ask("[...document.querySelectorAll('#programs tbody td')].map(cell => cell.innerText)")
        assert cells[:4] == ["build-42", "2", "3", "0"] and "main-" in cells[-1]
        assert page.complaints == []


async def test_a_worker_opens_with_its_card_load_and_decisions(cluster: Served, tmp_path: Path) -> None:
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await ask_some(cluster, 4)
        busiest = max(cluster.get("/admin/status")[1]["workers"], key=lambda worker: worker["requests"])
        name = busiest["id"]
        await page.until(f"!!document.querySelector('.tile[data-id={name}]')")
        await page.click(*await centre(page, f".tile[data-id={name}]"))
        await page.until("document.querySelectorAll('#worker .chart canvas').length === 3")
        await page.until("document.querySelectorAll('#worker-decisions tbody tr').length > 0")
        shown = await page.text("#worker")
        for word in (
            name,
            busiest["url"],
            "ready",
            "KV blocks in all",
            "Tokens per KV block",
            "Requests on it",
            "KV blocks in use",
        ):
            assert word in shown, word
        workers = await page.ask(
            "[...document.querySelectorAll('#worker-decisions tbody tr td:nth-child(3)')].map(cell => cell.innerText)"
        )
        assert set(workers) == {name}
        await page.click(*await centre(page, "#worker .close"))
        await page.until("!document.querySelector('#worker').open")
        await page.until("document.querySelectorAll('#worker canvas').length === 0")
        assert page.complaints == []


async def test_hovering_shows_the_same_moment_in_every_chart(cluster: Served, tmp_path: Path) -> None:
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await page.look(1600, 1000, "light")
        await page.until(DRAWN.format("replicas"))
        x, y = await centre(page, "#chart-slo .u-over")
        await page.mouse("mouseMoved", x, y)
        shown = await page.until(
            "(() => { const plots = [...document.querySelectorAll('#charts .chart')].map(one => one.figure.plot);"
            " return plots.length === 8 && plots.every(plot => plot.cursor.left > 0) &&"
            " plots.map(plot => plot.cursor.left / plot.over.clientWidth); })()"
        )
        assert max(shown) - min(shown) < 0.01 and 0.4 < shown[0] < 0.6
        await page.click(x, y)
        await page.until("document.querySelector('#play').innerText === 'Go live'")
        await page.until("/until/.test(document.querySelector('#decisions-when').innerText)")
        await page.click(*await centre(page, "#play"))
        await page.until("document.querySelector('#play').innerText === 'Pause'")


@pytest.mark.parametrize("width", [390, 820, 1280])
async def test_every_column_of_every_table_is_in_sight(cluster: Served, tmp_path: Path, width: int) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "long " * 300}], "max_tokens": 3}
    request = f"0b6c2f0e-5d0a-4c1c-9a51-{width:012}"
    assert post(f"{cluster.url}/v1/chat/completions", body, {"x-request-id": request})[0] == 200
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await page.look(width, 1000, "light")
        await page.until(f"/{request}/.test(document.querySelector('#requests').innerText)")
        opener = f"[...document.querySelectorAll('#decisions td button')].find(one => one.innerText === '{request}')"
        await page.until(f"!!{opener}")
        await page.ask(f"{opener}.click()")
        await page.until("document.querySelectorAll('#explain tbody tr').length === 4")
        # On a card the place of a reason that there is not is left out.
        for place, columns in (
            ("#decisions", 12),
            ("#requests", 10 if width == 1280 else 9),
            ("#models", 10),
            ("#explain .panel", 13),
        ):
            shown = await page.ask(
                f"(() => {{ const panel = document.querySelector('{place}'), box = panel.getBoundingClientRect();"
                " return {cut: panel.scrollWidth - panel.clientWidth,"
                " names: [...panel.querySelector('tbody tr').children]"
                ".filter(cell => { const {left, right} = cell.getBoundingClientRect();"
                " return left >= box.left && right <= box.right + 0.5; }).map(cell => cell.dataset.name)}; })()"
            )
            assert shown["cut"] == 0 and len(shown["names"]) == columns, (place, shown)
        assert page.complaints == []


async def test_an_engine_that_is_down_has_its_row_and_reason(cluster: Served, tmp_path: Path) -> None:
    def replica() -> dict[str, Any]:
        (pool,) = cluster.get("/admin/desired")[1]["pools"]
        return next(one for one in pool["replicas"] if one["id"] == "main-1")

    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await page.until("/4 of 4 ready/.test(document.querySelector('#workers-when').innerText)")
        killed = replica()["pid"]
        os.kill(killed, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: replica()["pid"] not in (killed, None), 20)
        starting = replica()["pid"]
        os.kill(starting, signal.SIGSTOP)  # so that it stays down for as long as the page is looked at
        try:
            await page.until("/3 of 4 ready/.test(document.querySelector('#workers-when').innerText)")
            tile = "document.querySelector('.tile[data-id=main-1]')"
            await page.until(f"/starting: was killed by SIGKILL/.test({tile}.innerText)")
            await page.until("/3 of 4 ready/.test(document.querySelector('#models').innerText)")
            ready = (
                "[...document.querySelectorAll('.figure')].find(one => /replicas ready/.test(one.innerText)).innerText"
            )
            await page.until(f"/^3[^]*of 4$/.test({ready})")
            await page.ask(f"{tile}.click()")
            await page.until("/was killed by SIGKILL/.test(document.querySelector('#worker-card')?.innerText)")
            assert page.complaints == []
        finally:
            os.kill(starting, signal.SIGCONT)
        await page.until("/4 of 4 ready/.test(document.querySelector('#workers-when').innerText)", 40)


@pytest.mark.parametrize("width", [390, 1280])
async def test_what_happened_has_a_mark_on_the_time_axis_and_words(cluster: Served, tmp_path: Path, width: int) -> None:
    value = 1.5 + width / 10_000
    assert post(f"{cluster.url}/admin/set", {"values": {"router.cost.overlap_credit": value}})[0] == 200
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await page.look(width, 1000, "dark")
        words = f"router.cost.overlap_credit: [\\d.]+ -> {value}, by an operator"
        mark = f"[...document.querySelectorAll('.event')].find(one => /{words}/.test(one.ariaLabel))"
        await page.until(f"!!{mark}")
        told = f"/{words}/.test(document.querySelector('#events-told').innerText)"
        assert not await page.ask(told)
        await page.ask(f"{mark}.focus()")
        await page.until(told)
        await page.ask("document.activeElement.blur()")
        await page.until(f"!{told}")
        box = await page.ask(
            f"(() => {{ {mark}.scrollIntoView({{block: 'center'}}); const box = {mark}.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        assert 0 <= box[0] <= width
        await page.mouse("mouseMoved", *box)
        await page.until(told)
        await page.mouse("mouseMoved", 1, 1)
        await page.until(f"!{told}")
        # The charts have a line at the same moment, and the pointer there has the same words.
        figure = "document.querySelector('#chart-demand').figure"
        at = await page.ask(f"{figure}.view.events().find(one => /{words}/.test(one.text)).at")
        assert await page.ask(f"{figure}.view.range[0] < {at} && {at} < {figure}.view.range[1]")
        await page.ask(f"{figure}.view.hovered({at})")
        await page.until(told)
        assert page.complaints == []


async def test_a_crash_is_a_mark_of_its_own_colour_also_of_a_run_that_is_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    began = 1_790_000_000
    (folder / "run.json").write_text(json.dumps({"command": "up", "clock_anchor": {"wall_ns": began * 10**9}}))
    (folder / "requests.jsonl").write_text("")
    (folder / "metrics.csv").write_text("seconds,inflight,queued\n1,0,0\n60,0,0\n")
    stamp = datetime.fromtimestamp(began + 20, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    crash = {"time": stamp, "key": "crash main-1", "old": None, "new": "was killed by SIGKILL", "by": "supervisor"}
    scaled = {**crash, "key": "scale main", "old": 2, "new": 3, "by": "planner"}
    lines = [json.dumps(crash), json.dumps(scaled), '{"time": "cut']
    (folder / "changes.jsonl").write_text("\n".join(lines))
    async with recorded(folder, tmp_path) as page:
        await page.until("document.querySelectorAll('.event').length === 2")
        bad = await page.ask("[...document.querySelectorAll('.event.bad')].map(one => one.ariaLabel)")
        assert len(bad) == 1 and bad[0].endswith("main-1 was killed by SIGKILL")
        both = await page.ask("document.querySelector('#chart-replicas').figure.view.events().map(one => one.at)")
        assert both == [20, 20]
        await page.ask("document.querySelector('.event.bad').click()")
        await page.until("document.querySelector('#moment-text').innerText.startsWith('0:00:20')")
        assert page.complaints == []


async def test_the_window_that_is_being_filled_is_not_drawn(cluster: Served, tmp_path: Path) -> None:
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await ask_some(cluster, 2)
        for chart in CHARTS:
            await page.until(DRAWN.format(chart))
        ends = await page.ask(
            "[...document.querySelectorAll('#charts .chart')].map(({figure: {chart, view: {history}}}) =>"
            " history.about.now - (chart.series[0].at.at(-1) + history.width / 2))"
        )
        assert len(ends) == 8 and min(ends) >= 0, "seconds since the end of the last window of each chart"


async def test_the_last_window_of_a_run_that_is_over_is_as_long_as_the_run_went_on(
    cluster: Served, tmp_path: Path
) -> None:
    answer = {"kind": "recorded", "run": "r", "width": 5, "first": 0, "zero": None, "pools": {}, "kept": None}
    rates = """(async now => {
      const [{History}, {CHARTS, figures}] = [await import('./ui/history.js'), await import('./ui/charts.js')];
      const history = new History();
      history.take({...%s, now, columns: {arrived: [20, 20, 12]}});
      return [CHARTS.demand(history).series[0].values, figures(history, history.place(now))[3].value];
    })"""
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        rates %= json.dumps(answer)
        assert await page.ask(f"{rates}(13)") == [[4, 4, 4], "4/s"]
        assert await page.ask(f"{rates}(12)") == [[4, 4], "4/s"], "two seconds of five say too little"


async def test_a_number_is_rounded_in_a_cell_as_in_the_reason_beside_it(cluster: Served, tmp_path: Path) -> None:
    values = [n / 8 for n in range(400)] + [n / 20 for n in range(400)] + [-2.25] + [35.25, 1e6 / 7, 1234567.85, 0.0]
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        for digits in (0, 1, 2):
            shown = await page.ask(
                f"import('./ui/dom.js').then(dom => {json.dumps(values)}.map(one => dom.number(one, {digits}, true)))"
            )
            assert shown == [f"{value:,.{digits}f}" for value in values]
        await ask_some(cluster, 6)
        cells = "row => [...row.children].map(one => one.innerText)"
        rows = f"[...document.querySelectorAll('#decisions tbody tr')].map({cells})"
        found = [row for row in await page.until(f"{rows}.length > 5 && {rows}") if "; next" in row[-1]]
        assert found
        for *_, price, best, _prefill, _decode, _queue, _transfer, _prompt, _cached, because in found:
            assert f"cost {price} with" in because and because.endswith(f" at {best}")


async def test_no_field_goes_by_its_raw_name(cluster: Served, tmp_path: Path) -> None:
    worker = cluster.get("/admin/status")[1]["workers"][0]
    steps = StepsStatus(**dict.fromkeys(StepsStatus.__struct_fields__, 1) | {"source": "engine", "estimated": ["x"]})
    worker |= {"why_not": "w", "restart_reason": "r", "stats": "s", "steps": msgspec.to_builtins(steps)}
    worker |= {"kv_events": {"applied": 1, "gaps": 1, "lost": 1}, "labels": {"zone_name": "a"}}
    worker |= {"canary": {"sent": 1, "missed": 1, "verdict": "v", "wall_s": 1.0}}
    assert set(worker) == set(WorkerStatus.__struct_fields__)
    recorded = dict.fromkeys((field.encode_name for field in msgspec.structs.fields(RecordedWorker)), 1)
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        for card in (worker, recorded):
            names = await page.ask(
                f"import('./ui/words.js').then(words => words.facts({json.dumps(card)}).map(one => one[0]))"
            )
            assert [name for name in names if not name[0].isupper()] == []
        columns = await page.ask("import('./ui/words.js').then(words => Object.keys(words.COLUMNS))")
        assert set(columns) == set(columns_of([]))


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_and_has_contrast(cluster: Served, tmp_path: Path, width: int, scheme: str) -> None:
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await ask_some(cluster, 1)
        await page.look(width, 1000, scheme)
        await page.until(DRAWN.format("replicas"))
        assert await page.ask("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the window"
        assert len(await page.shot()) > 20_000
        dark = await page.ask("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 150) is (scheme == "dark")
        poor = await page.ask(CONTRAST)
        assert poor == [], "text that is hard to read"
        unnamed = await page.ask(
            "[...document.querySelectorAll('button, input, select')]"
            ".filter(one => !one.textContent && !one.labels?.length && !one.ariaLabel).map(one => one.outerHTML)"
        )
        assert unnamed == []


async def test_the_theme_can_be_chosen(cluster: Served, tmp_path: Path) -> None:
    async with browsed(tmp_path, f"{cluster.url}/ui") as page:
        await page.look(1000, 800, "dark")
        dark = await page.ask("getComputedStyle(document.body).backgroundColor")
        await page.click(*await centre(page, "#theme"))
        await page.until("document.querySelector('#theme').innerText === 'Theme: light'")
        assert await page.ask("getComputedStyle(document.body).backgroundColor") != dark


@pytest.mark.slow
async def test_several_frontends_are_one_page(tmp_path: Path) -> None:
    shared = ["--frontend.port", str(free_port()), "--frontend.processes", "2"]
    with served(tmp_path, "up", *PROMISED, *shared) as cluster:
        await ask_some(cluster, 12)

        def told() -> dict[str, Any]:
            found: dict[str, Any] = {}

            def both() -> bool:  # one that is too busy to answer another is left out for that time
                found.update(cluster.get("/admin/timeline")[1])
                return len(found["frontends"]) == 2

            until(both, 20)
            return found

        for _ in range(6):  # whichever of them is asked
            found = await asyncio.to_thread(told)
            assert sum(values(found, "arrived")) == sum(values(found, "ok")) == 12
        async with browsed(tmp_path, f"{cluster.url}/ui") as page:
            await page.until(DRAWN.format("ttft"))
            await page.until("document.querySelectorAll('#decisions tbody tr').length === 12")


# --- what is said when there is nothing to show -----------------------------------------------------------------------


@pytest.mark.slow
async def test_an_empty_cluster_and_no_request_are_said_in_words(tmp_path: Path) -> None:
    with served(tmp_path, "up", *FAST) as cluster:
        assert post(f"{cluster.url}/admin/scale", {"pools": {"main": 0}})[0] == 200
        await asyncio.to_thread(until, lambda: cluster.get("/admin/status")[1]["workers"] == [], 30)
        async with browsed(tmp_path, f"{cluster.url}/ui") as page:
            await page.until("/No request has arrived yet/.test(document.body.innerText)")
            await page.until("/No worker has joined/.test(document.body.innerText)")
            text = await page.text("main")
            assert "no worker of sim can take requests" in text and "No request has been routed yet" in text
            assert "no SLO is set" in text and "no TTFT was seen in this time" in text
            assert page.complaints == []


@pytest.mark.slow
async def test_a_restarted_frontend_shows_the_loss_and_recovers(tmp_path: Path) -> None:
    with served(tmp_path, "up", *PROMISED) as cluster:
        async with browsed(tmp_path, f"{cluster.url}/ui") as page:
            await ask_some(cluster, 4)
            await page.until(DRAWN.format("ttft"))
            before = await page.until("document.querySelectorAll('#decisions tbody tr').length >= 4 && 4")
            (pid,) = {int(name.rpartition("-")[2]) for name in cluster.get("/admin/timeline")[1]["frontends"]}
            os.kill(pid, signal.SIGSTOP)  # it neither answers nor closes: the worst way to be gone
            try:
                await page.until("!document.querySelector('#away').hidden", 30)
                said = await page.text("#away")
                assert "No answer since" in said and "shows what it had" in said
                assert await page.ask("document.querySelectorAll('#decisions tbody tr').length") == before
            finally:
                os.kill(pid, signal.SIGKILL)
            await page.until("document.querySelector('#away').hidden", 60)
            await page.until("/began at/.test(document.querySelector('#notes').innerText)")
            await page.until("document.querySelectorAll('#chart-demand .began').length === 1")
            await ask_some(cluster, 2)
            await page.until("document.querySelectorAll('#decisions tbody tr').length >= 2")


# --- a run that is over -----------------------------------------------------------------------------------------------


async def test_the_slider_plays_a_simulated_run(run: Path, tmp_path: Path) -> None:
    async with recorded(run, tmp_path) as page:
        for chart in CHARTS:
            await page.until(DRAWN.format(chart))
        assert "SLO 200 ms" in await page.text("#chart-ttft")
        # Jump: everything follows the moment.
        await page.ask("document.querySelector('#moment').focus()")
        await page.key("Home", 36)
        await page.until("document.querySelector('#moment-text').innerText.startsWith('0:00:00')")
        await page.until("document.querySelectorAll('#decisions tbody tr').length <= 1")
        await page.until("document.querySelector('#chart-slo .veil').clientWidth > 100")
        # Play, as fast as a person says.
        await page.ask("document.querySelector('#speed').focus()")
        await page.key("Home", 36)
        assert await page.text("#speed-text") == "1x"
        for _ in range(4):
            await page.key("ArrowRight", 39)
        assert await page.text("#speed-text") == "20x"
        await page.click(*await centre(page, "#play"))
        moment = "Number(document.querySelector('#moment').value)"
        first = await page.until(f"{moment} > 2 && {moment}")
        await page.until(f"{moment} > {first} + 5")
        await page.until("document.querySelectorAll('#decisions tbody tr').length > 3")
        await page.until("document.querySelector('#play').innerText === 'Pause'")
        await page.ask("document.querySelector('#speed').focus()")
        await page.key("End", 35)
        assert await page.text("#speed-text") == "1,000x"
        await page.until("document.querySelector('#play').innerText === 'Play'")  # it came to the end, and stopped
        assert await page.text("#moment-text") == "0:04:00 of 0:04:00" or "of 0:04:0" in await page.text("#moment-text")
        assert page.complaints == []


async def test_the_line_of_the_slo_is_at_its_height(run: Path, tmp_path: Path) -> None:
    async with recorded(run, tmp_path) as page:
        for chart, promised in (("ttft", 0.2), ("itl", 0.025)):
            await page.until(DRAWN.format(chart))
            for log in (False, True):
                if await page.ask("document.querySelector('#log').checked") is not log:
                    await page.click(*await centre(page, "#log"))
                scale = f"document.querySelector('#chart-{chart}').figure.plot.scales.y.distr"
                await page.until(f"{scale} === {3 if log else 1}")
                assert await painted(page, chart, promised, "bad") > 0.4
                assert await painted(page, chart, promised * 0.8, "bad") == 0


async def test_workers_and_reasons_of_a_simulated_run_follow_the_moment(run: Path, tmp_path: Path) -> None:
    async with recorded(run, tmp_path) as page:
        await page.until("document.querySelectorAll('.tile').length === 3")
        await page.ask(
            "(() => { const moment = document.querySelector('#moment'); moment.value = 90;"
            " moment.dispatchEvent(new Event('input')); })()"
        )
        await page.until(
            "!/main-1[^]*ready[^]*main-2/.test(document.querySelector('#workers').innerText) || "
            "/main-1[^]*not ready/.test(document.querySelector('#workers').innerText)"
        )
        assert "0:01:30" in await page.text("#workers-when")
        times = await page.ask(
            "[...document.querySelectorAll('#decisions tbody tr td:first-child')].map(cell => cell.innerText)"
        )
        assert times and all(time <= "0:01:30" for time in times)
        assert "cost" in await page.text("#decisions")
        await page.ask("document.querySelector('.tile[data-id=main-0]').click()")
        await page.until("document.querySelectorAll('#worker-decisions tbody tr').length > 3")
        assert "Decisions for it" in await page.text("#worker")


async def test_a_large_fleet_is_shown_by_pool_and_who_is_worth_a_look(tmp_path: Path) -> None:
    run = simulated(tmp_path, "--rate", "20", "--duration", "60", "--workers", "80")
    async with recorded(run, tmp_path) as page:
        await page.until("/80 of 80 ready/.test(document.querySelector('#workers').innerText)")
        assert await page.ask("document.querySelectorAll('.tile').length") == 1
        await page.ask("document.querySelector('.tile').click()")
        await page.until("document.querySelectorAll('.tile').length === 81")
        await page.ask("document.querySelector('.tile').click()")
        await page.until("document.querySelectorAll('.tile').length === 1")
        shown = await page.ask(
            "import('/ui/lists.js').then(lists => { const box = document.createElement('div');"
            " const of = (_, i) => ({id: `main-${i}`, state: 'ready', why_not: i === 41 ? 'is cordoned' : null});"
            " lists.workers(box, Array.from({length: 80}, of), '', () => 0);"
            " return [...box.children].map(tile => tile.dataset.id).join(', '); })"
        )
        assert shown == "pool main, main-41", "who takes no requests is shown without being asked for"


async def test_a_run_without_a_request_says_so(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("")
    async with recorded(tmp_path, tmp_path) as page:
        await page.until("/This run has no request/.test(document.body.innerText)")
        assert "This run has no decisions.jsonl" in await page.text("main")
        assert page.complaints == []


def test_the_report_of_a_live_run_shows_what_happened(tmp_path: Path) -> None:
    with served(tmp_path, "up", *FAST) as cluster:
        for number in range(12):
            assert cluster.chat(f"question {number % 3} " * 60)[0] == 200
        folder = cluster.run
    until(lambda: "Report: " in cluster.text, 10)
    report = document_of(folder / "report.html")
    assert "Time to first token" in charts(report) and "requests\n12\n12 answered" in words(report)


def values(found: dict[str, Any], name: str) -> list[Any]:
    return [value for value in found["columns"][name] if value is not None]


@pytest.mark.slow
async def test_the_folder_of_a_live_run_opens_as_the_same_page(tmp_path: Path) -> None:
    with served(tmp_path, "up", *PROMISED) as cluster:
        await ask_some(cluster, 6)
        live = cluster.get("/admin/timeline")[1]
        folder = cluster.run
        until(lambda: (folder / "metrics.csv").exists(), 20)
    async with recorded(folder, tmp_path) as page:
        await page.until(DRAWN.format("ttft"))
        told = json.loads(await page.ask("fetch('admin/timeline').then(answer => answer.text())"))
        assert sum(values(told, "arrived")) == sum(values(live, "arrived")) == 6
        assert abs(told["zero"] - live["zero"]) < 1 and told["columns"]["slo_ttft"][-1] == 0.5
        decisions = json.loads(await page.ask("fetch('admin/decisions').then(answer => answer.text())"))["decisions"]
        requests = json.loads(await page.ask("fetch('admin/requests').then(answer => answer.text())"))["requests"]
        # Decisions and requests are on one axis: each was placed between its arrival and its first token.
        placed = {one["request"]: one["at"] for one in decisions}
        assert all(one["arrived"] <= placed[one["id"]] + 1000 <= one["first"] + 2000 for one in requests)
