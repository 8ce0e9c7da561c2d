"""Intent file: the wish for a deployment as YAML, in our eight lines or as a ``DynamoGraphDeploymentRequest``.

Ours: ``model``, ``engine``, ``hardware``, ``slo``, ``workload``, ``profile``, ``output``, ``auto_apply``. A request of
Dynamo (nvidia.com/v1beta1) has the same in ``spec``; what it asks of Kubernetes and of Dynamo's profiler has no meaning
here, and a note says so.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec

from penstock.config.reading.units import UnreadableNumber, parse_number
from penstock.kernel.errors import ConfigError, read_hint
from penstock.kernel.settings import Unit
from penstock.kernel.values import Slo
from penstock_lab.engine.timing.gpus import gpu_of_sku
from penstock_lab.profiler.deployment_plan.plan_request import PlannedEngine, PlanRequest, profiles_by_key

Quantity = int | float | str
"""A number, or a text with a unit."""
S = TypeVar("S", bound=msgspec.Struct)

DGDR = "DynamoGraphDeploymentRequest"
DGDR_VERSION = "nvidia.com/v1beta1"
DGDR_GPUS = 32
"""Most GPUs where a request of Dynamo names no number: its own cap."""


class IntentHardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``gpu``: one kind or several, without one those of this machine; ``prices``: dollars per hour by kind."""

    gpu: str | tuple[str, ...] = ()
    max_gpus: int | None = None
    prices: Mapping[str, float] = {}


class IntentSlo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets with units, and the share of requests that must keep them."""

    ttft: Quantity
    itl: Quantity | None = None
    attainment: Quantity = 0.95


class IntentWorkload(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"prompt": "isl", "answer": "osl"}
):
    """A trace, or lengths at a rate."""

    trace: str | None = None
    rate: Quantity | None = None
    prompt: int | str | None = None
    answer: int | str | None = None
    requests: int | None = None


class IntentDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Our own form. ``profile``: a folder, or folders by ``GPU:TENSOR_PARALLEL_SIZE``; ``measure`` takes one first."""

    model: str
    engine: PlannedEngine = "sim"
    hardware: IntentHardware = IntentHardware()
    slo: IntentSlo
    workload: IntentWorkload
    profile: str | Mapping[str, str] | None = None
    output: str = "plan"
    auto_apply: bool = False


class DgdrHardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    gpu_sku: str | None = None
    vram_mb: float | None = None
    total_gpus: int | Literal["auto"] | None = None
    num_gpus_per_node: int | None = None
    interconnect: str | None = None
    rdma: bool | None = None


class DgdrWorkload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Annotated[int, msgspec.Meta(gt=0)] = msgspec.field(default=4000, name="isl")
    answer: Annotated[int, msgspec.Meta(gt=0)] = msgspec.field(default=1000, name="osl")
    concurrency: Annotated[float, msgspec.Meta(gt=0)] | None = None
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = msgspec.field(default=None, name="requestRate")


class DgdrSla(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Milliseconds."""

    ttft: Annotated[float, msgspec.Meta(gt=0)] = 2000.0
    itl: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    e2e_latency: Annotated[float, msgspec.Meta(gt=0)] | None = None
    optimization_type: Literal["latency", "throughput"] | None = None


class DgdrSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = False


class DgdrFeatures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    planner: Mapping[str, Any] | None = None
    kv_router: DgdrSwitch | None = None
    mocker: DgdrSwitch | None = None


class DgdrSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """``spec`` of a request of Dynamo, with its defaults."""

    model: str
    backend: Literal["auto", "sglang", "trtllm", "vllm"] = "auto"
    image: str | None = None
    runtime_version_override: str | None = None
    model_cache: Mapping[str, Any] | None = None
    hardware: DgdrHardware = DgdrHardware()
    workload: DgdrWorkload = DgdrWorkload()
    sla: DgdrSla = DgdrSla()
    overrides: Mapping[str, Any] | None = None
    features: DgdrFeatures = DgdrFeatures()
    search_strategy: Literal["rapid", "thorough"] = "rapid"
    auto_apply: bool = True


class DgdrDocument(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"api_version": "apiVersion"}
):
    api_version: str
    kind: str
    metadata: Mapping[str, Any] = {}
    spec: DgdrSpec
    status: Mapping[str, Any] | None = None


DGDR_IGNORED = (
    "image",
    "runtimeVersionOverride",
    "modelCache",
    "overrides",
    "searchStrategy",
    "features.planner",
    "features.kvRouter",
    "sla.optimizationType",
    "hardware.vramMb",
    "hardware.numGpusPerNode",
    "hardware.interconnect",
    "hardware.rdma",
)
"""Fields of ``spec`` that change nothing here."""
FIRST_TOKEN_SHARE = 0.1
"""Share of an end-to-end target that the first token gets. A guess: an answer of 1,000 tokens takes most of it."""


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """What a file asks for. ``apply``: start the best deployment."""

    request: PlanRequest
    output: Path
    apply: bool


def read_intent(path: Path) -> Intent:
    """Return what a file asks for, in either form.

    Raises:
        ConfigError: it can't be read, or a field is unknown, absent or not what it must be; the message names it.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        hint = read_hint(error, content="it must be a YAML file")
        raise ConfigError(f"{path} can't be read: {error}", hint=hint) from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} is not a mapping", hint="begin it with 'model: NAME'")
    if "kind" in data or "apiVersion" in data:
        return _of_dynamo(path, data)
    return _of_ours(path, _converted(path, data, IntentDocument))


