"""Does every command that a running cluster prints work when it is copied, with two models and with keys?"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.live.cluster import served

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
  security: {api_keys: [key-of-a-client], admin_keys: [key-of-an-operator]}
planner: {policy: static}
"""
KEYS = {"PENSTOCK_API_KEY": "key-of-a-client", "PENSTOCK_ADMIN_KEY": "key-of-an-operator"}


def run(command: str, env: dict[str, str]) -> str:
    """Run a command line as a person would paste it into a shell; one that watches is ended by Ctrl-C."""
    watches = " top" in command
    line = f"timeout --preserve-status -s INT 5 {command}" if watches else command
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert done.returncode in ((0, 130) if watches else (0,)), f"{command}\nended with {done.returncode}:\n{said}"
    assert not watches or "second/model" in said
    return said


def printed(text: str) -> list[str]:
    """Return the command lines of a text: of a banner, or behind the words of a footer."""
    starts = re.findall(r"(?m)^ {2}((?:curl|\S*penstock) [^\n]+)$", text)
    behind = re.findall(r"(?:says: |Reason: |\s)(\S*penstock explain [^\n\]]+)\]?$", text, re.MULTILINE)
    return [*starts, *behind]


def test_what_is_printed_works_when_it_is_copied(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIG)
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
