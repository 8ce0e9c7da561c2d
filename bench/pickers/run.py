"""What does a request cost where somebody else's gateway carries it and a picker of ours chooses its engine?

usage: python bench/pickers/run.py [--gateways envoy,envoy-picker,...] [--cells REGEX] [--repeats 3] [--seconds 2]
                                   [--out FILE.json] [--docs docs/bench/pickers.md] [--tables FILE.json]

The engines, the load generator and the account of CPU are those of bench/gateway. A gateway's CPU and its picker's are
told apart: the picker counts with the supervisor that watches it. Programs are taken from the folder that
PENSTOCK_K8S_PROGRAMS names, or from the path; what is missing is left out, with the reason.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gateway"))

import run as gateway_bench  # noqa: E402
import servers  # noqa: E402
from cells import CELLS  # noqa: E402
from nginx_and_haproxy import CARRIERS, program  # noqa: E402
from servers import Gateway, Setting, Start, family, free_port, wait_for  # noqa: E402
from table import block, heading, p50  # noqa: E402

from penstock_kubernetes.picker.envoy_config import EnvoyPlan, envoy_config  # noqa: E402

SHOWN = ("unary w100 new c1", "unary w100 new c16", "stream w100 new c16", "unary w2000 new c16", "paced w100 c64")


def penstock(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *words]


def envoy(setting: Setting, start: Start, pickers: Sequence[str] = (), *, duplex: bool = False, **plan: Any) -> Gateway:
    """Envoy by itself, or before pickers; ``duplex``: bodies in the mode of the Gateway API Inference Extension."""
    port = free_port()
    engines = [f"127.0.0.1:{one}" for one in setting.ports]
    plan.setdefault("fail_open", not pickers)
    config = envoy_config(EnvoyPlan(f"127.0.0.1:{port}", pickers or ["127.0.0.1:1"], engines, **plan))
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    if duplex:
        bodies = dict.fromkeys(("request_body_mode", "response_body_mode"), "FULL_DUPLEX_STREAMED")
        manager["http_filters"][0]["typed_config"]["processing_mode"] |= bodies | {"request_trailer_mode": "SEND"}
    if not pickers:
        del manager["http_filters"][0]
    path = setting.folder / f"envoy-{port}.json"
    path.write_text(json.dumps(config))
    words = [program("envoy"), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    process = start("envoy", words)
    wait_for(port, process)
    return Gateway(port, family(process.pid))


def picked(setting: Setting, start: Start, *, processes: int = 1, tokenizer: bool = False, **plan: Any) -> Gateway:
    """Envoy before a picker with KV routing."""
    port = free_port() // 2  # below the ports that the system hands out, for the next ones are needed too
    words = ["epp", *setting.urls, "--model", "tiny", "--set", f"frontend.port={free_port()}"]
    words += ["--set", f"picker.listen_port={port}", "--set", f"frontend.processes={processes}"]
    words += ["--set", "picker.tls=false"]
    if tokenizer:
        words += ["--tokenizer", str(setting.model)]
    process = start("picker", penstock(*words), PENSTOCK_STATE_DIR=str(setting.folder / "state"))
    wait_listening(port + processes - 1, process)
    addresses = [f"127.0.0.1:{port + index}" for index in range(processes)]
    gateway = envoy(setting, start, addresses, **plan)
    pids = family(process.pid)
    return Gateway(gateway.port, [*gateway.pids, *pids], {"picker": pids})


def wait_listening(port: int, process: Any) -> None:
    """Wait until a picker listens."""
    import socket
    import time

    until = time.monotonic() + servers.READY_WITHIN
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"a picker ended with status {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("a picker does not listen")


GATEWAYS = {
    "ours": servers.GATEWAYS["ours"],
    "envoy": envoy,
    "envoy-picker": picked,
    "envoy-duplex": lambda setting, start: picked(setting, start, duplex=True),
    "envoy-unwatched": lambda setting, start: picked(setting, start, watch_answers=False),
    "envoy-two": lambda setting, start: picked(setting, start, processes=2),
    **CARRIERS,
}


def with_share(one: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Let a measurement tell the picker's part of the CPU, too."""

    def measured(name: str, gateway: Gateway, *rest: Any) -> dict[str, Any]:
        pids = gateway.others.get("picker", [])
        picker, whole = cpu(pids), cpu(gateway.pids)
        result = one(name, gateway, *rest)
        picker, whole = cpu(pids) - picker, cpu(gateway.pids) - whole
        if pids and whole:
            result["found"]["picker_cpu_ms"] = result["found"]["cpu_ms"] * picker / whole
        return result

    return measured


def cpu(pids: Sequence[int]) -> int:
    """Return the nanoseconds that processes have run, by the scheduler's account."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks)


def tables(results: dict[str, Any]) -> str:
    """Return the page's part between its markers."""
    runs = results["runs"]
    names = list(dict.fromkeys(run["gateway"] for run in runs))
    lines = heading(results)
    cells = list(dict.fromkeys(run["cell"] for run in runs))
    short = [cell for cell in cells if not cell.startswith("paced")]
    lines += block("CPU per request, gateway and picker together, ms", names, [(c, "cpu_ms") for c in short], runs)
    lines += block("The picker's part of that, ms", names, [(c, "picker_cpu_ms") for c in short], runs)
    lines += block("Median latency, ms (streams: first token)", names, [(c, p50(c)) for c in cells], runs)
    paced = [(cell, "cpu_us_per_event") for cell in cells if cell.startswith("paced")]
    lines += block("CPU per paced chunk, us", names, paced, runs)
    lines += block("Requests that failed", names, [(cell, "errors") for cell in cells], runs, zeros=False)
    return "\n".join(lines)


if __name__ == "__main__":
    servers.GATEWAYS.clear()
    servers.GATEWAYS.update(GATEWAYS)
    for cell in [cell for cell in CELLS if cell not in SHOWN]:
        del CELLS[cell]
    gateway_bench.tables = tables
    gateway_bench.one = with_share(gateway_bench.one)
    arguments = sys.argv[1:]
    if "--gateways" not in arguments:
        arguments = ["--gateways", ",".join(GATEWAYS), *arguments]
    raise SystemExit(gateway_bench.main(arguments))
