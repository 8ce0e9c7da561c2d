"""How are nginx and HAProxy started, by themselves and before a picker with KV routing?"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from servers import Gateway, Missing, Setting, Start, family, free_port, wait_for

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock_kubernetes.picker.gateway_configs import GatewayOptions, rendered, workers_file
from penstock_kubernetes.picker_settings import PickerSettings

Kind = Literal["nginx", "haproxy"]
WORDS = {
    "nginx": lambda folder: ["-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"],
    "haproxy": lambda folder: ["-db", "-f", str(folder / "haproxy.cfg"), "-f", str(folder / "workers.cfg")],
}
PLAIN = {
    "nginx": ("proxy_pass http://penstock_picker;", "proxy_pass http://penstock_workers;"),
    "haproxy": ("use_backend penstock_picker unless METH_POST", ""),
}


def program(name: str) -> str:
    folder = os.environ.get("PENSTOCK_K8S_PROGRAMS")
    found = Path(folder).expanduser() / "bin" / name if folder else None
    if found is not None and found.exists():
        return str(found)
    there = shutil.which(name)
    if there is None:
        raise Missing(f"there is no {name}; PENSTOCK_K8S_PROGRAMS names no folder with it")
    return there


def carried(kind: Kind, setting: Setting, start: Start, *, picks: bool = True) -> Gateway:
    """Start a gateway that asks a picker, or takes the engines in turn."""
    binary = program(kind)
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))  # open to a gateway's user, unlike the run's own
    folder.chmod(0o755)
    port = free_port()
    picker: list[int] = []
    settings = ClusterSettings(picker=PickerSettings(kind=kind, folder=str(folder)))
    texts = rendered(kind, settings, GatewayOptions(f"127.0.0.1:{port}", "close" if picks else "open", "bench"))
    name, text = workers_file(kind, setting.urls)
    for file, content in {**texts, name: text}.items():
        content = content.replace("worker_processes auto", "worker_processes 1")
        content = content.replace("  maxconn", "  nbthread 1\n  maxconn", 1)
        if not picks:
            content = content.replace(*PLAIN[kind])
            content = "\n".join(line for line in content.splitlines() if not needs_picker(line))
        (folder / file).write_text(content + "\n")
    if picks:
        words = ["picker", "--for", kind, *setting.urls, "--model", "tiny", "--picker.folder", str(folder)]
        words += ["--frontend.port", "0"]
        environment = {"PENSTOCK_STATE_DIR": str(setting.folder / "state")}
        process = start("picker", [sys.executable, "-m", "penstock", *words], **environment)
        wait_for_socket(folder / "ask-0.sock")
        picker = family(process.pid)
    gateway = start(kind, [binary, *WORDS[kind](folder)])
    wait_for(port, gateway)
    return Gateway(port, [*family(gateway.pid), *picker], {"picker": picker})


def needs_picker(line: str) -> bool:
    return any(word in line for word in ("syslog:", "log-format", "lua", "wait-for-body", "log /", "penstock_id)"))


def wait_for_socket(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit(f"{path} does not appear")
        time.sleep(0.05)
    time.sleep(1.0)  # and the workers' file is written


CARRIERS = {
    "nginx": lambda setting, start: carried("nginx", setting, start, picks=False),
    "nginx-picker": lambda setting, start: carried("nginx", setting, start),
    "haproxy": lambda setting, start: carried("haproxy", setting, start, picks=False),
    "haproxy-picker": lambda setting, start: carried("haproxy", setting, start),
}
