"""Are the metrics of tier processes on a frontend's page, each with its engine's name, and silent ones left out?"""

import re
import socket
from pathlib import Path

import pytest

from penstock.adapters.engines.dialects.kv_transfer_protocol import TIER_SOCKET
from penstock.frontend.admin import metrics_route
from tests.frontend.stand import stand
from tests.runtime.kv_tiers.conftest import Start
from tests.runtime.kv_tiers.plain_engine import PlainEngine, block_hashes

pytestmark = pytest.mark.live


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