def _of_ours(path: Path, document: IntentDocument) -> Intent:
    gpus = (document.hardware.gpu,) if isinstance(document.hardware.gpu, str) else document.hardware.gpu
    work, profile = document.workload, document.profile
    profiles = profiles_by_key([profile]) if isinstance(profile, str) else profile or {}
    request = PlanRequest(
        model=document.model,
        engine=document.engine,
        gpus=gpus,
        prices=document.hardware.prices,
        max_gpus=document.hardware.max_gpus,
        slo=Slo(
            ttft=_parse_field(path, "slo.ttft", document.slo.ttft, "s"),
            itl=None if document.slo.itl is None else _parse_field(path, "slo.itl", document.slo.itl, "s"),
        ),
        attainment=_parse_field(path, "slo.attainment", document.slo.attainment, "ratio"),
        trace=work.trace,
        rate=None if work.rate is None else _parse_field(path, "workload.rate", work.rate, "1/s"),
        prompt=None if work.prompt is None else str(work.prompt),
        answer=None if work.answer is None else str(work.answer),
        requests=work.requests,
        profiles=profiles,
    )
    return Intent(request=request, output=Path(document.output), apply=document.auto_apply)


def _of_dynamo(path: Path, data: Mapping[str, Any]) -> Intent:
    if data.get("kind") != DGDR or data.get("apiVersion") != DGDR_VERSION:
        raise ConfigError(
            f"{path} is {data.get('apiVersion')} {data.get('kind')}",
            hint=f"only {DGDR_VERSION} {DGDR} is read; its v1alpha1 has other fields",
        )
    spec = _converted(path, data, DgdrDocument).spec
    work, sla, sku = spec.workload, spec.sla, spec.hardware.gpu_sku
    if spec.backend == "trtllm":
        raise ConfigError(
            f"{path}: spec.backend is trtllm", hint="plans are written for vllm, sglang and simulated engines"
        )
    if work.concurrency is not None and work.rate is not None:
        raise ConfigError(f"{path}: spec.workload has concurrency and requestRate", hint="leave one of them out")
    notes = [
        f"{name} of the request changes nothing here"
        for name in DGDR_IGNORED
        if _field_at(data["spec"], name) is not None
    ]
    ttft, itl = sla.ttft / 1e3, sla.itl / 1e3
    if sla.e2e_latency is not None:
        if _field_at(data["spec"], "sla.ttft") is not None or _field_at(data["spec"], "sla.itl") is not None:
            raise ConfigError(f"{path}: spec.sla has e2eLatency and ttft or itl", hint="leave one of them out")
        whole = sla.e2e_latency / 1e3
        ttft, itl = FIRST_TOKEN_SHARE * whole, (1.0 - FIRST_TOKEN_SHARE) * whole / work.answer
        notes.append(f"e2eLatency is planned as TTFT {ttft:g} s and ITL {itl:g} s: a guess at its parts")
    rate = work.rate
    if work.concurrency is not None:
        # Little's law: so many requests at once, each of which takes as long as the SLO lets it.
        life = ttft + itl * work.answer
        rate = work.concurrency / life
        notes.append(
            f"concurrency {work.concurrency:g} is planned as {rate:.3g} requests/s: each takes {life:.3g} s at most"
        )
    total = spec.hardware.total_gpus
    mocked = spec.features.mocker is not None and spec.features.mocker.enabled
    request = PlanRequest(
        model=spec.model,
        engine="sim" if mocked else "sglang" if spec.backend == "sglang" else "vllm",
        gpus=() if sku is None else (gpu_of_sku(sku),),
        max_gpus=total if isinstance(total, int) else DGDR_GPUS,
        slo=Slo(ttft=ttft, itl=itl),
        rate=rate,
        prompt=str(work.prompt),
        answer=str(work.answer),
        notes=tuple(notes),
    )
    return Intent(
        request=request, output=Path(str(data.get("metadata", {}).get("name", "plan"))), apply=spec.auto_apply
    )


def _field_at(data: Any, dotted: str) -> object:
    for name in dotted.split("."):
        data = data.get(name) if isinstance(data, Mapping) else None
    value: object = data
    return value


def _parse_field(path: Path, field: str, value: Quantity, unit: Unit) -> float:
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(parse_number(value, unit))
    except UnreadableNumber as error:
        raise ConfigError(f"{path}: {field} {value!r} {error}") from error


def _converted(path: Path, data: Mapping[str, Any], kind: type[S]) -> S:
    _check_fields(path, data, kind, "")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", hint="docs/guides/plan.md has the fields") from error


def _check_fields(path: Path, data: Any, kind: type[msgspec.Struct], where: str) -> None:
    """Raise `ConfigError` for the first unknown field, with those that there are."""
    if not isinstance(data, Mapping):
        return  # the conversion says what it must be
    fields = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
    hints = get_type_hints(kind)
    for key, value in data.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{path}: {where}{key} is not a field", hint=f"{hint}there are {', '.join(fields)}")
        inner = hints[fields[key]]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _check_fields(path, value, inner, f"{where}{key}.")
