"""Parts of the way of nginx and HAProxy: settings that it refuses, clipped bodies, reports, rendered configs."""

import json
from pathlib import Path

import pytest

from penstock.config.reading.load import load
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock_kubernetes.picker.clipped_body import closed
from penstock_kubernetes.picker.end_report import ReportReader
from penstock_kubernetes.picker.gateway_configs import GatewayFolder, GatewayOptions, rendered, workers_file
from penstock_kubernetes.picker_settings import GatewayKind, PickerSettings


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("nginx", "router.hedge.after", "1s"),
        ("envoy", "router.hedge.after", "1s"),
        ("haproxy", "router.migration.limit", "1"),
        ("nginx", "router.track_output", "true"),
        ("haproxy", "picker.listen_port", "9100"),
        ("nginx", "picker.tls", "false"),
        ("envoy", "picker.folder", "/run/x"),
        ("nginx", "models.sim.pools.main.role", "prefill"),
    ],
)
def test_what_a_gateway_would_ignore_is_refused_by_field_with_a_fix(kind: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, [f"picker.kind={kind}", f"{key}={value}"])
    name = key.removesuffix(".limit")
    assert f"{name}: " in str(raised.value) and "leave it out" in str(raised.value)


def test_every_beginning_of_a_body_can_be_read() -> None:
    content = 'a "quoted" \\ back é \U0001f600 end'
    messages = [{"role": "system", "content": content}, {"role": "user", "content": [{"type": "text", "text": "x\ny"}]}]
    whole = {"messages": messages, "n": 1, "f": [1, 2.5, None, True], "e": {}, "stream": True}
    for ascii in (True, False):
        body = json.dumps(whole, ensure_ascii=ascii).encode()
        assert json.loads(closed(body)) == whole
        for end in range(1, len(body)):
            part = json.loads(closed(body[:end]))
            for message, full in zip(part.get("messages", []), messages, strict=False):
                cut = message.get("content", "")
                assert not isinstance(cut, str) or str(full["content"]).startswith(cut)


def test_a_report_of_nginx_tells_the_outcome_and_the_last_server() -> None:
    reader = ReportReader("nginx")
    head = b"<190>Nov 25 06:59:59 penstock: "
    report = reader.read(
        head + b"frontend-0-1|req-4|200|OK 7|0.000 : - : 0.001 : 0.250|0.0 : 0.0 : 0.001 : 1.500|a:1 : b:2"
    )
    assert report is not None
    assert (report.id, report.outcome, report.status, report.tail, report.endpoint) == (
        "req-4",
        "whole",
        200,
        1.25,
        "b:2",
    )
    error = b"<187>Nov 25 06:59:59 penstock_error: 2026/11/25 [error] 1#1: *9 "
    for text, outcome in {
        b"upstream prematurely closed connection while reading upstream": "engine",
        b"upstream prematurely closed connection while sending to client": "engine",
        b"recv() failed (104: Connection reset by peer) while sending to client": "engine",
        b"send() failed (104: Connection reset by peer) while sending to client": "whole",
        b"upstream prematurely closed connection while reading response header from upstream": "whole",
    }.items():
        assert reader.read(error + text + b', client: 127.0.0.1, upstream: "http://b:2"') is None
        report = reader.read(head + b"frontend-0-1|req-5|200|OK 9|0.1|0.2|b:2")
        assert report is not None and report.outcome == outcome, text
    report = reader.read(head + b"frontend-0-1|req-6|200|OK 9|0.1|0.2|b:2")
    assert report is not None and report.outcome == "whole", "the next one on that connection is another request"
    report = reader.read(head + b"frontend-0-1|req-7|499| 9|-|0.2|b:2")
    assert report is not None and (report.outcome, report.tail) == ("client", None)
    for bad in (b"", b"hello", head + b"a|b|c", head + b"a|b|x|OK 1|-|-|"):
        with pytest.raises(ValueError):
            reader.read(bad)


def test_a_report_of_haproxy_tells_the_outcome_and_the_server() -> None:
    reader = ReportReader("haproxy")
    endings = {b"--": "whole", b"CD": "client", b"cD": "client", b"SD": "engine", b"SC": "engine"}
    for how, outcome in endings.items():
        report = reader.read(b"penstock: frontend-0-1|req-5|200|" + how + b"|3|402|127.0.0.1:29101\n")
        assert report is not None and (report.outcome, report.tail, report.endpoint) == (
            outcome,
            0.402,
            "127.0.0.1:29101",
        )
    report = reader.read(b"penstock: frontend-0-1|req-5|-1|CC|-1|-1|-:-\n")
    assert report is not None and (report.status, report.tail) == (0, None)


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_a_config_names_a_socket_for_each_process_and_the_workers_file_each_worker_once(
    kind: GatewayKind, tmp_path: Path
) -> None:
    settings = ClusterSettings(picker=PickerSettings(kind=kind, folder=str(tmp_path)))
    texts = rendered(kind, settings, GatewayOptions("127.0.0.1:8080", "open", "x"))
    text = "".join(texts.values())
    assert "{{" not in text and f"{tmp_path}/ask-0.sock" in text and f"{tmp_path}/reports-0.sock" in text
    _, workers = workers_file(kind, ["http://[::1]:8000/v1", "http://a:1", "http://a:1", "https://b:2"])
    assert workers.count(" a:1") == {"nginx": 2, "haproxy": 2}[kind] and "[::1]:8000" in workers and "b:2" in workers


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_refused() -> None:
    settings = ClusterSettings(picker=PickerSettings(kind="nginx", folder="/tmp/" + "x" * 90))
    with pytest.raises(ConfigError, match="too long"):
        GatewayFolder(settings).make()
