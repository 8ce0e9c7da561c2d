"""Request books: counts, records and refusals of requests that go to engines, whoever carries them."""

import time
from typing import Protocol

import msgspec

from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.exchange.upstream_request import UpstreamRequest, ignored_hints
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.frontend.service import Service
from penstock.kernel.errors import ClientError, OverloadedError, PenstockError
from penstock.kernel.machine import nanos
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import Prompt
from penstock.router.events import Arrived, Closed, Dispatch
from penstock.router.requests.request_close import record_of
from penstock.runtime.records.usage_table import tokens_of

UNKNOWN = "unknown"
"""Metric label of a request for an unknown model: names from clients must not become labels."""
SHADOW = "shadow"
"""Endpoint of copies of requests, in metrics and logs: a planner's queries leave their failures out by it."""


class CarriedRequest(Protocol):
    """What the books need of a request that has ended."""

    timing: TokenTiming
    job: UpstreamRequest
    resolved: ResolvedModel
    prompt: Prompt

    @property
    def speaker(self) -> Dispatch | None:
        """The attempt whose answer the client got."""
        ...


def enter_arrival(service: Service, arrived: Arrived, job: UpstreamRequest, timing: TokenTiming) -> None:
    """Count a request that goes to the router."""
    isl, model = arrived.prompt.isl, arrived.model
    service.metrics.started(model, job.endpoint, job.streamed, arrived.preferences.service_class)
    service.counts.of(model).arrive(isl)
    if job.copy_of is None:
        service.timeline_store.arrived(timing.arrived + timing.lead, isl)
    else:
        service.counts.copies[arrived.id] = model
    service.history.arrived(arrived.id, nanos(timing.lead))
    if job.name is not None:
        served = arrived.adapter or model
        service.metrics.named.add(served, job.name)
        service.named[job.name, served] += 1


def enter_end(
    service: Service, carried: CarriedRequest, closed: Closed, service_class: str | None, now: float, caller: str
) -> None:
    """Count and record an ended request; ``now`` is the end, of `time.monotonic`; ``caller``: the name of who asked."""
    timing, job, model = carried.timing, carried.job, carried.resolved.model
    copied = job.copy_of is not None
    if timing.output is not None:
        timing.settle(None if copied else service.metrics.gaps(model))
    service.metrics.closed(closed, promised=not copied)
    service.metrics.ended(model, job.endpoint, job.streamed, error_type(closed), now - timing.arrived)
    if not copied and closed.outcome == "ok" and timing.ttft is not None and closed.legs:
        target = closed.legs[-1].target
        service.metrics.timed(model, target.worker, target.rank, timing.ttft, timing.itl)
    ignored: tuple[str, ...] = ()
    if job.hints is not None and job.hints.uncertain:
        ignored = ignored_hints(job, carried.speaker)
        service.metrics.ignored(model, ignored)
        if ignored:
            service.history.add(closed.id, ignored_hints=ignored)
    record = record_of(
        # One clock for the TTFT of client, page, explain and record: it begins when the request arrives here.
        msgspec.structs.replace(closed, arrived=closed.arrived - nanos(timing.lead)),
        offset=service.run_offset,
        blocks=carried.prompt.blocks,
        itl=timing.summary(),
        ttft=timing.ttft,
        e2e=timing.e2e,
        service_class=service_class,
        ignored_hints=ignored,
        way=job.way,
        name=job.name,
        tenant=service.gate.tenants.get(caller),
        key=caller if service.gate.keys.needed else None,
        copy_of=job.copy_of,
    )
    if job.name is not None:
        service.history.add(closed.id, name=job.name)
    if job.way:
        service.history.add(closed.id, way=job.way)
    if record.tenant is not None:
        _count_tenant(service, record, record.tenant, caller)
    if record.program is not None and job.copy_of is None:
        service.programs.enter(record, record.program, time.time())
    if job.copy_of is None:
        service.records.write(record)
        service.timeline_store.ended(now, record, service.settings.slo)
    else:
        service.counts.copies.pop(closed.id, None)
        service.history.add(closed.id, copy_of=job.copy_of)
        service.copies.write(record)
    service.counts.of(model).end(record, service.settings.slo)


def _count_tenant(service: Service, record: RequestRecord, tenant: str, key: str) -> None:
    metrics = service.metrics
    metrics.tenant_requests.add(key, record.outcome, tenant)
    for kind, tokens in zip(("prompt", "cached", "output"), tokens_of(record), strict=True):
        metrics.tenant_tokens.add(key, kind, tenant, by=tokens)


def error_type(closed: Closed) -> str:
    """Return the metric label of how a request ended; empty where it succeeded."""
    if closed.outcome == "ok":
        return ""
    if closed.outcome == "cancelled":
        return "cancelled"
    by_fault = {"client": "validation", "overloaded": "overload", "deadline": "response_timeout"}
    return by_fault.get(closed.fault, "internal")


def refusal(error: PenstockError) -> str:
    """Return the metric label of a request that was refused before it was routed."""
    if isinstance(error, OverloadedError):
        return "overload"
    if isinstance(error, ClientError):
        return "not_found" if error.status == 404 else "validation"
    return "internal"
