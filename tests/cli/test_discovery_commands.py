"""``penstock forward`` as a process between two planes, and what the doctor says of an etcd and a NATS."""

import signal
import subprocess
import sys

from penstock.adapters.planes.zmq_forwarder import ForwardedPlane
from penstock.cli.doctor_checks.discovery_checks import check_discovery
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.discovery_settings import DiscoverySettings, EtcdSettings, NatsSettings
from penstock.kernel.secret import ClusterSecret
from penstock.testing.plane_contract import LAST, heard, until_last
from tests import server_fixtures
from tests.servers import free_ports

etcd, nats = server_fixtures.etcd, server_fixtures.nats
TEXT = "the secret of the forward tests"


async def test_forward_carries_events_until_it_is_told_to_end() -> None:
    ends = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    flags = ["--discovery.forwarder", ",".join(ends)]
    words = [sys.executable, "-m", "penstock", "forward", *flags, "--cluster_secret", TEXT]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    planes = [ForwardedPlane(name, *ends, secret=ClusterSecret(TEXT)) for name in ("a", "b")]
    try:
        assert process.stdout is not None
        assert f"Forwarding {ends[0]} to {ends[1]}, with the cluster's secret." in process.stdout.readline()
        messages = planes[1].subscribe("t")
        await heard(messages, (planes[0], "t"))
        await planes[0].publish("t", LAST)
        assert (await until_last(messages))[-1].publisher == "a"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        for plane in planes:
            await plane.close()
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_doctor_asks_only_what_the_config_uses() -> None:
    assert check_discovery(ClusterSettings()) == []


def test_the_doctor_says_that_etcd_and_nats_answer(etcd, nats) -> None:
    servers = NatsSettings(urls=(nats.url,))
    for plane, kv_events in (("nats", "direct"), ("zmq", "jetstream")):
        settings = DiscoverySettings(
            store="etcd", etcd=EtcdSettings(urls=(etcd.url,)), plane=plane, kv_events=kv_events, nats=servers
        )
        found = check_discovery(ClusterSettings(discovery=settings))
        assert [(finding.check, finding.level) for finding in found] == [("etcd", "ok"), ("nats", "ok")]


def test_the_doctor_says_what_can_not_be_reached_and_where_to_look(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("penstock.adapters.nats_link.TIMEOUT", 0.2)
    away = free_ports(2)
    settings = DiscoverySettings(
        store="etcd",
        etcd=EtcdSettings(urls=(f"http://127.0.0.1:{away[0]}",)),
        plane="nats",
        nats=NatsSettings(urls=(f"nats://127.0.0.1:{away[1]}",)),
    )
    found = check_discovery(ClusterSettings(discovery=settings))
    assert [finding.level for finding in found] == ["error", "error"]
    assert "can't be reached" in found[0].text
    assert found[1].hint == "see discovery.nats"
    broken = DiscoverySettings(
        store="etcd", etcd=EtcdSettings(urls=("https://127.0.0.1:1",), ca=str(tmp_path / "none"))
    )
    (said,) = check_discovery(ClusterSettings(discovery=broken))
    assert said.level == "error"
    assert "no TLS client" in said.text
