"""How is each gateway started in front of the same engines? One function per gateway; what is not installed says so."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prompts import make_model

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN = 60.0
"""Seconds that a gateway may take to answer its first request."""


class Missing(Exception):
    """A gateway is not installed here; the message says what is missing."""


@dataclass
class Setting:
    """What all gateways of one run stand before."""

    folder: Path
    """Of this run; logs go there."""
    model: Path
    ports: list[int]
    """Of the engines."""

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]


@dataclass
class Gateway:
    """One that runs."""

    port: int
    pids: list[int]
    """Whose CPU and memory count."""
    others: dict[str, list[int]] = field(default_factory=dict)
    """Processes whose CPU is told apart, such as a peer's own engines."""
    keys: tuple[str, ...] = ()
    """Of its clients, where it wants any."""


@contextlib.contextmanager
def engines(count: int, folder: Path) -> Iterator[Setting]:
    """Start engines in one process, and end it afterwards."""
    setting = Setting(folder, folder / "model", [])
    make_model(setting.model)
    command = [sys.executable, str(Path(__file__).with_name("backend.py")), str(count), str(setting.model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            setting.ports = json.loads(process.stdout.readline())
            yield setting
        finally:
            process.terminate()


@contextlib.contextmanager
def running(name: str, setting: Setting) -> Iterator[Gateway]:
    """Start a gateway, wait until it answers, and end it afterwards.

    Raises:
        Missing: it is not installed.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(label: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        log = (setting.folder / f"{name}-{label}.log").open("ab")
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=setting.folder,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        started.append(process)
        return process

    try:
        yield GATEWAYS[name](setting, start)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its own group: what it started goes too
                process.wait()


Start = Callable[..., "subprocess.Popen[bytes]"]


def direct(setting: Setting, start: Start) -> Gateway:
    """No gateway: what engine and client need by themselves."""
    return Gateway(setting.ports[0], [])


def ours(setting: Setting, start: Start, *, tokenizer: bool = False, processes: int = 1, tenants: int = 0) -> Gateway:
    port = free_port()
    penstock = shutil.which("penstock") or str(Path(sys.executable).with_name("penstock"))
    command = [penstock, "attach", *setting.urls, "--model", "tiny", "--set", f"frontend.port={port}"]
    command += ["--set", f"frontend.processes={processes}", "--block-size", "64"]
    if tokenizer:
        command += ["--tokenizer", str(setting.model)]
    keys = tuple(f"key-of-tenant-{number}" for number in range(tenants))
    for number, key in enumerate(keys):
        command += ["--set", f'tenants.t{number}={{keys: ["{key}"]}}']
    process = start("penstock", command, PENSTOCK_STATE_DIR=str(setting.folder / "state"))
    wait_for(port, process, *keys[:1])
    return Gateway(port, family(process.pid), keys=keys)


def haproxy(setting: Setting, start: Start) -> Gateway:
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if found is None:
        raise Missing("haproxy is not installed (Debian's package of that name)")
    port = free_port()
    servers = "\n".join(f"  server e{i} 127.0.0.1:{p}" for i, p in enumerate(setting.ports))
    config = setting.folder / "haproxy.cfg"
    config.write_text(
        f"""global
  maxconn 16000
  no strict-limits
  nbthread 1
defaults
  mode http
  option http-keep-alive
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 120s
  timeout server 120s
  timeout http-keep-alive 120s
frontend in
  bind 127.0.0.1:{port}
  default_backend engines
backend engines
  balance roundrobin
{servers}
"""
    )
    process = start("haproxy", [found, "-W", "-f", str(config)])
    wait_for(port, process)
    return Gateway(port, family(process.pid))


def sglang_router(setting: Setting, start: Start) -> Gateway:
    return launched("router", [peer("sglang-router", "python"), "-m", "sglang_router.launch_router"], setting, start)


def smg(setting: Setting, start: Start) -> Gateway:
    """The living successor of sglang-router, with the same options."""
    return launched("router", [peer("smg", "smg"), "launch"], setting, start)


def launched(label: str, command: list[str], setting: Setting, start: Start) -> Gateway:
    """Start sglang-router or its successor: over plain HTTP, by the prefixes that it has sent where."""
    port, metrics = free_port(), free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *setting.urls, "--policy", "cache_aware", "--model-path", str(setting.model)]
    command += ["--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1", "--log-level", "error"]
    process = start(label, command)
    wait_for(port, process)
    return Gateway(port, family(process.pid))


def vllm_router(setting: Setting, start: Start) -> Gateway:
    port, metrics = free_port(), free_port()
    command = [peer("vllm-router", "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *setting.urls, "--policy", "cache_aware"]
    command += ["--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1", "--log-level", "error"]
    process = start("router", command)
    wait_for(port, process)
    return Gateway(port, family(process.pid))


def dynamo(setting: Setting, start: Start) -> Gateway:
    """Its frontend with its own mocker as the engines: it does not speak HTTP to engines."""
    python = peer("router", "python")
    if not list(Path(python).parents[1].glob("lib/python*/site-packages/dynamo")):
        raise Missing("there is no dynamo in the peers' environment 'router'")
    port = free_port()
    store = setting.folder / f"dynamo-{port}"
    store.mkdir()
    environment = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }
    engines = [python, "-m", "dynamo.mocker", "--model-path", str(setting.model), "--model-name", "tiny"]
    engines += ["--num-workers", str(len(setting.ports)), "--block-size", "64", "--speedup-ratio", "1000000"]
    engines += ["--num-gpu-blocks-override", "16384", "--max-num-seqs", "1024", "--max-num-batched-tokens", "65536"]
    mocker = start("mocker", engines, **environment)
    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    frontend += ["--router-mode", "kv", "--kv-cache-block-size", "64"]
    process = start("frontend", frontend, **environment)
    wait_for(port, process)
    return Gateway(port, family(process.pid), {"mocker": family(mocker.pid)})


GATEWAYS: dict[str, Callable[[Setting, Start], Gateway]] = {
    "direct": direct,
    "haproxy": haproxy,
    "sglang-router": sglang_router,
    "smg": smg,
    "vllm-router": vllm_router,
    "dynamo": dynamo,
    "ours": ours,
    "ours-full": lambda setting, start: ours(setting, start, tokenizer=True),
    "ours-two": lambda setting, start: ours(setting, start, processes=2),
    "ours-tenants": lambda setting, start: ours(setting, start, tenants=4),
}


def peer(environment: str, program: str) -> str:
    """Return a program of one of the peers' environments."""
    folder = os.environ.get("PEERS")
    if not folder:
        raise Missing("PEERS does not name the folder with the peers' environments")
    path = Path(folder).expanduser() / environment / "bin" / program
    if not path.exists():
        raise Missing(f"{path} does not exist")
    return str(path)


def family(pid: int) -> list[int]:
    """Return a process and all that it started."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def wait_for(port: int, process: "subprocess.Popen[bytes]", key: str = "none") -> None:
    """Wait until a chat is answered with 200."""
    body = b'{"model":"tiny","messages":[{"role":"user","content":"hello"}],"max_tokens":2}'
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data=body, headers=headers)
    until = time.monotonic() + READY_WITHIN
    said = "nothing"
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"a gateway ended with status {process.returncode}: {process.args}")
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                if answer.status == 200 and re.search(rb'"choices"', answer.read()):
                    return
        except (OSError, urllib.error.URLError) as error:
            said = str(error)
        time.sleep(0.2)
    raise SystemExit(f"a gateway did not answer within {READY_WITHIN:g} s ({said}): {process.args}")
