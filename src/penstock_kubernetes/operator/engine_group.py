"""Engine group: the pods of one engine that spreads over several hosts, as a LeaderWorkerSet of one group.

The leader runs the engine and answers requests; the others are ranks of it. LeaderWorkerSet makes them and tells them
of each other, and replaces none: the fleet does, and only the whole group, since a rank alone can't come back.
"""

import sys
from typing import TYPE_CHECKING

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.object_names import GROUP_LABEL

if TYPE_CHECKING:
    from lightkube.generic_resource import GenericNamespacedResource

SETS = "leaderworkerset.x-k8s.io"
RENDEZVOUS_PORT = 20000
"""Where the ranks of SGLang meet; vLLM has a port of its own for it."""
# What LeaderWorkerSet puts into the environment of all pods of a group.
LEADER, SIZE, RANK = "$(LWS_LEADER_ADDRESS)", "$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)"
RANKS = {
    "vllm": ("--nnodes", SIZE, "--node-rank", RANK, "--master-addr", LEADER),
    "sglang": ("--dist-init-addr", f"{LEADER}:{RENDEZVOUS_PORT}", "--nnodes", SIZE, "--node-rank", RANK),
    "sim": (),
}
"""Kind of engine -> arguments of every rank."""
WAITING = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit()); signal.pause()"
"""What a rank of a simulated engine runs: it has nothing to do, but its end is the engine's."""


def group_resource() -> "type[GenericNamespacedResource]":
    """Return the client's class for LeaderWorkerSets."""
    from lightkube.generic_resource import create_namespaced_resource

    return create_namespaced_resource(SETS, "v1", "LeaderWorkerSet", "leaderworkersets")


def check_hosts(engine: str, hosts: int, gpus: int) -> None:
    """Check that an engine can spread over hosts.

    Raises:
        ConfigError: it can't.
    """
    if engine not in RANKS:
        hint = f"engines that can: {', '.join(sorted(RANKS))}"
        raise ConfigError(f"an engine of kind {engine} can't spread over {hosts} hosts", hint=hint)
    if gpus % hosts:
        message = f"{gpus} GPUs of an engine can't be divided among {hosts} hosts"
        raise ConfigError(message, hint="gpus is the number of all hosts together")


def group_of(pod: JsonObject, engine: str, hosts: int) -> JsonObject:
    """Return a LeaderWorkerSet that runs an engine over hosts.

    Args:
        pod: the engine's, as if it were one.
    """
    metadata = pod["metadata"]
    labels = {**metadata["labels"], GROUP_LABEL: metadata["name"]}
    # A StatefulSet takes no other policy than Always; a restarted container ends the group all the same.
    body = {key: value for key, value in pod["spec"].items() if key != "restartPolicy"}
    inner = {"labels": labels, "annotations": metadata["annotations"]}
    template = {
        "size": hosts,
        "restartPolicy": "None",
        "leaderTemplate": {"metadata": inner, "spec": _with_main(body, engine, leader=True)},
        "workerTemplate": {"metadata": inner, "spec": _with_main(body, engine, leader=False)},
    }
    return {
        "apiVersion": f"{SETS}/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {"replicas": 1, "leaderWorkerTemplate": template},
    }


def _with_main(body: JsonObject, engine: str, *, leader: bool) -> JsonObject:
    main, *others = body["containers"]
    main = {**main, "args": [*main["args"], *RANKS[engine]]}
    if not leader:  # it answers no requests, so nobody could ask it whether it is ready
        main.pop("readinessProbe", None)
        if engine == "vllm":
            main["args"] = [*main["args"], "--headless"]
        if engine == "sim":
            main |= {"command": [sys.executable], "args": ["-c", WAITING]}
    return {**body, "containers": [main, *others]}
