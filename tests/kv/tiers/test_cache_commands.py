"""`penstock cache` on a running tier process: what it prints, pins, drops and verifies."""

import json
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.adapters.listen_address import free_port
from penstock.inside.stats_publisher import StatsPublisher
from penstock.kernel.pass_report import PassReport
from penstock_kv.cli.cache import command
from tests.kv.tiers.conftest import Start
from tests.kv.tiers.plain_engine import PlainEngine, block_bytes, block_hashes
from tests.live.cluster import until

pytestmark = pytest.mark.live


def cache(*words: str) -> Result:
    return CliRunner().invoke(command, words, standalone_mode=False, catch_exceptions=True)


def test_the_commands_see_what_an_engine_stored(start: Start, tmp_path: Path) -> None:
    port = free_port()
    tiers = start(32, 64, "--metrics-port", str(port), "--order", "priority")
    at = ("--socket", str(tiers.socket))
    assert "no engine yet" in cache("stat", *at).output
    hashes = block_hashes(8)
    with PlainEngine(tiers.socket) as engine:
        engine.store(hashes)
        engine.until(lambda: engine.stored.get("disk") == set(hashes))
        assert engine.ask([*hashes, *block_hashes(2, "other")]).blocks == 8
        engine.load(hashes, first_row=32)

        stat = json.loads(cache("stat", "--json", *at).output)
        host, disk = stat["tiers"]
        assert (host["tier"], host["blocks"], host["capacity"]) == ("host", 8, 32)
        assert (disk["blocks"], disk["capacity"], disk["bytes_in"]) == (8, 64, 8 * engine.row_bytes)
        assert host["hits"] == 8 and sum(stat["misses"].values()) == 2
        assert stat["leaks"] == [] and stat["engines"] == ["w0"]
        assert "Hit rate 80.0 % of the blocks asked for" in cache("stat", *at).output

        listed = json.loads(cache("ls", "--tier", "disk", "--limit", "3", "--json", *at).output)
        assert listed["total"] == 8 and len(listed["blocks"]) == 3
        newest = listed["blocks"][0]
        assert bytes.fromhex(newest["hash"]) == hashes[-1] and newest["tokens"] == 16
        assert newest["tiers"] == ["host", "disk"]
        assert "8 in all" in cache("ls", *at).output

        pinned = cache("pin", newest["key"][:16], "--for", "1h", *at)
        assert "1 of 1 blocks are in the tiers, and are pinned for 60 min" in pinned.output
        assert json.loads(cache("stat", "--json", *at).output)["tiers"][0]["pinned"] == 1
        for first in range(0, 64, 4):  # the rest is evicted
            engine.store(block_hashes(64, "more")[first : first + 4])
        engine.until(lambda: len(engine.removed.get("host", ())) >= 7)
        assert hashes[-1] not in engine.removed["host"]
        assert "no longer pinned" in cache("pin", newest["key"], "--for", "0s", *at).output
        assert "0 blocks have a key" in str(cache("pin", "ffff", "--for", "1h", *at).exception)

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        assert 'penstock_kv_tier_hits_total{tier="host"} 8' in text
        assert 'penstock_kv_tier_misses_total{reason="absent"} 2' in text
        assert 'penstock_kv_tier_capacity_blocks{tier="disk"} 64' in text
        assert f'penstock_kv_tier_bytes_total{{source="host",target="engine"}} {8 * engine.row_bytes}' in text
        assert 'penstock_kv_tier_moved_blocks_total{source="host",target="disk",outcome="ok"}' in text
        assert 'penstock_kv_tier_ignored_hints_total{tier="host"} 0' in text

        assert "Dropped from host:" in cache("clear", "--tier", "host", *at).output
        assert json.loads(cache("stat", "--json", *at).output)["tiers"][0]["blocks"] == 0
        assert "there is no tier 'object' here" in str(cache("clear", "--tier", "object", *at).exception)


