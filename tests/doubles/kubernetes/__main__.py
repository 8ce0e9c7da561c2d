"""Runs the doubles as a process: the first line on stdout is JSON that says where the API server is."""

import argparse
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from penstock.adapters.process_life import report_ready, stop_event

try:
    from tests.doubles.kubernetes.api.api_server import ApiServer
    from tests.doubles.kubernetes.api.object_writes import SERVICES
    from tests.doubles.kubernetes.cluster_double import ClusterDouble
    from tests.doubles.kubernetes.cluster_script import ClusterScript
    from tests.doubles.kubernetes.kubelet.pod_network import PodNetwork
except ModuleNotFoundError as error:
    raise SystemExit(f"the doubles of Kubernetes need {str(error.name).partition('.')[0]}: make dev") from error


async def run(folder: Path, port: int, script: ClusterScript | None) -> None:
    """Serve until SIGTERM or SIGINT; with a script, run the controllers and the kubelet too."""
    stopped = stop_event()
    async with AsyncExitStack() as stack:
        network = None if script is None else await stack.enter_async_context(PodNetwork())
        services = SERVICES if network is None else network.services
        server = await stack.enter_async_context(ApiServer(folder, port=port, services=services))
        if network is not None and script is not None:
            await stack.enter_async_context(ClusterDouble(server.kubeconfig, folder, network, script))
        report_ready(url=server.url, kubeconfig=str(server.kubeconfig))
        await stopped.wait()


def read_script(path: Path | None) -> ClusterScript:
    """Return the script in a JSON file; the usual one without a file."""
    return ClusterScript() if path is None else msgspec.json.decode(path.read_bytes(), type=ClusterScript)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.doubles.kubernetes", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the kubeconfig is written")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--kubelet", action="store_true", help="run controllers, and pods as processes (needs root)")
    parser.add_argument("--script", type=Path, help="JSON of a cluster's nodes, images and delays, for --kubelet")
    arguments = parser.parse_args()
    script = read_script(arguments.script) if arguments.kubelet else None
    asyncio.run(run(arguments.folder, arguments.port, script))


if __name__ == "__main__":
    main()
