"""config and doctor: what they print, their JSON and their exit status."""

import json
import socket
from pathlib import Path

import msgspec
import pytest
import yaml

from penstock.cli.doctor_checks import local_checks
from penstock.cli.doctor_checks.local_checks import check_clock, check_disk, check_ports, check_status
from penstock.cli.shared.admin_client import AdminClient
from penstock.config.reading.load import load
from penstock.frontend.admin.admin_answers import ClusterStatus
from tests.cli.conftest import worker


@pytest.mark.parametrize("flags", [[], ["--all"]])
def test_init_prints_what_check_accepts(penstock, flags):
    text = penstock("config", "init", *flags).output
    result = penstock("config", "check", "-", input=text)
    assert result.exit_code == 0
    assert result.output == "Fine: 1 model, 1 pool, 4 engines, kv routing on 127.0.0.1:8000.\n"


def test_check_lists_problems_and_exits_2(penstock):
    result = penstock("config", "check", "-", input="router: {mode: kvv}\nnmae: x\n")
    assert result.exit_code == 2
    assert "standard input:1:16: router.mode" in result.output
    assert "did you mean name?" in result.output


def test_check_as_json(penstock, tmp_path):
    (tmp_path / "c.yaml").write_text("frontend: {port: 99999}\n")
    result = penstock("config", "check", "c.yaml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.output) == {
        "ok": False,
        "problems": [
            {
                "where": "c.yaml:1:18",
                "path": "frontend.port",
                "message": "'99999' is out of range: 0 to 65535",
                "hint": None,
            }
        ],
    }
    assert json.loads(penstock("config", "check", "--json").output) == {"ok": True, "problems": []}


def test_show_says_where_values_came_from_and_hides_secrets(penstock, tmp_path):
    (tmp_path / "c.yaml").write_text("router: {mode: random}\n")
    env = {"PENSTOCK_FRONTEND__SECURITY__API_KEYS": "hush", "PENSTOCK_LOGS__LEVEL": "debug"}
    result = penstock("config", "show", "c.yaml", "--frontend.port", "81", env=env)
    assert result.exit_code == 0
    assert "mode: random  # c.yaml:1:16" in result.output
    assert "level: debug  # environment PENSTOCK_LOGS__LEVEL" in result.output
    assert "port: 81  # flag frontend.port" in result.output
    assert "hush" not in result.output
    assert yaml.safe_load(result.output)["supervise"]["drain_timeout"] == "1m"
    found = json.loads(penstock("config", "show", "c.yaml", "--json", env=env).output)
    assert found["settings"]["router"]["mode"] == "random"
    assert found["origins"]["router.mode"] == "c.yaml:1:16"
    assert "hush" not in json.dumps(found)


def test_schema_is_json(penstock):
    found = json.loads(penstock("config", "schema").output)
    assert found["properties"]["router"] == {"$ref": "#/$defs/RouterSettings"}
    assert found["additionalProperties"] is False


def findings(result):
    return {(f["check"], f["level"]): f["text"] for f in json.loads(result.output)["findings"]}


@pytest.fixture
def quiet(monkeypatch):
    """A machine with room and free ports, whatever this one has."""
    monkeypatch.setattr(local_checks, "bind_error", lambda host, port: None)
    monkeypatch.setattr(local_checks, "DISK_WARN", 0)
    monkeypatch.setattr(local_checks, "DISK_ERROR", 0)


def test_a_healthy_machine_without_a_cluster_is_no_error(penstock, quiet, monkeypatch):
    def nobody(self, path, kind):
        raise local_checks.ClusterUnreachable("no cluster answers", hint="start one")

    monkeypatch.setattr(AdminClient, "get", nobody)
    result = penstock("doctor", "--json")
    assert result.exit_code == 0
    found = findings(result)
    assert ("python", "ok") in found
    assert ("config", "ok") in found
    assert ("cluster", "info") in found
    assert list(json.loads(result.output)) == ["ok", "errors", "warnings", "findings"]
    text = penstock("doctor")
    assert "0 errors" in text.output
    assert "-> start one" in text.output


def test_a_cluster_that_was_named_must_be_there(penstock, quiet):
    result = penstock("doctor", "--url", "http://127.0.0.1:9", "--json")
    assert result.exit_code == 1
    assert ("cluster", "error") in findings(result)


def test_a_healthy_cluster_has_no_findings(penstock, quiet, cluster):
    result = penstock("doctor", "--url", cluster.url, "--json")
    assert result.exit_code == 0
    found = findings(result)
    assert found["cluster", "ok"] == "it has no findings of its own"
    assert found["clock", "ok"] == "agrees with the cluster's"


