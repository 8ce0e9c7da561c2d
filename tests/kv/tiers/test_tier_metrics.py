"""Are the metrics of tier processes on a frontend's page, each with its engine's name, and silent ones left out?"""

import re
import socket
import threading
from pathlib import Path

import pytest

from penstock.adapters.engines.dialects.kv_transfer_protocol import TIER_SOCKET
from penstock.frontend.admin import metrics_route
from penstock_kv.tiers.tier_admin_protocol import AskMetrics, MetricsPage
from penstock_kv.tiers.tier_frames import frame
from tests.frontend.stand import stand
from tests.kv.tiers.conftest import Start
from tests.kv.tiers.plain_engine import PlainEngine, block_hashes

pytestmark = pytest.mark.live


def answers(path: Path, page: bytes) -> socket.socket:
    """Listen, and send the same to each who asks."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            link.sendall(page)

    threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.mark.parametrize(
    "page",
    [
        b"\xff\xff\xff\xff",
        b"\x02\x00\x00\x00\xc1\xc1",
        frame(AskMetrics()),
        frame(MetricsPage(text="penstock_kv_tier_x 1")),
        frame(MetricsPage(text="# HELP penstock_kv_tier_x x\n# TYPE penstock_kv_tier_x counter\npenstock_kv_tier_x a")),
        frame(MetricsPage(text="# HELP penstock_requests_total x\n# TYPE penstock_requests_total counter")),
    ],
)
async def test_what_is_no_page_of_tiers_is_left_out(page: bytes, tmp_path: Path) -> None:
    listener = answers(tmp_path / "odd", page)
    async with stand(1) as s:
        s.join(s.engines[0], labels={TIER_SOCKET: str(tmp_path / "odd")}, epoch=2)
        reply = await s.http.get("/metrics")
        text = await reply.text()
    listener.close()
    assert reply.status == 200 and "penstock_kv_tier" not in text
    assert text.count("# TYPE penstock_requests_total") <= 1


async def test_a_frontends_page_has_the_metrics_of_the_tier_processes_on_its_machine(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_route, "TIMEOUT", 0.2)
    tiers = start(32, 64)
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "silent"))
    silent.listen()
    with PlainEngine(tiers.socket) as engine:
        engine.store(block_hashes(4))
        engine.until(lambda: len(engine.stored.get("disk", ())) == 4)
        async with stand(3) as s:
            for number, path in enumerate((tiers.socket, tmp_path / "silent", tmp_path / "of another machine")):
                s.join(s.engines[number], labels={TIER_SOCKET: str(path)}, epoch=2)
            page = await (await s.http.get("/metrics")).text()
    silent.close()
    worker = s.engines[0].name
    assert f'penstock_kv_tier_stored_total{{worker="{worker}",tier="disk"}} 4' in page
    assert f'penstock_kv_tier_open{{worker="{worker}",what="jobs"}} 0' in page
    assert set(re.findall(r'penstock_kv_tier_\w+{worker="([^"]*)"', page)) == {worker}
    assert len(re.findall("# TYPE penstock_kv_tier_stored_total", page)) == 1
