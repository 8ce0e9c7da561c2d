"""Where do the vLLM tests get their environment, their models and the server that they share? Else they are skipped.

`make test-vllm` makes the first two. ``attached``, ``profiled`` and ``test_front_door`` run on one server of the whole
session, beside which ``attached`` has a second. ``adapters``, ``children`` and ``handoff`` each have servers that
Penstock starts for the whole folder. The others need flags, models or states of their own, and start what they need one
after the other. But for a while in ``handoff``, and for the three roles in ``seeing``, a test has no more than two up
at once beside the shared one: each takes 2 GB, and up to three minutes to start.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from penstock.adapters.listen_address import free_port
from tests.conftest import skip_or_fail
from tests.engine_venv import made
from tests.vllm.server import ADAPTER, PARSERS, RANK, VllmServer, events_config

HERE = Path(__file__).parent
VENV = os.environ.get("PENSTOCK_VLLM_VENV")
if not VENV:
    collect_ignore = [
        "adapters",
        "attached",
        "children",
        "handoff",
        "planned",
        "profiled",
        "seeing",
        "tiers",
        "test_front_door.py",
        "test_parsers.py",
        "test_publisher.py",
        "test_transformers.py",
        "test_weights.py",
    ]  # one skip says it for all: test_environment.py


SHARING = ("adapters", "children", "handoff")
"""Folders whose files share servers; the others' files may be run beside each other."""
SHARED = ("attached", "profiled", "test_front_door.py")
"""What runs on the server that is the session's."""
QUIET = ("attached", "planned", "profiled")
"""Folders whose tests take times, or keep both cores busy: they need the machine to themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            if item.path.parent.name in QUIET:
                item.add_marker(pytest.mark.quiet)


class OneProcessPerServer(LoadScopeScheduling):
    """Tests that share a server run in one process (xdist's own groups do nothing with pytest 9.2)."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePath(nodeid.partition("::")[0])
        if not file.is_relative_to("tests/vllm"):
            return str(file)
        part = file.parts[2]
        return "shared" if part in SHARED else part if part in SHARING else str(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return OneProcessPerServer(config, log)


@pytest.fixture(scope="session")
def venv() -> Path:
    """The environment with vLLM in it."""
    if not VENV:
        skip_or_fail("vllm", "these tests start real servers: run `make test-vllm`, which makes what they need")
    found = Path(str(VENV)).expanduser()
    if not (found / "bin" / "vllm").exists():
        skip_or_fail("vllm", f"there is no vLLM in PENSTOCK_VLLM_VENV={VENV}: `make test-vllm` puts it there")
    return found


@pytest.fixture(scope="session")
def checkpoint(venv: Path) -> Path:
    """The folder of the tiny model: made once, and again when its recipe changes."""
    return made(venv, HERE / "setup" / "checkpoint.py", "vllm-model")


@pytest.fixture(scope="session")
def shared(venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server for all tests that need no other flags: it has what each of them asks for. It may still be starting.

    It has a LoRA adapter, vLLM's render and generate routes and tool calls, and tells every pass through our plug-in.
    Who uses it leaves nothing running in it, and expects nothing of its prefix cache that it did not put there.
    """
    flags = ["--kv-events-config", events_config("kv@shared"), "--scheduling-policy", "priority"]
    flags += ["--enable-lora", "--lora-modules", f"{ADAPTER}={checkpoint / ADAPTER}", "--max-lora-rank", str(RANK)]
    flags += ["--enable-logging-iteration-details", "--enable-scale-out", *PARSERS]
    stats = f"tcp://127.0.0.1:{free_port()}"
    log = tmp_path_factory.mktemp("shared") / "vllm.log"
    server = VllmServer(venv, checkpoint, free_port(), log, flags=flags, stats=stats)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def seeing(venv: Path) -> Path:
    """The folder of the tiny model that sees."""
    return made(venv, HERE / "setup" / "vision.py", "vllm-seeing")


@pytest.fixture(scope="session")
def watching(venv: Path) -> Path:
    """The folder of the tiny model that takes videos, and of some films."""
    return made(venv, HERE / "setup" / "video_model.py", "vllm-watching")


@pytest.fixture(scope="session")
def hearing(venv: Path) -> Path:
    """The folder of the tiny model that takes sounds, and of some sounds."""
    command = [venv / "bin" / "python", "-c", "import soundfile"]
    if subprocess.run(command, capture_output=True, check=False, timeout=60).returncode:
        skip_or_fail("vllm", f"soundfile, by which vLLM reads sounds, is not in {venv}: `make test-vllm` puts it there")
    return made(venv, HERE / "setup" / "audio_model.py", "vllm-hearing")