def test_what_the_cluster_complains_of_is_passed_on(penstock, quiet, cluster):
    cluster.status["findings"] = [
        {"level": "error", "text": "the index of sim disagreed with its exact audit 2 times", "hint": "report it"},
        {"level": "warning", "text": "mode kv without an event source: main-1", "hint": "switch events on"},
    ]
    result = penstock("doctor", "--url", cluster.url, "--no-probe")
    assert result.exit_code == 1
    assert "ERROR    cluster: the index of sim disagreed" in result.output
    assert "WARNING  cluster: mode kv without an event source" in result.output
    assert "1 error, 1 warning." in result.output


def test_a_bad_config_is_an_error_for_each_problem(penstock, quiet, tmp_path):
    (tmp_path / "c.yaml").write_text("router: {mode: kvv}\nnmae: x\n")
    result = penstock("doctor", "c.yaml", "--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["errors"] == 2


def test_a_tokenizer_that_is_not_there_is_an_error_and_none_a_warning(penstock, quiet, tmp_path):
    (tmp_path / "c.yaml").write_text("models: {a: {tokenizer: ./none, pools: {p: {}}}, b: {pools: {p: {}}}}\n")
    found = findings(penstock("doctor", "c.yaml", "--json"))
    assert "models.a.tokenizer: ./none is not there" in found["tokenizer", "error"]
    assert found["tokenizer", "warning"].startswith("b without a local tokenizer")


def test_open_breakers_and_models_without_tokenizer_are_found(cluster):
    cluster.status["workers"] = [worker("main-0", breaker="open", failures=3)]
    cluster.status["models"][0]["tokenizer"] = None
    said = [f.text for f in check_status(msgspec.convert(cluster.status, ClusterStatus))]
    assert "the breaker of main-0 is open after 3 failures" in said
    assert any("without a local tokenizer" in text for text in said)


def test_a_port_that_is_taken_is_an_error_unless_the_cluster_has_it(cluster):
    port = int(cluster.url.rsplit(":", 1)[1])
    settings = load(None, [f"frontend.port={port}"]).settings
    (finding,) = check_ports(settings, False)
    assert finding.level == "error"
    assert list(check_ports(settings, True)) == []


def test_config_check_looks_at_what_a_start_takes_of_this_machine(penstock, tmp_path):
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = tmp_path / "c.yaml"
        config.write_text(
            f"frontend: {{port: {port}}}\nruns: {{dir: {tmp_path / 'file' / 'runs'}}}\n"
            "models: {m: {pools: {p: {urls: ['http://no-such-host.invalid:8000']}}}}\n"
        )
        result = penstock("config", "check", str(config), "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 2 and not answer["ok"]
    told = {problem["path"]: problem for problem in answer["problems"]}
    assert told.keys() == {"ports", "run folder", "servers"}
    assert "another server has it" in told["ports"]["hint"]
    assert "no-such-host.invalid can't be resolved" in told["servers"]["message"]


def test_config_check_leaves_the_ports_of_its_running_cluster_alone(penstock, cluster, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"frontend: {{port: {cluster.url.rsplit(':', 1)[1]}}}\nruns: {{dir: {tmp_path}}}\n")
    assert penstock("config", "check", str(config)).exit_code == 0


def test_the_disk_of_the_run_folder(tmp_path, monkeypatch):
    assert [f.level for f in check_disk(tmp_path / "runs")] == (["ok"])
    monkeypatch.setattr(local_checks, "DISK_WARN", 1 << 80)
    assert [f.level for f in check_disk(tmp_path)] == ["warning"]
    monkeypatch.setattr(local_checks, "DISK_ERROR", 1 << 80)
    assert [f.level for f in check_disk(tmp_path)] == ["error"]
    assert [f.level for f in check_disk(Path("/proc/nothing"))] == ["error"]


def test_limits_and_clocks(monkeypatch):
    monkeypatch.setattr(local_checks, "FILES_WARN", 1 << 60)
    assert [f.level for f in local_checks.check_files_limit()] in (["warning"], ["ok"])
    client = AdminClient("http://127.0.0.1:9")
    client.date = "Tue, 01 Jan 2030 00:00:00 GMT"
    assert [f.level for f in check_clock(client)] == ["warning"]
    client.date = "nonsense"
    assert [f.level for f in check_clock(client)] == ["info"]
    monkeypatch.setattr(local_checks, "CLOCK_MIN", 1 << 60)
    assert [f.level for f in check_clock(client)] == ["error"]
    monkeypatch.setattr(local_checks, "PYTHON_MIN", (99, 0))
    assert [f.level for f in local_checks.check_python()] == ["error"]
