"""What do planes with somebody in the middle promise beyond the contract? Credentials, losses, forgeries."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.adapters.planes.nats_plane import NatsPlane
from penstock.adapters.planes.zmq_forwarder import ForwardedPlane, Forwarder
from penstock.config.settings.discovery_settings import NatsSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import ClusterSecret
from penstock.testing.plane_contract import LAST, PATIENCE, heard, until_last
from tests.contracts.test_etcd_store import certificate
from tests.nats_keys import credentials, nkey
from tests.servers import Nats

OURS, THEIRS = ClusterSecret("the secret of the plane tests"), ClusterSecret("another secret of the tests")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


def given(folder: Path, kind: str) -> tuple[str, dict[str, object], str]:
    """Return a server's config, the settings that it lets in, and the scheme of its URL."""
    if kind == "user":
        return 'authorization: {user: u, password: "p w"}\n', {"user": "u", "password": "p w"}, "nats"
    if kind == "token":
        return "authorization: {token: t0ken}\n", {"token": "t0ken"}, "nats"
    if kind == "nkey":
        config, file = nkey(folder)
        return config, {"nkey": str(file)}, "nats"
    if kind == "creds":
        config, file = credentials(folder)
        return config, {"creds": str(file)}, "nats"
    cert, key = certificate(folder)
    return f'tls: {{cert_file: "{cert}", key_file: "{key}"}}\n', {"ca": str(cert)}, "tls"


@pytest.mark.parametrize("kind", ["user", "token", "nkey", "creds", "tls"])
async def test_nats_lets_in_who_has_the_credentials_and_nobody_else(tmp_path, kind):
    config, fields, scheme = given(tmp_path, kind)
    server = Nats(tmp_path / "nats", config=config, scheme=scheme)
    server.start()
    a, b = (NatsPlane(name, NatsSettings(urls=(server.url,), **fields)) for name in ("a", "b"))
    stranger = NatsPlane("stranger", NatsSettings(urls=(server.url,)))
    try:
        messages = b.subscribe("t")
        await heard(messages, (a, "t"))
        await stranger.publish("t", b"")
        await until(lambda: stranger.problem is not None)
        assert a.problem is None
    finally:
        for plane in (a, b, stranger):
            await plane.close()
        server.kill()


def test_credentials_that_need_a_package_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="nkeys"):
        NatsPlane("a", NatsSettings(nkey="x"))
    with pytest.raises(ConfigError, match="no TLS client"):
        NatsPlane("a", NatsSettings(ca=str(tmp_path / "none.pem")))


async def test_a_broker_that_dies_costs_messages_and_shows_it_as_a_gap(tmp_path):
    server = Nats(tmp_path)
    server.start()
    a, b = (NatsPlane(name, NatsSettings(urls=(server.url,))) for name in ("a", "b"))
    try:
        messages = b.subscribe("t")
        await heard(messages, (a, "t"))
        await a.publish("t", LAST)
        before = (await until_last(messages))[-1]
        server.kill()
        await until(lambda: a.problem is not None and b.problem is not None)
        lost = a.lost
        for _ in range(10):
            await a.publish("t", b"nobody hears this")  # and nobody waits
        assert a.lost == lost + 10
        server.start()
        await heard(messages, (a, "t"))
        await a.publish("t", LAST)
        after = (await until_last(messages))[-1]
        assert after.sequence > before.sequence + 10
        assert (a.problem, b.problem) == (None, None)
    finally:
        for plane in (a, b):
            await plane.close()
        server.kill()


async def test_nats_messages_without_our_signature_are_left_out(nats, tmp_path):
    settings = NatsSettings(urls=(nats.url,))
    ours, also = (NatsPlane(name, settings, prefix=tmp_path.name, secret=OURS) for name in ("a", "b"))
    theirs = NatsPlane("a", settings, prefix=tmp_path.name, secret=THEIRS)
    plain = NatsPlane("a", settings, prefix=tmp_path.name)
    try:
        messages = also.subscribe("t")
        await heard(messages, (ours, "t"))
        deaf = theirs.subscribe("t")
        for foreign in (theirs, plain):
            while also.foreign == 0:
                await foreign.publish("t", b"forged")
                await asyncio.sleep(0.01)
            also.foreign = 0
        await ours.publish("t", LAST)
        assert all(message.payload != b"forged" for message in await until_last(messages))
        await until(lambda: theirs.foreign > 0)
        await theirs.close()
        assert [message async for message in deaf] == []
    finally:
        for plane in (ours, also, theirs, plain):
            await plane.close()


async def test_a_nats_message_of_a_newer_release_is_refused(nats, tmp_path):
    settings = NatsSettings(urls=(nats.url,))
    old, new = (NatsPlane(name, settings, prefix=tmp_path.name) for name in ("old", "new"))
    try:
        messages = old.subscribe("t")
        await heard(messages, (new, "t"))
        for raw in (b"\x02" + bytes(10), b"", b"\x01" + bytes(8) + b"\xff\xff"):
            await new._link.publish(new._subject("t"), raw)
        await until(lambda: (old.newer, old.malformed) == (1, 2))
    finally:
        for plane in (old, new):
            await plane.close()


@pytest.mark.parametrize("secret", [None, OURS], ids=["plain", "curve"])
async def test_a_forwarder_that_dies_costs_messages_and_shows_it_as_a_gap(secret):
    first = Forwarder("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", secret=secret).start()
    ends = first.publish_endpoint, first.subscribe_endpoint
    a, b = (ForwardedPlane(name, *ends, secret=secret) for name in ("a", "b"))
    try:
        messages = b.subscribe("t")
        await heard(messages, (a, "t"))
        await a.publish("t", LAST)
        before = (await until_last(messages))[-1]
        first.close()
        for _ in range(10):
            await a.publish("t", b"meanwhile")
        second = Forwarder(*ends, secret=secret).start()
        try:
            await heard(messages, (a, "t"))
            await a.publish("t", LAST)
            assert (await until_last(messages))[-1].sequence > before.sequence
        finally:
            for plane in (a, b):
                await plane.close()
            second.close()
    finally:
        for plane in (a, b):
            await plane.close()


async def test_a_forwarder_with_another_secret_carries_nothing():
    forwarder = Forwarder("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", secret=THEIRS).start()
    plane = ForwardedPlane("a", forwarder.publish_endpoint, forwarder.subscribe_endpoint, secret=OURS)
    try:
        plane.subscribe("t")
        await until(lambda: bool(plane.others.failing))
        assert plane.strangers.failed == 0
    finally:
        await plane.close()
        forwarder.close()


def test_a_forwarder_says_which_endpoint_it_can_not_bind():
    with pytest.raises(ConfigError, match=r"tcp://192\.0\.2\.1:1 can't be bound"):
        Forwarder("tcp://192.0.2.1:1", "tcp://127.0.0.1:0")
