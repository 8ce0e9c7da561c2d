"""Commands that a running cluster prints, and those of docs/start.md, pasted into a shell as they stand."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings
from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from penstock.config.settings.tenant_settings import JwtSettings, TenantSettings
from penstock.runtime.cluster_state.placement_sync import FrontendCard
from penstock.runtime.supervision.supervisor import next_steps
from tests.live.cluster import Served, served

pytestmark = pytest.mark.live

CONFIG = """
models:
  first:
    tokenizer: builtin:sim
    pools: {main: {replicas: 1, sim: {timing: {speed_up: 10}}}}
  second/model:
    tokenizer: builtin:sim
    pools: {main: {replicas: 1, sim: {timing: {speed_up: 10}}}}
frontend:
  port: 0
  security: {admin_keys: [key-of-an-operator]API_KEYS}
planner: {policy: static}
"""
CONFIGS = {
    "keys": CONFIG.replace("API_KEYS", ", api_keys: [key-of-a-client]"),
    "tenants": CONFIG.replace("API_KEYS", "")
    + """
tenants:
  elsewhere: {keys: [key-of-nobody-here], models: [retired]}
  acme: {keys: [key-of-a-client], models: [second/model]}
""",
}
"""Who asks for a key -> a config; each accepts the keys below."""
ROOT = Path(__file__).resolve().parents[2]
KEYS = {"PENSTOCK_API_KEY": "key-of-a-client", "PENSTOCK_ADMIN_KEY": "key-of-an-operator"}


def run(command: str, env: dict[str, str]) -> str:
    """Run a command line as a person would paste it into a shell."""
    if " top" in command:
        return watch(command, env, "second/model")
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}\nended with {done.returncode}:\n{said}"
    return said


def watch(command: str, env: dict[str, str], awaited: str) -> str:
    """Run a command that watches in a terminal until it has shown what is awaited, and end it as Ctrl-C does."""
    screen, terminal = pty.openpty()
    shown, give_up = "", time.monotonic() + 60
    wide = {**env, "COLUMNS": "200"}
    with subprocess.Popen(
        ["bash", "-c", command], env=wide, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        try:
            while awaited not in shown:
                assert time.monotonic() < give_up, f"{command}\nshows no {awaited}:\n{shown}"
                if select.select([screen], [], [], 1)[0]:
                    try:
                        shown += os.read(screen, 65536).decode(errors="replace")
                    except OSError as error:  # it has ended, and its terminal with it
                        raise AssertionError(f"{command}\nended, with shown:\n{shown}") from error
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(screen)
    return shown


def printed(text: str) -> list[str]:
    """Return the command lines of a text: of a banner, or behind the words of a footer."""
    starts = re.findall(r"(?m)^ {2}((?:curl|\S*penstock) [^\n]+)$", text)
    behind = re.findall(r"(?:says: |Reason: |\s)(\S*penstock explain [^\n\]]+)\]?$", text, re.MULTILINE)
    return [*starts, *behind]


@pytest.mark.parametrize(
    ("security", "tenants", "asked", "key"),
    [
        (SecuritySettings(), {}, "a", None),
        (SecuritySettings(api_keys=("k",)), {"t": TenantSettings(keys=("t",), models=("b",))}, "a", "api_keys"),
        (SecuritySettings(), {"t": TenantSettings(keys=("t",), models=("b",))}, "b", "a key of tenants.t"),
        (SecuritySettings(), {"t": TenantSettings(key_files=("f",), models=("sql",))}, "sql", "a key of tenants.t"),
        (SecuritySettings(), {"t": TenantSettings(keys=("t",), models=("gone",))}, "a", "a key of tenants.t"),
        (
            SecuritySettings(jwt=JwtSettings(issuer="https://login.example.com", audience="us", tenant_claim="team")),
            {"t": TenantSettings(models=("b",))},
            "b",
            "a token of https://login.example.com for us with the claim team=t",
        ),
    ],
)
def test_the_key_that_the_printed_commands_want_may_ask_their_model(
    security: SecuritySettings, tenants: dict[str, TenantSettings], asked: str, key: str | None
) -> None:
    models = {"a": ModelSettings(adapters={"sql": "/sql"}), "b": ModelSettings()}
    settings = ClusterSettings(models=models, tenants=tenants, frontend=FrontendSettings(security=security))
    card = FrontendCard(id="f", url="http://127.0.0.1:8000", admin_url="", pid=1, plane="", run="r")
    lines = next_steps(settings, card).splitlines()
    curl = next(line for line in lines if "curl" in line)
    assert f'"model": "{asked}"' in curl and ("Bearer $PENSTOCK_API_KEY" in curl) == (key is not None)
    wanted = [line for line in lines if "export PENSTOCK_API_KEY=" in line]
    assert len(wanted) == (key is not None) and all(key in line for line in wanted if key)


@pytest.mark.slow
@pytest.mark.parametrize("asks", CONFIGS)
def test_what_is_printed_works_when_it_is_copied(tmp_path: Path, asks: str) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIGS[asks])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    with served(tmp_path, "up", str(config), env=KEYS) as cluster:
        shown = printed(cluster.text)
        words = " ".join(shown)
        assert "export PENSTOCK_API_KEY=" in cluster.text and "export PENSTOCK_ADMIN_KEY=" in cluster.text
        for part in ("curl ", " chat ", " status", " top", " bench ", " explain scale"):
            assert part in words, f"the banner shows no{part}"
        footers = ""
        for command in shown:
            said = run(f"{command} --out {tmp_path}" if " bench " in command else command, {**plain, **KEYS})
            footers += said if " chat " in command else ""
        found = [command for command in printed(footers) if " explain " in command]
        assert found, footers
        for command in found:
            assert "answered in full" in run(command, {**plain, **KEYS})


def program(path: Path, *words: str) -> None:
    """Write a command that runs our Python with these words in front of its own."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n')
    path.chmod(0o755)


