"""Peers: an engine loads what another engine's host tier has, and only who has the cluster's secret."""

import socket
import sys
import time
from pathlib import Path

import pytest

from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import ClusterSecret
from penstock_kv.tiers.peer_tiers import HostPlaces, PeerTiers
from penstock_kv.tiers.tier_contents import TierContents
from penstock_kv.transfer.storage.host_slab import HostSlab
from tests.kv.tiers.conftest import Start, TierProcess
from tests.kv.tiers.plain_engine import PATIENCE, PlainEngine, block_hashes

pytestmark = pytest.mark.live

LISTEN = ("--peer-listen", "127.0.0.1:0")


def knows(tiers: TierProcess, peers: str) -> bool:
    return f"peers are now: {peers}\n" in tiers.log.read_text()


def wait_for(tiers: TierProcess, peers: str) -> None:
    end = time.monotonic() + PATIENCE
    while not knows(tiers, peers):
        assert time.monotonic() < end, tiers.log.read_text()
        time.sleep(0.05)


def test_blocks_come_from_a_peer_until_it_is_gone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, "a secret of this test's cluster")
    first, second = start(64, 0, *LISTEN, name="a"), start(64, 0, *LISTEN, name="b")
    hashes = block_hashes(16)
    with PlainEngine(first.socket) as one, PlainEngine(second.socket) as two:
        assert two.welcome.tiers == ["host", "peer"]
        one.store(hashes)
        wait_for(second, "a")
        wait_for(first, "b")
        assert two.ask(hashes).blocks == 16
        assert two.load(hashes, first_row=32) == [True] * 16
        assert two.right(hashes, [True] * 16, first_row=32)
        assert two.stored["host"] == set(hashes), "they are in the own host tier now"
        more = block_hashes(8, "more")
        one.store(more)
        assert two.ask(more).blocks == 8
        first.kill()
        done = two.load(more, first_row=48)
        assert done == [False] * 8 and two.right(more, done, first_row=48)
        assert two.load(hashes) == [True] * 16


def test_a_process_with_another_secret_is_no_peer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, "a secret of this test's cluster")
    first = start(64, 0, *LISTEN, name="a")
    monkeypatch.setenv(SECRET_ENV, "a secret of somebody else")
    second = start(64, 0, *LISTEN, name="b")
    hashes = block_hashes(4)
    with PlainEngine(first.socket) as one, PlainEngine(second.socket) as two:
        one.store(hashes)
        wait_for(second, "a")
        assert two.ask(hashes).blocks == 0


def test_peers_without_a_secret_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from penstock_kv.cli.cache import command

    monkeypatch.delenv(SECRET_ENV, raising=False)
    words = ["serve", "--socket", str(tmp_path / "a.sock"), "--host", "8MiB", *LISTEN]
    answer = CliRunner().invoke(command, words, standalone_mode=False)
    assert "set PENSTOCK_CLUSTER_SECRET" in str(answer.exception)


def test_peers_by_nixl_need_it_before_the_first_engine_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match="needs the package nixl"):
        PeerTiers("a", ClusterSecret("a secret of this test"), ("127.0.0.1", 0), None, {}, nixl=True)


async def test_an_address_that_is_taken_is_said_and_another_try_may_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        slab = HostSlab(4096, 8)
        peers = PeerTiers("a", ClusterSecret("a secret of this test"), ("127.0.0.1", port), tmp_path, {})
        places = HostPlaces(TierContents(), slab)
        with pytest.raises(ConfigError, match="--peer-listen"):
            await peers.open(places)
    await peers.open(places)
    assert (tmp_path / "a.peer").exists()
    await peers.close()
    await slab.close()
