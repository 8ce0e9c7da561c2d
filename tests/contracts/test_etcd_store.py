"""What does the etcd store promise beyond the contract, against a real etcd? Lost leases, lost data, lost changes."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.stores.etcd_client import (
    Compacted,
    EtcdClient,
    EtcdCompare,
    EtcdDelete,
    EtcdLogin,
    EtcdPut,
    LeaseNotFound,
)
from penstock.adapters.stores.etcd_store import EtcdStore
from penstock.adapters.tls import client_context
from penstock.testing.store_contract import PATIENCE, TTL, alive_again, watching
from tests.cable import Cable
from tests.conftest import skip_or_fail
from tests.servers import Etcd


async def until(condition, patience: float = PATIENCE) -> None:
    async with asyncio.timeout(patience):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
async def client(etcd, tmp_path):
    found = EtcdClient([etcd.url])
    yield found
    await found.close()


# --- leases -----------------------------------------------------------------------------------------------------------


async def test_leases_that_a_gateway_has_not_read_are_asked_for_again(client, monkeypatch):
    leases = [await client.grant(30) for _ in range(250)]
    exchange = client._exchange
    read: list[int] = []

    async def partly(path, body, *, again):
        lines = body.splitlines()[: 19 if len(read) % 3 else None]
        read.append(len(lines))
        return await exchange(path, b"\n".join(lines), again=again)

    monkeypatch.setattr(client, "_exchange", partly)
    for _ in range(4):
        assert (await client.keep_alive(leases)).keys() == set(leases)
    assert max(read) <= 100 and len(read) > 12
    assert await client.keep_alive([]) == {}

    async def nothing(path, body, *, again):
        return b""

    monkeypatch.setattr(client, "_exchange", nothing)
    with pytest.raises(StoreUnavailable, match="without an answer"):
        await client.keep_alive(leases)


async def test_an_etcd_that_lost_its_disk_is_told_again_what_we_stand_for_and_drops_nobody(etcds):
    mine, other = etcds.open(), etcds.open()
    await mine.put("workers/a", b"1", ttl=TTL)
    await mine.put("workers/b", b"2", ttl=TTL)
    async with watching(other, "workers/") as watcher:
        etcds.fail()
        with pytest.raises(StoreUnavailable):
            while True:
                await watcher.step()
    etcds.server.forget()
    etcds.mend()
    # The first answer of a watch after it has everybody: one that came before would have dropped them.
    assert await alive_again(other, "workers/") == {"workers/a": b"1", "workers/b": b"2"}
    assert mine.regained == 2
    assert mine.revocations == 0


async def test_an_owner_that_was_stopped_for_longer_than_its_ttl_comes_back_by_itself(etcds):
    other = etcds.open()
    child = etcds.spawn_owner("workers/theirs", "2", TTL)
    async with watching(other, "workers/") as watcher:
        await watcher.until({"workers/theirs": b"2"})
        child.send_signal(signal.SIGSTOP)
        await watcher.until({})
        child.send_signal(signal.SIGCONT)
        await watcher.until({"workers/theirs": b"2"})


async def test_a_lease_that_is_revoked_from_outside_takes_its_key_out_at_once_and_for_good(etcds, client):
    told: list[str] = []
    mine, other = etcds.open(revoked=told.append), etcds.open()
    await mine.put("workers/a", b"1", ttl=30.0)
    await mine.put("workers/b", b"2", ttl=TTL)
    (item,) = (await client.range(f"{etcds.prefix}keys/workers/a".encode())).items
    async with watching(other, "workers/") as watcher:
        await client.revoke(item.lease)
        start = time.monotonic()
        await watcher.until({"workers/b": b"2"})
        assert time.monotonic() - start < 30.0  # no ttl has to end for it
        await until(lambda: told == ["workers/a"])
        await asyncio.sleep(TTL)  # two renewals more
        assert watcher.alive == await other.list("workers/") == {"workers/b": b"2"}
    assert (mine.revocations, mine.regained) == (1, 0)


async def test_a_renewal_that_came_too_late_because_it_was_on_its_way_for_long_is_no_revocation(etcds, monkeypatch):
    mine = etcds.open()
    await mine.put("k", b"1", ttl=TTL)
    renew = mine._client.keep_alive

    async def late(leases):
        monkeypatch.setattr(mine._client, "keep_alive", renew)
        await asyncio.sleep(2.5)  # until etcd has ended it
        return await renew(leases)

    monkeypatch.setattr(mine._client, "keep_alive", late)
    await until(lambda: mine.regained == 1)
    assert mine.revocations == 0
    assert await mine.list("") == {"k": b"1"}


async def test_whoever_says_a_revoked_key_anew_wants_it_to_stand(etcds, client):
    mine = etcds.open()
    await mine.put("k", b"1", ttl=TTL)
    (item,) = (await client.range(f"{etcds.prefix}keys/k".encode())).items
    await client.revoke(item.lease)
    await mine.put("k", b"2", ttl=TTL)
    assert await mine.list("") == {"k": b"2"}


async def test_a_key_that_another_took_over_while_we_were_away_stays_theirs(etcds):
    other = etcds.open()
    child = etcds.spawn_owner("workers/a", "old", TTL)
    async with watching(other, "workers/") as watcher:
        child.send_signal(signal.SIGSTOP)
        await watcher.until({})
        await other.put("workers/a", b"new", ttl=TTL)
        child.send_signal(signal.SIGCONT)
        await watcher.until({"workers/a": b"new"})
        await asyncio.sleep(TTL)
        assert await other.list("") == {"workers/a": b"new"}
        assert watcher.left == ["workers/a"]


async def test_each_key_has_a_lease_of_its_own(etcds, client):
    mine = etcds.open()
    for key in ("a", "b"):
        await mine.put(key, b"", ttl=TTL)
        await mine.put(key, b"again", ttl=TTL)
    leases = [item.lease for item in (await client.range(f"{etcds.prefix}keys/".encode())).items]
    assert len(set(leases)) == 2
    assert all(leases)


async def test_a_key_that_is_put_without_a_ttl_outlives_the_lease_that_it_had(etcds):
    mine, other = etcds.open(), etcds.open()
    await mine.put("k", b"1", ttl=TTL)
    await mine.put("k", b"2")
    await mine.close()
    assert await other.list("") == {"k": b"2"}


# --- watching ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def cable(etcd):
    found = await Cable("127.0.0.1", int(etcd.url.rpartition(":")[2])).start()
    yield found
    await found.close()


def through(cable: Cable, prefix: str, **more: float) -> EtcdStore:
    url = f"http://127.0.0.1:{cable.port}"
    return EtcdStore(EtcdClient([url], timeout=more.pop("timeout", 5.0)), prefix=prefix, **more)


async def test_a_watch_whose_connection_breaks_goes_on_where_it_was(etcds, cable):
    mine, far = etcds.open(), through(cable, etcds.prefix)
    try:
        await mine.put("a", b"1")
        async with watching(far, "") as watcher:
            await mine.put("b", b"2")
            await watcher.until({"a": b"1", "b": b"2"})
            cable.hold()
            await mine.put("c", b"3")
            await mine.delete("a")
            cable.cut()
            await watcher.until({"b": b"2", "c": b"3"})
            assert watcher.left == ["a"]
    finally:
        await far.close()


async def test_a_watch_that_missed_what_etcd_has_forgotten_yields_the_difference(etcds, cable, client):
    mine, far = etcds.open(), through(cable, etcds.prefix)
    try:
        for key in ("stays", "goes", "changes"):
            await mine.put(key, b"1")
        async with watching(far, "") as watcher:
            cable.hold()
            await mine.put("comes", b"2")
            await mine.delete("goes")
            await mine.put("changes", b"2")
            await client.get(b"x")
            await client._call("kv/compaction", {"revision": client.revision})
            cable.cut()
            await watcher.until({"stays": b"1", "comes": b"2", "changes": b"2"})
            assert watcher.left == ["goes"]
    finally:
        await far.close()


async def test_a_connection_that_carries_nothing_any_more_is_noticed(etcds, cable):
    mine, far = etcds.open(), through(cable, etcds.prefix, probe=0.1, timeout=0.3)
    try:
        async with watching(far, "") as watcher:
            cable.hold()
            await mine.put("a", b"1")
            await watcher.until({"a": b"1"})
    finally:
        await far.close()


async def test_a_value_that_is_copied_or_foreign_is_left_out(etcds, client, etcd, tmp_path):
    from penstock.kernel.secret import ClusterSecret

    ours = ClusterSecret("the secret of the etcd tests")
    signed = EtcdStore(EtcdClient([etcd.url]), prefix=etcds.prefix, secret=ours)
    plain = etcds.open()
    keys = f"{etcds.prefix}keys/".encode()
    try:
        await signed.put("workers/good", b"1", ttl=TTL)
        (item,) = (await client.range(keys)).items
        async with watching(signed, "workers/") as watcher:
            await client.put(keys + b"workers/copied", item.value)
            await client.put(keys + b"workers/good", item.value)  # the lease it was signed with is gone
            await plain.put("workers/unsigned", b"2", ttl=TTL)
            await client.put(keys + b"workers/noise", b"\xff\x00")
            await watcher.until({})
        assert await signed.list("") == {}
        assert signed.codec.foreign > 0
        assert signed.codec.ignored > 0
    finally:
        await signed.close()


# --- the client -------------------------------------------------------------------------------------------------------


async def test_another_endpoint_answers_for_one_that_is_away(etcd, etcds):
    client = EtcdClient(["http://127.0.0.1:1", etcd.url])
    store = EtcdStore(client, prefix=etcds.prefix)
    try:
        await store.put("k", b"1", ttl=TTL)
        async with watching(store, "") as watcher:
            assert watcher.alive == {"k": b"1"}
    finally:
        await store.close()


async def test_what_is_no_etcd_is_said_to_be_none(etcds):
    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    client = EtcdClient([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    try:
        with pytest.raises(StoreUnavailable, match="no answer of an etcd"):
            await client.get(b"k")
    finally:
        await client.close()
        server.close()


async def test_a_transaction_holds_or_changes_nothing(client, tmp_path):
    key, other = f"{tmp_path.name}/k".encode(), f"{tmp_path.name}/other".encode()
    assert await client.txn([EtcdCompare(key, None)], [EtcdPut(key, b"1")])
    assert not await client.txn([EtcdCompare(key, None)], [EtcdPut(key, b"2"), EtcdPut(other, b"2")])
    assert await client.txn([EtcdCompare(key, b"1")], [EtcdPut(key, b"2"), EtcdPut(other, b"2")])
    found = await client.get(key)
    assert found is not None
    assert found.value == b"2"
    assert found.created < found.revision
    assert await client.txn([EtcdCompare(key, b"2")], [EtcdDelete(key)])
    assert await client.get(key) is None
    assert await client.delete(other)


async def test_a_lease_that_is_no_more_is_told_apart(client, tmp_path):
    lease, gone = await client.grant(30), await client.grant(30)
    assert await client.revoke(gone)
    assert not await client.revoke(gone)
    assert await client.keep_alive([lease, gone]) == {lease: 30, gone: None}
    with pytest.raises(LeaseNotFound):
        await client.put(b"k", b"", lease=gone)


async def test_a_watch_from_before_what_etcd_knows_says_so(client, tmp_path):
    for value in (b"1", b"2"):
        await client.put(f"{tmp_path.name}/k".encode(), value)
    await client._call("kv/compaction", {"revision": client.revision})
    with pytest.raises(Compacted):
        async with aclosing(client.watch(tmp_path.name.encode(), 1)) as changes:
            async for _ in changes:
                pass


async def test_a_user_with_a_password_is_let_in_also_after_etcd_forgot_the_token(tmp_path):
    server = Etcd(tmp_path)
    server.start()
    store = None
    try:
        ctl = ["etcdctl", "--endpoints", server.url]
        if shutil.which("etcdctl") is None:
            skip_or_fail("etcd", "there is no etcdctl to switch authentication on with")
        for words in (
            "user add root:rootpw",
            "user add router:pw with spaces",
            "role add r",
            "role grant-permission r --prefix=true readwrite penstock/",
            "user grant-role router r",
            "user grant-role root root",
            "auth enable",
        ):
            argv = words.split(" ", 2) if words.startswith("user add") else words.split()
            env = {**os.environ, "ETCDCTL_API": "3"}
            await asyncio.to_thread(subprocess.run, [*ctl, *argv], check=True, capture_output=True, env=env, timeout=30)
        for login, hint in ((None, "discovery.etcd.user"), (EtcdLogin("router", "wrong"), "refuses user 'router'")):
            stranger = EtcdStore(EtcdClient([server.url], login=login))
            with pytest.raises(StoreUnavailable, match=hint):
                await stranger.put("k", b"1", ttl=TTL)
            await stranger.close()
        elsewhere = EtcdStore(EtcdClient([server.url], login=EtcdLogin("router", "pw with spaces")), prefix="other/")
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await elsewhere.list("")
        await elsewhere.close()
        store = EtcdStore(EtcdClient([server.url], login=EtcdLogin("router", "pw with spaces")), settle=0.3)
        await store.put("k", b"1", ttl=TTL)
        async with watching(store, "") as watcher:
            assert watcher.alive == {"k": b"1"}
        server.kill()  # tokens are in its memory only
        server.start()
        await store.put("k", b"2", ttl=TTL)
        assert await alive_again(store, "") == {"k": b"2"}
    finally:
        if store is not None:
            await store.close()
        server.kill()


async def test_etcd_behind_tls_is_known_by_its_certificate(tmp_path):
    cert, key = certificate(tmp_path)
    server = Etcd(tmp_path / "etcd", tls=(cert, key))
    server.start()
    trusting = EtcdClient([server.url], tls=client_context(ca=str(cert), cert=None, key=None))
    doubting = EtcdClient([server.url])
    try:
        await trusting.put(b"k", b"1")
        with pytest.raises(StoreUnavailable, match="certificate"):
            await doubting.get(b"k")
    finally:
        await trusting.close()
        await doubting.close()
        server.kill()


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 that signs itself; returns it and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        skip_or_fail("openssl", "there is no such command to make a certificate with")
    cert, key = folder / "cert.pem", folder / "key.pem"
    asked = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    words = [*asked.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([str(openssl), *words], check=True, capture_output=True)
    return cert, key
