"""Does the doctor find out where our view of a cache and the engine's own account disagree?"""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from penstock.cli.doctor_checks import cache_probe
from penstock.cli.doctor_checks.cache_probe import engine_metrics, probe
from penstock.cli.doctor_checks.finding import Finding
from penstock.cli.doctor_checks.local_checks import metrics_reader
from penstock.cli.shared.admin_client import AdminClient
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.pool_access_settings import PoolAccessSettings
from penstock.frontend.admin.admin_answers import ClusterStatus
from tests.cli.conftest import FakeCluster, worker


class EngineMetrics(BaseHTTPRequestHandler):
    """An engine's /metrics: its hits grow by ``hits`` each time it is read."""

    block_size = 64
    hits = 192.0
    total = 0.0
    events = "tcp://127.0.0.1:1"

    key = ""

    def do_GET(self) -> None:
        kind = type(self)
        if kind.key and self.headers["authorization"] != f"Bearer {kind.key}":
            self.send_error(401)
            return
        if self.path == "/kv_event_sources":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"0": {"endpoint": kind.events}}).encode())
            return
        text = (
            f'vllm:cache_config_info{{block_size="{kind.block_size}"}} 1.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {kind.total}\n'
        )
        kind.total += kind.hits
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Any]:
    kind = type("Engine", (EngineMetrics,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    kind.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    yield kind
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_probe, "PATIENCE", 0.2)


def said(cluster: FakeCluster, *, unknown: bool = False, **row: Any) -> list[Finding]:
    cluster.status["workers"] = [worker("main-0", engine="vllm", **row)]
    client = AdminClient(cluster.url)
    return list(
        probe(client, client, client.get("/admin/status", ClusterStatus), unknown=unknown, metrics=engine_metrics)
    )


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def test_three_accounts_that_agree_are_fine(cluster: FakeCluster, engine: Any) -> None:
    finding = only(said(cluster, url=engine.url))
    assert finding.level == "ok"
    assert finding.text == "main-0: predicted 192 cached tokens, it had 192, and its counter grew by 192"
    assert cluster.probed.pins == ["main-0", "main-0"] and len(cluster.probed.seen) == 1


def test_an_engine_whose_metrics_are_out_of_reach_is_compared_all_the_same(cluster: FakeCluster) -> None:
    assert only(said(cluster)).text == "main-0: predicted 192 cached tokens, it had 192"


def test_a_full_hit_computes_its_last_block_again(cluster: FakeCluster, engine: Any) -> None:
    cluster.probed.predicted, cluster.probed.cached = 256, 192
    finding = only(said(cluster, url=engine.url))
    assert finding.level == "ok" and "computes the last 64 again" in finding.text


def test_a_wrong_prediction_is_an_error_with_both_numbers(cluster: FakeCluster, engine: Any) -> None:
    cluster.probed.cached = 64
    finding = only(said(cluster, url=engine.url))
    assert finding.level == "error" and "we predicted 192 cached tokens" in finding.text and "had 64" in finding.text
    assert finding.hint is not None


def test_an_answer_and_a_counter_that_disagree_are_told(cluster: FakeCluster, engine: Any) -> None:
    engine.hits = 64.0
    finding = only(said(cluster, url=engine.url))
    assert finding.level == "warning" and "its counter grew by 64" in finding.text
    engine.hits = 500.0  # somebody else asks it too
    assert only(said(cluster, url=engine.url)).level == "ok"


def test_an_engine_that_does_not_tell_can_not_be_checked(cluster: FakeCluster) -> None:
    cluster.probed.cached = None
    finding = only(said(cluster))
    assert finding.level == "info" and "--enable-prompt-tokens-details" in (finding.hint or "")


def test_no_event_source_and_a_silent_one_are_different_things(cluster: FakeCluster) -> None:
    finding = only(said(cluster, kv_events=None))
    assert finding.level == "warning" and "announces no KV events" in finding.text
    cluster.probed.grows = 0
    levels = {(finding.level, finding.text.split(",")[0]) for finding in said(cluster)}
    assert ("error", "main-0 computed a new prompt") in levels


def test_an_event_socket_that_connects_is_recognised(cluster: FakeCluster, engine: Any) -> None:
    cluster.probed.grows = 0
    (silent,) = (finding for finding in said(cluster, url=engine.url) if "computed a new prompt" in finding.text)
    assert "nobody listens at tcp://127.0.0.1:1" in (silent.hint or "")
    assert "--events '@tcp://127.0.0.1:1'" in (silent.hint or "")
    engine.events = engine.url.replace("http", "tcp")
    (silent,) = (finding for finding in said(cluster, url=engine.url) if "computed a new prompt" in finding.text)
    assert "is its topic" in (silent.hint or "")
    engine.events = "nonsense"
    (silent,) = (finding for finding in said(cluster, url=engine.url) if "computed a new prompt" in finding.text)
    assert "docs/guides/engines.md" in (silent.hint or "")


def test_a_guess_is_no_knowledge(cluster: FakeCluster) -> None:
    cluster.probed.index = "approximate"
    finding = only(said(cluster))
    assert finding.level == "warning" and "approximate index" in finding.text


def test_tokenizers_and_block_sizes_that_differ_are_errors(cluster: FakeCluster, engine: Any) -> None:
    cluster.probed.counted = 250
    engine.block_size = 16
    texts = [finding.text for finding in said(cluster, url=engine.url) if finding.level == "error"]
    assert texts == [
        "main-0 has blocks of 16 tokens, and we take them for 64",
        "main-0 counts 256 tokens where we count 250: the tokenizers differ",
    ]
    asked = len(cluster.probed.pins)
    cluster.status["models"][0]["tokenizer"] = None
    finding = only(said(cluster, url=engine.url))
    assert finding.level == "info" and "without a tokenizer" in finding.text and len(cluster.probed.pins) == asked


def test_a_prompt_that_is_too_long_is_halved(cluster: FakeCluster) -> None:
    cluster.probed.longest = 700
    assert only(said(cluster)).level == "ok"
    assert len(cluster.probed.pins) == 4  # two refused, then the same one twice
    cluster.probed.longest = 1
    finding = only(said(cluster))
    assert finding.level == "error" and "could not be probed" in finding.text


def test_who_can_not_or_must_not_be_asked_is_left_alone(cluster: FakeCluster) -> None:
    finding = only(said(cluster, why_not="is draining"))
    assert finding.level == "info" and "it is draining" in finding.text
    cluster.status["workers"] = [worker("main-0", engine="openai")]
    client = AdminClient(cluster.url)
    status = client.get("/admin/status", ClusterStatus)
    assert only(list(probe(client, client, status, unknown=False, metrics=engine_metrics))).level == "info"
    assert cluster.probed.pins == []
    assert only(list(probe(client, client, status, unknown=True, metrics=engine_metrics))).level == "ok"


def test_a_pin_that_is_not_kept_is_an_error(cluster: FakeCluster) -> None:
    cluster.probed.moves_to = "main-9"
    finding = only(said(cluster))
    assert finding.level == "error" and "main-9 answered" in finding.text


def test_the_command_probes_unless_told_otherwise(penstock: Any, cluster: FakeCluster) -> None:
    found = json.loads(penstock("doctor", "--url", cluster.url, "--json").output)["findings"]
    assert [f["level"] for f in found if f["check"] == "cache"] == ["ok", "warning"]
    asked = len(cluster.probed.pins)
    found = json.loads(penstock("doctor", "--url", cluster.url, "--no-probe", "--json").output)["findings"]
    assert not [f for f in found if f["check"] == "cache"]
    assert len(cluster.probed.pins) == asked


def test_an_attached_engine_behind_a_key_shows_its_metrics_to_the_doctor(engine: Any, tmp_path: Path) -> None:
    engine.key = "secret"
    key_file = tmp_path / "key"
    key_file.write_text("secret")
    pool = PoolSettings(engine="vllm", urls=(engine.url,), access=PoolAccessSettings(api_key_file=str(key_file)))
    settings = ClusterSettings(models={"m": ModelSettings(pools={"main": pool})})
    assert metrics_reader(None)(engine.url) is None
    assert "vllm:cache_config_info" in (metrics_reader(settings)(engine.url) or "")
    key_file.unlink()  # another check names the file
    assert metrics_reader(settings)(engine.url) is None
