"""Picker checks: settings that a gateway in front would silently ignore are refused, each with what to do instead."""

from collections.abc import Iterator

from penstock.config.reading.problems import Complaint
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.router.settings import MigrationSettings
from penstock_kubernetes.picker_settings import PickerSettings


def picker_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    """Return what the gateway that ``picker.kind`` names can't do, but the settings ask for."""
    kind, picker, defaults = settings.picker.kind, settings.picker, PickerSettings()
    if kind is None:
        return
    leave_out = "leave it out, or unset picker.kind and let clients ask our endpoint"
    if settings.router.hedge.after is not None:
        yield ("router", "hedge", "after"), f"{kind} sends a request to one worker at a time", leave_out
    if settings.router.migration != MigrationSettings():
        yield ("router", "migration"), f"an answer that {kind} carries can't go on on another worker", leave_out
    bodies = f"{kind} sends bodies on as clients wrote them"
    if settings.names:
        yield ("names",), bodies, leave_out
    for model, entry in settings.models.items():
        for knob in ("aliases", "defaults", "system_prompt"):
            if getattr(entry, knob):
                yield ("models", model, knob), bodies, leave_out
        if entry.chat_template is not None and any(pool.attached for pool in entry.pools.values()):
            yield ("models", model, "chat_template"), f"{bodies}, so running servers would not get it", leave_out
    for name, tenant in settings.tenants.items():
        if tenant.models or tenant.classes or tenant.tokens_per_minute or tenant.budget:
            yield ("tenants", name), f"its limits would not hold: {kind} carries the requests", leave_out
    if settings.router.queue.shares:
        yield ("router", "queue", "shares"), f"requests that {kind} carries have no tenant", leave_out
    if settings.audit.folder is not None:
        yield ("audit", "folder"), f"prompts and answers that {kind} carries are not in it", leave_out
    if settings.frontend.security.jwt.issuer is not None:
        yield ("frontend", "security", "jwt", "issuer"), f"requests that {kind} carries are known by keys", leave_out
    if kind == "envoy":
        if picker.folder is not None:
            yield ("picker", "folder"), "envoy asks at a port, not at a socket in a folder", "leave it out"
        return
    if settings.router.track_output:
        yield ("router", "track_output"), f"{kind} reports an answer at its end, not its growth", leave_out
    for knob in ("listen_port", "tls"):
        if getattr(picker, knob) != getattr(defaults, knob):
            yield ("picker", knob), f"{kind} asks at a socket in picker.folder", "leave it out"
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            if pool.role != "aggregated":
                path = ("models", model, "pools", name, "role")
                yield path, f"{kind} sends a request to one worker, so none can {pool.role} for another", leave_out
