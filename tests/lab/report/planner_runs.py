"""Runs of a planner that tests look at: made by hand, so that every number is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.kernel.request_record import ItlSummary, RequestRecord
from penstock.planner.plugins.proposals import Reason
from penstock.planner.tick_record import ModelTick, PluginResult, PoolTick, TickRecord


def tick(number: int, at: float, ready: int, target: int | None = None, **more: Any) -> TickRecord:
    """One tick of one pool ``decode`` of model ``m`` with one GPU per replica."""
    model = {"health": "fresh", "rate": 4.0, "judged": 20, "in_slo": 20, "queued": 0, **more.pop("model", {})}
    pool = {"starting": 0, "draining": 0, "failed": 0, "desired": ready, "gpus": 1, **more.pop("pool", {})}
    target = pool["desired"] if target is None else target
    changed = target != pool["desired"]
    given: dict[str, Any] = {
        "policy": "slo",
        "outcome": "apply" if changed else "keep",
        "chosen": (Reason(code="demand", text=f"{target} replicas bear 4 requests/s"),) if changed else (),
        "gpus": pool["gpus"] * (ready + pool["starting"] + pool["draining"]),
        **more,
    }
    return TickRecord(
        tick=number,
        at=at,
        models={"m": ModelTick(**model)},
        pools={"decode": PoolTick(ready=ready, proposed=target, target=target, model="m", role="decode", **pool)},
        **given,
    )


def wave(ticks: int, rate: Callable[[int], float], base: float = 5.0, ahead: float = 60.0) -> list[TickRecord]:
    """A run in which demand follows ``rate(tick)``, forecasts know it, and replicas follow the forecast at once."""
    found = []
    ready = 1
    for n in range(ticks):
        later = rate(n + int(ahead / base))
        wanted = max(1, round(later / 4))
        quantiles = {f"{q:g}": [later * s for s in (0.98, 1.0, 1.02)] for q, s in ((0.1, 1), (0.5, 1), (0.9, 1))}
        quantiles["0.1"], quantiles["0.9"] = [later * 0.8] * 3, [later * 1.2] * 3
        predicted = {"seconds": 60.0, "requests": later * 60, "horizons": [30.0, ahead, 120.0], "quantiles": quantiles}
        said: tuple[PluginResult, ...] = ()
        health = "fresh"
        if ticks // 2 <= n < ticks // 2 + 6:
            health = "stale"
            said = (
                PluginResult(id="price", stage="constrain", result="timeout", reasons=(Reason(code="t", text="5 s"),)),
            )
        found.append(
            tick(
                n + 1,
                base * (n + 1),
                ready,
                wanted,
                model={"rate": rate(n), "predicted": predicted, "judged": 20, "in_slo": 20 if n % 9 else 15,
                       "queued": n % 9 // 8 * 4, "health": health},
                pool={"desired": ready, "starting": max(0, wanted - ready)},
                plugin_results=said,
            )
        )  # fmt: skip
        ready = wanted
    return found


def request(id: int, arrival: float, ttft: float | None = 0.1, outcome: Any = "ok") -> RequestRecord:
    itl = ItlSummary(gaps=9, mean=0.01)
    return RequestRecord(id=str(id), arrival=arrival, model="m", outcome=outcome, isl=10, osl=10, ttft=ttft, itl=itl)


def write(folder: Path, ticks: list[TickRecord], requests: list[RequestRecord] | None = None) -> Path:
    """Write a run folder, as a planner and a frontend leave it."""
    (folder / "planner.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in ticks))
    if requests is not None:
        (folder / "requests.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in requests))
    return folder
