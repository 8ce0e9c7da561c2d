"""Planned spec: a PenstockCluster that says in ``spec.request`` what it wants of a model, and gets its pools by a plan.

The request is what ``penstock plan`` reads: its eight lines, or a whole ``DynamoGraphDeploymentRequest``. It is planned
once, in a process of its own, and the plan stays in the status; what the spec says itself counts more.
"""

import asyncio
import hashlib
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from penstock.adapters.seams import StoreUnavailable
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.api.api_client import ask
from penstock_kubernetes.operator.cluster_spec import merge
from penstock_kubernetes.operator.manifest_parts import GPU
from penstock_lab.engine.timing.gpus import gpu_of_sku

if TYPE_CHECKING:
    from lightkube import AsyncClient

PRODUCT = "nvidia.com/gpu.product"
"""Label that NVIDIA's feature discovery gives a node."""
PLAN_TIME = 600.0
"""Seconds after which a plan is given up; the slowest of our own takes a tenth of it on one core."""
FILES = (("workload", "trace"), ("profile",), ("output",))
"""Fields of a request that name files: those of the operator's pod are nobody's business."""
HELD_BACK = "the request is planned and not applied: status.plan has the config; set its autoApply to true"


async def with_plan(
    client: "AsyncClient", resource: JsonObject, known: JsonObject, folder: Path
) -> tuple[JsonObject, JsonObject]:
    """Return a resource whose pools are there, and the plan that they are of; both as they are without a request.

    Args:
        known: the plan in the status, which is kept for the same request.
    Raises:
        ConfigError: the request can't be read, asks for files, or no deployment meets it.
    """
    spec = {**(resource.get("spec") or {})}
    request = spec.pop("request", None)
    if request is None:
        return resource, {}
    _check_request(request)
    digest = hashlib.sha256(msgspec.json.encode(_without_approval(request), order="sorted")).hexdigest()[:16]
    if known.get("request") != digest:
        known = {"request": digest, "config": await _planned(client, request, folder)}
    return {**resource, "spec": merge(known["config"], spec)}, known


def waits_for_approval(resource: JsonObject) -> bool:
    """Return whether a resource's request is to be planned, and not to be applied."""
    request = (resource.get("spec") or {}).get("request") or {}
    return (_value_at(request, "spec", "autoApply"), request.get("auto_apply")).count(False) > 0


def _without_approval(request: JsonObject, name: str = "auto_apply") -> JsonObject:
    """Return what is planned: once it is approved, a request is the same, and the plan that was seen is what comes."""
    planned = {key: value for key, value in request.items() if key != name or not isinstance(value, bool)}
    if name == "auto_apply" and isinstance(spec := planned.get("spec"), dict):
        planned["spec"] = _without_approval(spec, "autoApply")
    return planned


async def _planned(client: "AsyncClient", request: JsonObject, folder: Path) -> JsonObject:
    """Return the config of the best deployment."""
    named = _value_at(request, "hardware", "gpu") or _value_at(request, "spec", "hardware", "gpuSku")
    gpus = [] if named else await _gpus_there(client, request)
    where = folder / "plan"
    where.mkdir(exist_ok=True)
    (where / "request.yaml").write_text(yaml.safe_dump(request, sort_keys=False))
    words = ("plan", "request.yaml", "--no-apply", "--json", "--jobs", "1", "--output", str(where / "made"), *gpus)
    child = await create_subprocess_exec(sys.executable, "-m", "penstock", *words, cwd=where, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(PLAN_TIME):
            out, err = await child.communicate()
    except TimeoutError as error:
        raise ConfigError(f"spec.request: no plan came within {PLAN_TIME:g} s") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode not in (0, 1) or not out:
        raise ConfigError(f"spec.request: {err.decode(errors='replace').strip()}")
    outcome = msgspec.json.decode(out)
    if not outcome["feasible"]:
        floor = outcome["floor"] or {}
        why, changes = floor.get("reason"), "; ".join(floor.get("changes", ()))
        raise ConfigError(f"spec.request: no deployment meets the SLO: {why}", hint=f"what would change it: {changes}")
    config: JsonObject = yaml.safe_load((where / "made" / "penstock.yaml").read_text())
    return config


def _check_request(request: object) -> None:
    if not isinstance(request, dict):
        raise ConfigError("spec.request is not a mapping", hint="give it model, slo, hardware and workload")
    for path in FILES:
        if _value_at(request, *path) is not None:
            raise ConfigError(
                f"spec.request: {'.'.join(path)} names a file, which is not in the operator's pod",
                hint="plan with penstock plan on your machine, and apply what it writes",
            )
    named = [request.get("model"), _value_at(request, "spec", "model"), _value_at(request, "hardware", "gpu")]
    for text in _texts(named):
        if text.startswith(("/", "~", ".")) or ".." in text:
            raise ConfigError(f"spec.request: {text} is a path", hint="give a well-known name")
    if (request.get("engine"), _value_at(request, "spec", "backend")).count("sglang"):
        raise ConfigError(
            "spec.request: SGLang's servers are started elsewhere, by what penstock plan writes",
            hint="give engine vllm or sim, or attach SGLang's servers with pools.*.urls",
        )


async def _gpus_there(client: "AsyncClient", request: JsonObject) -> list[str]:
    """Return flags for the GPUs of the nodes: of several kinds the one of which there are most."""
    from lightkube import ApiError

    try:
        nodes = await ask(lambda: _nodes(client))
    except (StoreUnavailable, ApiError) as error:
        raise ConfigError(
            f"spec.request names no GPU, and nodes can't be looked at: {error}",
            hint="give hardware.gpu (spec.hardware.gpuSku in a DynamoGraphDeploymentRequest)",
        ) from error
    counts: Counter[str] = Counter()
    for node in nodes:
        product = _value_at(node, "metadata", "labels", PRODUCT)
        gpus = str(_value_at(node, "status", "allocatable", GPU))
        if isinstance(product, str) and gpus.isdecimal():
            counts[product] += int(gpus)
    if not counts.total():
        raise ConfigError(
            f"spec.request names no GPU, and no node has {GPU} and the label {PRODUCT}",
            hint="give hardware.gpu (spec.hardware.gpuSku in a DynamoGraphDeploymentRequest)",
        )
    product, count = counts.most_common(1)[0]
    asked = _value_at(request, "hardware", "max_gpus") or _value_at(request, "spec", "hardware", "totalGpus")
    return ["--gpu", gpu_of_sku(product), "--max-gpus", str(min(asked, count) if isinstance(asked, int) else count)]


async def _nodes(client: "AsyncClient") -> list[JsonObject]:
    from lightkube.resources.core_v1 import Node

    return [node.to_dict() async for node in client.list(Node)]


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from _texts(value)


def _value_at(data: object, *path: str) -> object:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data
