"""How do tests get a real etcd, nats-server or Prometheus? On free loopback ports, in a folder of its own."""

import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.adapters.listen_address import free_port
from tests.conftest import skip_or_fail

PATIENCE = 30.0
"""Seconds after which a server that does not answer is given up."""


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nobody has at this moment."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


class Server:
    """A process of somebody else's program.

    Args:
        name: of the program, by which a test skips where it is missing.
        answers: says whether it serves.
        before: words in front of its command line, such as those of another network namespace.
    """

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, answers: Callable[[], bool], before: Sequence[str] = ()
    ) -> None:
        self.name = name
        self._argv = [*before, *argv]
        self._log = log
        self._answers = answers
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> "Server":
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log)
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        """Return when it serves."""
        end = time.monotonic() + PATIENCE
        while not self._answers():
            assert self._process is not None and self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < end, f"{self.name} does not answer: {self._log.read_text()[-2000:]}"
            time.sleep(0.02)

    def suspend(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Etcd(Server):
    """An etcd of one member. Elections are quick, so that a lease may be as short as a second."""

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", tls: tuple[Path, Path] | None = None, before: Sequence[str] = ()
    ) -> None:
        program = shutil.which("etcd")
        if program is None:
            skip_or_fail("etcd", "there is no etcd in PATH")
            raise AssertionError("skipped")
        folder.mkdir(parents=True, exist_ok=True)
        port, peers = free_ports(2)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{host}:{port}"
        self.data = folder / "data"
        peer = f"http://127.0.0.1:{peers}"
        words = {
            "--data-dir": str(self.data),
            "--listen-client-urls": self.url,
            "--advertise-client-urls": self.url,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"default={peer}",
            "--heartbeat-interval": "10",
            "--election-timeout": "100",
            "--log-level": "error",
        }
        if tls is not None:
            words |= {"--cert-file": str(tls[0]), "--key-file": str(tls[1])}
        argv = [program, "--unsafe-no-fsync", *(word for pair in words.items() for word in pair)]
        super().__init__("etcd", argv, folder / "etcd.log", lambda: listens(host, port), before)

    def forget(self) -> None:
        """Empty its disk; it must not run."""
        shutil.rmtree(self.data)


class Nats(Server):
    """A nats-server; ``config`` is text of its configuration file."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        config: str = "",
        jetstream: bool = False,
        scheme: str = "nats",
        before: Sequence[str] = (),
    ) -> None:
        program = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
        if program is None:
            skip_or_fail("nats", "there is no nats-server in PATH")
            raise AssertionError("skipped")
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"{scheme}://{host}:{port}"
        self.data = folder / "jetstream"
        file = folder / "nats.conf"
        file.write_text(config)
        argv = [program, "--addr", host, "--port", str(port), "--config", str(file)]
        if jetstream:
            argv += ["--jetstream", "--store_dir", str(self.data)]
        super().__init__("nats-server", argv, folder / "nats.log", lambda: listens(host, port), before)


class Prometheus(Server):
    """A Prometheus that scrapes some addresses (``host:port``) every so many seconds.

    Args:
        tls: its certificate and key.
    """

    def __init__(
        self, folder: Path, targets: Sequence[str], *, every: float = 0.2, tls: tuple[Path, Path] | None = None
    ) -> None:
        program = shutil.which("prometheus")
        if program is None:
            skip_or_fail("prometheus", "there is no prometheus in PATH")
            raise AssertionError("skipped")
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        config = folder / "prometheus.yml"
        listed = ", ".join(f'"{target}"' for target in targets)
        scraped = f"{round(every * 1000)}ms"
        config.write_text(
            f"global: {{scrape_interval: {scraped}, scrape_timeout: {scraped}}}\n"
            f"scrape_configs: [{{job_name: penstock, static_configs: [{{targets: [{listed}]}}]}}]\n"
        )
        words = {
            "--config.file": str(config),
            "--storage.tsdb.path": str(folder / "data"),
            "--web.listen-address": f"127.0.0.1:{port}",
            "--log.level": "warn",
        }
        if tls is not None:
            (folder / "web.yml").write_text(f"tls_server_config: {{cert_file: {tls[0]}, key_file: {tls[1]}}}\n")
            words["--web.config.file"] = str(folder / "web.yml")
        argv = [program, *(f"{name}={value}" for name, value in words.items())]
        ready = f"{self.url}/-/ready"
        super().__init__(
            "prometheus",
            argv,
            folder / "prometheus.log",
            lambda: listens("127.0.0.1", port) if tls is not None else answers(ready),
        )


def children_of(process: int) -> list[int]:
    """Return the pids of a process's own children."""
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def listens(host: str, port: int) -> bool:
    """Say whether somebody accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def answers(url: str) -> bool:
    """Say whether a URL answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