def newest(cluster: Served) -> str:
    return str(cluster.get("/admin/requests?limit=1")[1]["requests"][0]["id"])


@pytest.mark.slow
def test_the_page_to_start_with_works_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "start.md").read_text(), re.MULTILINE | re.DOTALL)
    install, activate, *steps, serve, attach = blocks
    assert install == "make up\n" and activate == "source .venv/bin/activate\n"  # whoever runs the tests has done it
    program(tmp_path / "bin" / "penstock", "-m", "penstock")
    program(tmp_path / "bin" / "vllm", str(Path(__file__).with_name("fake_vllm.py")))
    with served(tmp_path, "up", "--set", "frontend.port=0") as cluster:
        env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PENSTOCK_URL": cluster.url}
        said = ""
        for step in steps:
            line = step.replace("http://127.0.0.1:8000", cluster.url)
            if "REQUEST_ID" in line:
                line = line.replace("REQUEST_ID", newest(cluster))
            done = subprocess.run(
                ["bash", "-ec", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, f"{line}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
            said += done.stdout + done.stderr
        for part in (
            '"object":"chat.completion"',
            "WORKER  ROLE",
            "(4480 cached)",
            "with 70 blocks cached, the least of 4",
            "data: [DONE]",
            "1 stream of 1500 tokens",
            ", 2 attempts",
            "was killed by SIGKILL",
            "pool main of sim: 6 of 6 ready",
            "pool main of sim: 3 of 3 ready",
            "failed 0",
            "router.cost.overlap_credit",
        ):
            assert part in said, f"nothing says {part!r}:\n{said}"
        status = cluster.get("/admin/status")[1]
        assert [row["count"] for row in status["crashes"]] == [1]
        first, second, *_ = (row["url"] for row in status["workers"])
        line = attach.replace("http://gpu1:8000", first).replace("http://gpu2:8000", second)
        with served(tmp_path, *shlex.split(line)[1:], "--set", "frontend.port=0") as attached:
            assert attached.chat()[0] == 200
    line = serve.replace("~/vllm/bin/vllm", str(tmp_path / "bin" / "vllm"))
    with served(tmp_path, *shlex.split(line)[1:], "--set", "frontend.port=0") as vllm:
        assert vllm.chat(model="Qwen/Qwen3-8B")[0] == 200