def test_verify_finds_a_flipped_byte_and_drops_the_block(start: Start, tmp_path: Path) -> None:
    tiers = start(32, 64)
    at = ("--socket", str(tiers.socket))
    hashes = block_hashes(8)
    with PlainEngine(tiers.socket) as engine:
        engine.store(hashes)
        engine.until(lambda: engine.stored.get("disk") == set(hashes))
        good = cache("verify", "--rate", "1GB/s", *at)
        assert "host: 8 ok" in good.output and "disk: 8 ok" in good.output and good.return_value == 0
        slab = next((tmp_path / "disk").glob("*.slab"))
        raw = slab.read_bytes()
        place = raw.index(block_bytes(hashes[5]))
        with slab.open("r+b") as file:
            file.seek(place)
            file.write(bytes((raw[place] ^ 1,)))
        bad = cache("verify", "--tier", "disk", "--rate", "1GB/s", *at)
        assert "disk: 1 corrupt, 7 ok" in bad.output and bad.return_value == 1
        cache("clear", "--tier", "host", *at)
        done = engine.load(hashes, first_row=32)
        assert not done[5] and engine.right(hashes, done, first_row=32)


def test_nobody_to_ask_is_said(tmp_path: Path) -> None:
    assert "no tier process answers" in str(cache("stat", "--socket", str(tmp_path / "none")).exception)
    assert "say which blocks" in str(cache("pin", "--for", "1h", "--socket", str(tmp_path / "none")).exception)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--settings", '{"host": 1000, "order": "segmented"}'], "order: 'segmented' takes one of lru, priority"),
        (["--settings", '{"host":'], "--settings: is not JSON"),
        (["--host", "1GiB", "--order", "lineage"], "'lineage' is not one of 'lru', 'priority'"),
    ],
)
def test_settings_of_tiers_that_are_wrong_are_named_with_what_they_take(
    given: list[str], says: str, tmp_path: Path
) -> None:
    assert says in str(cache("serve", "--socket", str(tmp_path / "kv.sock"), *given).exception)


def test_loads_are_judged_by_the_speed_that_the_engine_s_passes_show(start: Start) -> None:
    """The plug-in for statistics publishes passes; the tier process hears them where the engine's hello says."""
    tiers = start(32)
    at = ("--socket", str(tiers.socket))
    publisher = StatsPublisher(f"tcp://127.0.0.1:{free_port()}")

    def one_pass(seconds_per_token: float) -> None:
        tokens, number = 1000, publisher.next_number()
        wall = tokens * seconds_per_token
        report = PassReport(
            rank=0, number=number, wall=wall, prefill_requests=1, prefill_tokens=tokens, decode_seqs=0, decode_tokens=0
        )
        publisher.publish(report)

    try:
        hashes = block_hashes(16)
        with PlainEngine(tiers.socket, stats=publisher.endpoint) as engine:
            engine.store(hashes)
            answer = engine.ask(hashes)
            assert answer.blocks == 16
            assert answer.costs is not None and answer.costs.compute == 0 < answer.costs.host_token
            assert "speed unknown, so all that is there is loaded" in cache("stat", *at).output

            def heard() -> bool:
                one_pass(1e-9)
                return "1,000,000,000 tokens/s" in cache("stat", *at).output

            until(heard, 20.0)
            answer = engine.ask(hashes)
            assert answer.blocks == 0, "an engine that computes a block in 16 ns need not load it"
            assert answer.costs is not None and answer.costs.worth(256, 0) == 0, "and so the router is told"
            missed = json.loads(cache("stat", "--json", *at).output)["misses"]
            assert missed == {"recompute is cheaper": 16}
    finally:
        publisher.close()


def test_an_endpoint_that_nobody_can_listen_to_costs_only_the_speed(start: Start) -> None:
    tiers = start(32)
    with PlainEngine(tiers.socket, stats="nonsense") as engine:
        assert engine.store(block_hashes(4)) == [True] * 4
    assert "prefill speed stays unknown: 'nonsense'" in tiers.log.read_text()


def test_what_was_cleared_does_not_come_back_after_a_kill(start: Start) -> None:
    tiers = start(32, 64)
    hashes, later = block_hashes(8), block_hashes(4, "later")
    with PlainEngine(tiers.socket) as engine:
        engine.store(hashes)
        engine.until(lambda: engine.stored.get("disk") == set(hashes))
        assert "16 blocks" in cache("clear", "--socket", str(tiers.socket)).output
        engine.store(later)
        engine.until(lambda: engine.stored.get("disk") == set(later))
        tiers.kill()
    tiers = start(32, 64)
    with PlainEngine(tiers.socket) as engine:
        assert engine.ask(later).blocks == 4 and engine.ask(hashes).blocks == 0
