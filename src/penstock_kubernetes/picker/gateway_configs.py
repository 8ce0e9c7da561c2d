"""Gateway configs: what nginx and HAProxy need to ask a picker, rendered for the folder of its sockets."""

import os
import socket
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock_kubernetes.picker_settings import GatewayKind

PATH_MAX = 107
"""Most bytes of a Unix socket's path."""
_LONGEST_NAME = len("/reports-frontend-99-4194304.sock")


class GatewayFolder:
    """The folder that ``picker.folder`` names, or one for the frontend's port; the same at every start."""

    def __init__(self, settings: ClusterSettings) -> None:
        folder = settings.picker.folder
        self.path = Path(folder or Path(settings.runs.dir) / f"picker-{settings.frontend.port}").absolute()

    def make(self) -> None:
        """Make the folder where it is missing.

        Raises:
            ConfigError: it can't be made, or its path is too long for a socket.
        """
        if len(os.fsencode(self.path)) + _LONGEST_NAME > PATH_MAX:
            raise ConfigError(
                f"picker.folder {self.path} is too long for the path of a socket",
                hint=f"at most {PATH_MAX - _LONGEST_NAME} bytes, such as /run/penstock",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"picker.folder {self.path} can't be made: {error.strerror}") from error

    def questions(self, index: int) -> Path:
        """Return the socket at which frontend process ``index`` is asked."""
        return self.path / f"ask-{index}.sock"

    def reports(self, of: int | str) -> Path:
        """Return the socket for reports to a frontend process: whichever has that index, or the one of that name."""
        return self.path / f"reports-{of}.sock"

    def bind(self, path: Path, kind: socket.SocketKind) -> socket.socket:
        """Bind a socket in place of one that an earlier process left; whoever may enter the folder may use it.

        Raises:
            ConfigError: it can't be bound.
        """
        bound = socket.socket(socket.AF_UNIX, kind)
        bound.setblocking(False)
        fresh = path.with_suffix(".new")
        try:
            fresh.unlink(missing_ok=True)
            bound.bind(os.fspath(fresh))
            fresh.chmod(0o666)
            fresh.replace(path)  # so that there is one at every moment
        except OSError as error:
            bound.close()
            raise ConfigError(f"the socket {path} can't be made: {error.strerror or error}") from error
        return bound

    def write(self, name: str, text: str) -> bool:
        """Write a file where its text is another one than before; return whether it was."""
        path = self.path / name
        if path.is_file() and path.read_text() == text:
            return False
        fresh = self.path / f".{name}.{os.getpid()}"
        fresh.write_text(text)
        fresh.replace(path)
        return True


BUFFER = 256 * 1024
"""Bytes of HAProxy's buffers: two of them per request that is being read, so that 2,000 such requests take 1 GiB."""
KEPT = 256
"""Idle connections to one worker that each of nginx's processes keeps."""


class GatewayOptions(NamedTuple):
    """What a gateway is to do.

    Args:
        listen: its address for clients.
        failure: what becomes of a request when no picker answers: ``open`` takes any worker in turn.
        command: the command that rendered its config.
    """

    listen: str
    failure: Literal["open", "close"]
    command: str


def rendered(kind: GatewayKind, settings: ClusterSettings, options: GatewayOptions) -> dict[str, str]:
    """Return the files of a gateway's config, by name; the one with the workers is `workers_file`'s."""
    folder = GatewayFolder(settings)
    processes = range(max(1, settings.frontend.processes))
    values = {
        "COMMAND": options.command,
        "FOLDER": str(folder.path),
        "LISTEN": options.listen,
        "TIMEOUT": f"{settings.frontend.upstream.stall_timeout:.0f}",
    }
    if kind == "nginx":
        pages = "      error_page 502 504 = @penstock_fallback;" if options.failure == "open" else ""
        logs = [f"syslog:server=unix:{folder.reports(index)},nohostname,tag=penstock" for index in processes]
        values |= {
            "ASK": "\n".join(f"    server unix:{folder.questions(index)};" for index in processes),
            "BODY_MAX": str(settings.frontend.limits.body_max),
            "REPORTS": "\n".join(
                f"    access_log {log} penstock if=$penstock_id;\n    error_log {log}_error error;" for log in logs
            ),
            "WITHOUT_PICKER": pages,
        }
        return {"nginx.conf": _filled_template("nginx.conf", values)}
    refuse = '  http-request return status 503 content-type text/plain string "no picker" hdr retry-after 1'
    refuse += " if METH_POST !{ var(txn.penstock_worker) -m found }"
    values |= {
        "ASK": "\n".join(f"  server ask{index} unix@{folder.questions(index)}" for index in processes),
        "BUFFER": str(BUFFER),
        "PICKERS": ", ".join(f'"unix@{folder.questions(index)}"' for index in processes),
        "REPORTS": "\n".join(f"  log {folder.reports(index)} len 1024 format raw local0 info" for index in processes),
        "WITHOUT_PICKER": refuse if options.failure == "close" else "",
    }
    return {name: _filled_template(name, values) for name in ("haproxy.cfg", "penstock.lua")}


def workers_file(kind: GatewayKind, urls: list[str]) -> tuple[str, str]:
    """Return name and text of the file from which a gateway reads the present workers."""
    engines = sorted({f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, urls)})
    return ("workers.conf", _nginx_workers(engines)) if kind == "nginx" else ("workers.cfg", _haproxy_workers(engines))


def _nginx_workers(engines: list[str]) -> str:
    named = {engine: f"penstock_worker_{number}" for number, engine in enumerate(engines)}
    lines = ["# The present workers, for nginx; made again whenever they change."]
    for engine, name in named.items():
        lines.append(f"upstream {name} {{ server {urlsplit(engine).netloc}; keepalive {KEPT}; }}")
    everyone = " ".join(f"server {urlsplit(engine).netloc};" for engine in engines)
    # Where there is none, nginx still wants one: the discard port refuses.
    lines.append(f"upstream penstock_workers {{ {everyone or 'server 127.0.0.1:9;'} keepalive {KEPT}; }}")
    lines.append("map $upstream_http_x_penstock_engine $penstock_worker {\n  volatile;")
    for engine, name in named.items():
        lines.append(f'  "{engine}" {urlsplit(engine).scheme}://{name};')
    lines.append("  default $upstream_http_x_penstock_engine;\n}\n")
    return "\n".join(lines)


def _haproxy_workers(engines: list[str]) -> str:
    lines = ["# The present workers, for HAProxy; made again whenever they change.", "backend penstock_workers"]
    lines += [
        "  balance roundrobin",
        "  http-request set-dst var(txn.penstock_host) if { var(txn.penstock_host) -m found }",
        "  http-request set-dst-port var(txn.penstock_port) if { var(txn.penstock_port) -m found }",
        "  use-server %[var(txn.penstock_worker)] if { var(txn.penstock_worker) -m found }",
        "  server penstock_other 0.0.0.0:0 weight 0",
    ]
    for engine in engines:
        parts = urlsplit(engine)
        tls = " ssl verify required ca-file @system-ca" if parts.scheme == "https" else ""
        lines.append(f"  server {parts.netloc.replace('[', '').replace(']', '')} {parts.netloc}{tls}")
    return "\n".join(lines) + "\n"


def _filled_template(name: str, values: dict[str, str]) -> str:
    text = files("penstock_kubernetes.picker").joinpath("configs", name).read_text()
    for key, value in values.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return "\n".join(line for line in text.splitlines() if line) + "\n"
