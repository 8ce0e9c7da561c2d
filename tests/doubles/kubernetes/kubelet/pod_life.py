"""Life of a pod on its node: init containers, containers, status, and its end."""

import asyncio
import logging
import signal
import time
from contextlib import suppress

from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.cluster_script import EVICT, NETWORK, SIGNAL
from tests.doubles.kubernetes.controllers.cluster_objects import RequestFailed, deleting, name_of, timestamp
from tests.doubles.kubernetes.controllers.owned_pods import with_condition
from tests.doubles.kubernetes.kubelet.container_life import ContainerLife
from tests.doubles.kubernetes.kubelet.pod_sandbox import PodSandbox

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds before a status is written again that the API server did not take."""


class PodLife:
    """One pod, from its assignment to the kubelet until its object is removed."""

    def __init__(self, sandbox: PodSandbox) -> None:
        spec = sandbox.pod["spec"]
        restarts = spec.get("restartPolicy") or "Always"
        self.sandbox = sandbox
        self.silent = False
        self._init = [
            ContainerLife(sandbox, each, each.get("restartPolicy") or ("Never" if restarts == "Never" else "OnFailure"))
            for each in spec.get("initContainers") or ()
        ]
        self._main = [ContainerLife(sandbox, each, restarts) for each in spec["containers"]]
        self._began = timestamp(time.time())
        self._initialized = not self._init
        self._evicted: str | None = None
        self._stopping = False
        self._signal = ""
        self._cut = False
        self._tasks: list[asyncio.Task[object]] = []

    async def start(self) -> None:
        """Start it; it goes on by itself."""
        await self.sandbox.open()
        self._tasks = [asyncio.create_task(each) for each in (self._run(), self._report())]

    @property
    def containers(self) -> list[ContainerLife]:
        """All its containers."""
        return [*self._init, *self._main]

    async def _run(self) -> None:
        for each in self._init:
            run = asyncio.create_task(each.run())
            self._tasks.append(run)
            if each.restart_policy == "Always":  # a sidecar: it goes on beside the others
                await asyncio.wait({run, asyncio.ensure_future(each.up.wait())}, return_when="FIRST_COMPLETED")
            elif await run:
                self.sandbox.report()
                return
        self._initialized = True
        self.sandbox.report()
        await asyncio.gather(*(each.run() for each in self._main))
        for each in self._init:  # sidecars end with the containers that they are beside
            await each.stop(self.sandbox.grace_s)
        self.sandbox.report()

    async def observe(self, pod: JsonObject) -> None:
        """Look at the pod's object as it is now: a deletion, or what a test wants to happen to it."""
        self.sandbox.pod = pod
        notes = pod["metadata"].get("annotations") or {}
        if (cut := notes.get(NETWORK) == "cut" or self.silent) != self._cut:
            self._cut = cut
            await self.sandbox.network.cut(self.sandbox.uid, away=cut)
        if self.silent:
            return
        if (wanted := notes.get(SIGNAL, "")) != self._signal:
            self._signal = wanted
            self._send(wanted)
        if EVICT in notes and self._evicted is None:
            self._evicted = notes[EVICT]
            await self.sandbox.event("Evicted", self._evicted, warning=True)
        if (deleting(pod) or self._evicted is not None) and not self._stopping:
            self._stopping = True
            self._tasks.append(asyncio.create_task(self._stop()))
        self.sandbox.report()

    def _send(self, wanted: str) -> None:
        """Send the signal of an annotation such as "KILL" or "engine:SEGV:2" to one container or to all."""
        *names, word = [part for part in wanted.split(":") if not part.isdigit()] or [""]
        number = getattr(signal, f"SIG{word.removeprefix('SIG')}", None)
        for each in self.containers:
            if number is not None and (not names or each.name in names):
                each.crash(number)

    async def _stop(self) -> None:
        await self.sandbox.event("Killing", f"Stopping container {', '.join(each.name for each in self._main)}")
        await asyncio.gather(*(each.stop(self.sandbox.grace_s) for each in self.containers))
        self._tasks[0].cancel()
        self.sandbox.report()
        if deleting(self.sandbox.pod):
            await self._remove()

    async def _remove(self) -> None:
        while True:
            if not self.silent:
                try:
                    await self.sandbox.objects.delete(self.sandbox.pod, grace_s=0)
                    return
                except RequestFailed as error:
                    log.info("the end of pod %s can't be reported yet: %s", name_of(self.sandbox.pod), error)
            await asyncio.sleep(RETRY_S)

    async def confirm_removal(self) -> None:
        """Remove the object of a pod that had ended before it was deleted."""
        if self._stopping and deleting(self.sandbox.pod) and self._evicted is not None:
            await self._remove()

    def lose_power(self) -> None:
        """End its processes as its node goes off; they start again once it is on."""
        self.sandbox.powered.clear()
        for each in self.containers:
            each.lose_power()

    async def end(self) -> None:
        """End everything at once."""
        for each in self.containers:
            each.signal(signal.SIGKILL)
        await cancel_all(self._tasks)
        for each in self.containers:
            with suppress(ProcessLookupError):
                await each.stop(0)
        await self.sandbox.close()

    # --- status -------------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            await self.sandbox.changed.wait()
            self.sandbox.changed.clear()
            namespace, name = name_of(self.sandbox.pod)
            pod = self.sandbox.objects.get("Pod", namespace, name)
            if pod is None or pod["metadata"]["uid"] != self.sandbox.uid or self.silent:
                continue
            try:
                await self.sandbox.objects.set_status(pod, self._status(pod))
            except RequestFailed as error:
                log.info("the status of pod %s can't be written yet: %s", name, error)
                await asyncio.sleep(RETRY_S)
                self.sandbox.report()

    def _phase(self) -> str:
        if self._evicted is not None:
            return "Failed"
        failed_init = [each for each in self._init if each.ended and not self._initialized]
        ends = [each.ended for each in self._main]
        if failed_init or (None not in ends and any(ends)):
            return "Failed"
        if None not in ends:
            return "Succeeded"
        started = any(each.running or each.restarts for each in self._main)
        return "Running" if self._initialized and (started or any(end is not None for end in ends)) else "Pending"

    def _status(self, pod: JsonObject) -> JsonObject:
        phase = self._phase()
        over = phase in ("Succeeded", "Failed")
        ready = not over and all(each.ready for each in self._main)
        unready = "" if ready else "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
        conditions = (pod.get("status") or {}).get("conditions") or ()
        passed = {each["type"] for each in conditions if each["status"] == "True"}.issuperset(gates)
        facts = {
            "PodReadyToStartContainers": (bool(self.sandbox.address), ""),
            "Initialized": (self._initialized, "" if self._initialized else "ContainersNotInitialized"),
            "Ready": (ready and passed, unready or ("" if passed else "ReadinessGatesNotReady")),
            "ContainersReady": (ready, unready),
            "PodScheduled": (True, ""),
        }
        described = {**pod, "status": {"conditions": list(conditions)}}
        for kind, (true, reason) in facts.items():
            described["status"]["conditions"] = with_condition(described, kind, true, reason)
        status: JsonObject = {
            "phase": phase,
            "conditions": described["status"]["conditions"],
            "hostIP": "127.0.0.1",
            "podIP": self.sandbox.address,
            "podIPs": [{"ip": self.sandbox.address}],
            "startTime": self._began,
            "qosClass": "Burstable",
            "containerStatuses": [each.status for each in self._main],
        }
        if self._init:
            status["initContainerStatuses"] = [each.status for each in self._init]
        if self._evicted is not None:
            status |= {"reason": "Evicted", "message": self._evicted}
        return status
