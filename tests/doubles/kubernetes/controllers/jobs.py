"""Job controller: pods that run to an end, tried again with growing pauses up to a limit."""

import time

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    deleting,
    name_of,
    seconds_of,
    timestamp,
)
from tests.doubles.kubernetes.controllers.owned_pods import active, phase, pod_of, ready, suffix, with_condition

PAUSE_S, PAUSE_LIMIT_S = 10.0, 360.0
"""Seconds before a failed pod is replaced: doubled with each failure, up to a limit."""


class JobController:
    """Runs Jobs; time passes ``speed`` times as fast for the pauses between tries."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed

    async def reconcile(self, objects: ClusterObjects) -> None:
        """Take every Job one step on."""
        for job in objects.all("Job"):
            if not deleting(job):
                await self._step(objects, job)

    async def _step(self, objects: ClusterObjects, job: JsonObject) -> None:
        spec, status, now = job["spec"], job.get("status") or {}, time.time()
        ended = [each for each in status.get("conditions") or () if each["type"] in ("Complete", "Failed")]
        if ended:
            lifetime = spec.get("ttlSecondsAfterFinished")
            if lifetime is not None and now - seconds_of(ended[0]["lastTransitionTime"]) >= lifetime / self._speed:
                await objects.delete(job, propagation="Background")
            return
        pods = objects.owned("Pod", job)
        running = [pod for pod in pods if active(pod)]
        done = sum(phase(pod) == "Succeeded" for pod in pods)
        failed = [pod for pod in pods if phase(pod) == "Failed"]
        wanted = spec.get("completions") or 1
        restarts = sum(
            each.get("restartCount", 0)
            for pod in running
            for each in pod.get("status", {}).get("containerStatuses", ())
        )
        changes: JsonObject = {"startTime": status.get("startTime") or timestamp(now)}
        limit, deadline = spec.get("backoffLimit", 6), spec.get("activeDeadlineSeconds")
        if done >= wanted:
            changes |= {"conditions": with_condition(job, "Complete", True, "CompletionsReached")}
            changes |= {"completionTime": timestamp(now)}
        elif len(failed) + restarts > limit:
            message = "Job has reached the specified backoff limit"
            changes |= {"conditions": with_condition(job, "Failed", True, "BackoffLimitExceeded", message)}
        elif deadline is not None and now - seconds_of(changes["startTime"]) >= deadline:
            message = "Job was active longer than specified deadline"
            changes |= {"conditions": with_condition(job, "Failed", True, "DeadlineExceeded", message)}
        elif not spec.get("suspend") and now >= self._next_try(failed):
            for _ in range(min(spec.get("parallelism", 1), wanted - done) - len(running)):
                await objects.create(_pod(job))
        if "conditions" in changes:
            for pod in running:
                await objects.delete(pod)
            running = []
        changes |= {"active": len(running), "ready": sum(map(ready, running))}
        changes |= {"succeeded": done, "failed": len(failed)}
        await objects.set_status(job, changes)

    def _next_try(self, failed: list[JsonObject]) -> float:
        if not failed:
            return 0.0
        latest = max(seconds_of(pod["metadata"]["creationTimestamp"]) for pod in failed)
        return latest + float(min(PAUSE_LIMIT_S, PAUSE_S * 2 ** (len(failed) - 1))) / self._speed


def _pod(job: JsonObject) -> JsonObject:
    name, uid = name_of(job)[1], job["metadata"]["uid"]
    labels = {"job-name": name, "batch.kubernetes.io/job-name": name}
    labels |= {"controller-uid": uid, "batch.kubernetes.io/controller-uid": uid}
    return pod_of(job, job["spec"]["template"], f"{name}-{suffix()}", labels)
