"""What a pod says about its servers."""

from typing import Any

import pytest

pytest.importorskip("lightkube")

from lightkube.resources.core_v1 import Pod

from penstock_kubernetes.api.pod_servers import servers_of


def pod(
    *, ready: bool = True, ip: str | None = "10.0.0.7", deleted: bool = False, ports: Any = (), **notes: str
) -> Any:
    metadata = {
        "name": "vllm-0",
        "uid": "u1",
        "annotations": {f"penstock.io/{k.replace('_', '-')}": v for k, v in notes.items()},
    }
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    container = {"name": "c", "ports": [{"name": n, "containerPort": p} for n, p in ports]}
    return Pod.from_dict(
        {"metadata": metadata, "spec": {"containers": [container]}, "status": {"podIP": ip, "conditions": conditions}}
    )


@pytest.mark.parametrize(
    ("ports", "notes", "urls"),
    [
        ([("metrics", 9000), ("http", 8000)], {}, ["http://10.0.0.7:8000"]),
        ([("api", 9000), ("other", 8000)], {}, ["http://10.0.0.7:9000"]),
        ([("http", 8000)], {"port": "8100"}, ["http://10.0.0.7:8100"]),
        ([], {"port": "8100,8101"}, ["http://10.0.0.7:8100", "http://10.0.0.7:8101"]),
        ([], {}, []),
    ],
)
def test_the_port_is_annotated_or_named_http_or_the_first(ports: Any, notes: dict[str, str], urls: list[str]) -> None:
    assert [server.url for server in servers_of(pod(ports=ports, **notes))] == urls


def test_a_server_takes_requests_while_its_pod_is_ready_and_nobody_deletes_it() -> None:
    def ready(**state: Any) -> list[bool]:
        return [server.ready for server in servers_of(pod(port="80", **state))]

    assert ready() == [True]
    assert ready(ready=False) == [False]
    assert ready(deleted=True) == [False]
    assert ready(ip=None) == []


def test_annotations_say_where_events_and_statistics_come_from() -> None:
    (server,) = servers_of(pod(port="80", kv_events="5557,tcp://*:5558", kv_replay="tcp://0.0.0.0:6000", stats="7000"))
    assert server.card == {
        "events": ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"),
        "replay": ("tcp://10.0.0.7:6000",),
        "stats": "tcp://10.0.0.7:7000",
        "ranks": 2,
    }


def test_each_target_port_of_an_inference_pool_is_a_server_with_the_endpoints_of_its_rank() -> None:
    servers = servers_of(pod(kv_events="5557", stats="7000,7005"), ports=(8000, 8001))
    assert [server.url for server in servers] == ["http://10.0.0.7:8000", "http://10.0.0.7:8001"]
    assert [server.card["events"] for server in servers] == [("tcp://10.0.0.7:5557",), ("tcp://10.0.0.7:5558",)]
    assert [server.card["stats"] for server in servers] == ["tcp://10.0.0.7:7000", "tcp://10.0.0.7:7005"]
    assert len({server.id for server in servers}) == 2


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    (server,) = servers_of(pod(ip="fd00::7", port="80", kv_events="5557"))
    assert (server.url, server.card["events"]) == ("http://[fd00::7]:80", ("tcp://[fd00::7]:5557",))
