"""Output of ``penstock explain scale``: the planner's decisions with reasons, candidates, and which answer won."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.output import percent, seconds_text, table
from penstock.kernel.plurals import counted
from penstock.planner.tick_record import ModelTick, PoolTick, TickRecord
from penstock.runtime.planning.planner_report import PlannerDecisions, PlannerReport, past_decisions

POOL_HEADINGS = ("POOL", "READY", "STARTING", "DRAINING", "FAILED", "GIVEN UP", "WANTED", "PROPOSED", "TARGET")
FORECAST_RANKS, FORECAST_AHEAD = ("0.5", "0.9"), (0.0, 60.0, 300.0)
"""Ranks and horizons (seconds) that are shown of a rate's forecast."""
WEIGHT_LEAST = 0.01
CANDIDATES_MAX = 12
"""Most rows of candidates shown per decision; ``--json`` has all."""


def decisions_of(run: Path | None, limit: int, client: AdminClient) -> PlannerDecisions[TickRecord]:
    """Return the newest decisions, of a run folder or of a running cluster."""
    if run is None:
        return client.get(f"/admin/planner/decisions?limit={limit}", PlannerDecisions[TickRecord])
    return msgspec.json.decode(msgspec.json.encode(past_decisions(run, limit)), type=PlannerDecisions[TickRecord])


def planner_text(planner: PlannerReport) -> str:
    """Return the planner's state in a few lines, as in status."""
    age = max(0.0, time.time() - planner.wall)
    does = "it only advises" if planner.advisory else f"it scales by {planner.connector}"
    health = ", ".join(f"{model} {state}" for model, state in planner.health.items()) or "nothing read yet"
    lines = [
        f"Planner: policy {planner.policy}, every {planner.every:g} s; {does}",
        f"  traffic from {planner.source}: {health}; last tick {planner.tick} {seconds_text(age)} ago: "
        f"{planner.outcome}" + (f"; restarted {counted(planner.restarts, 'time')}" if planner.restarts else ""),
    ]
    lines += [f"  can't read the traffic of {model}: {why}" for model, why in planner.unread.items()]
    lines += [f"  {pool_line(name, pool)}" for name, pool in planner.pools.items()]
    if planner.plugins:
        lines.append("  plugins: " + ", ".join(f"{id} {result}" for id, result in planner.plugins.items()))
    if planner.why:
        ago = seconds_text(max(0.0, planner.at - (planner.changed or 0.0)))
        lines.append(f"  last change {ago} before that: {planner.why}")
    lines += [f"  limit: {reason.text}" for reason in planner.bound[:3]]
    lines += [f"  alarm at second {each.at:.0f}: {each.reason.text}" for each in planner.alarms[-3:]]
    lines.append("  'penstock explain scale' shows the decisions")
    return "\n".join(lines)


def pool_line(name: str, pool: PoolTick) -> str:
    """Return one pool in a line."""
    text = f"{name}: {pool.target} wanted, {pool.ready} ready"
    states = (pool.starting, "starting"), (pool.draining, "draining"), (pool.failed, "can't be started")
    text += "".join(f", {count} {words}" for count, words in states if count)
    if pool.asleep:
        memory = "an unknown amount" if pool.host_memory is None else f"{pool.host_memory / 2**30:.1f} GiB"
        text += f", {pool.asleep} asleep in {memory} of host memory"
    return text + (f", {pool.given_up} given up" if pool.given_up else "")


def scale_text(answer: PlannerDecisions[TickRecord]) -> str:
    """Return the newest decisions as text, the newest first."""
    parts = []
    if answer.planner is not None:
        parts.append(planner_text(answer.planner).rpartition("\n")[0])
    decisions = answer.decisions
    if not decisions:
        last = answer.last
        if last is None and answer.planner is not None:
            parts.append("Its records are where it runs: in Kubernetes in its pod, below /run/penstock.")
        elif last is None:
            parts.append("No planner has decided anything. 'planner: {}' in the config starts one.")
        else:
            parts.append(f"Nothing has been changed so far. The last tick:\n{decision_text(last)}")
    parts += [decision_text(decision) for decision in decisions]
    return "\n\n".join(parts)


def decision_text(record: TickRecord) -> str:
    """Return one tick with its reasons."""
    lines = [_headline(record)]
    own = {name: pool.why for name, pool in record.pools.items() if pool.why}
    lines += [f"  because {why if why.startswith(f'{name} ') else f'{name}: {why}'}" for name, why in own.items()]
    others = [reason for reason in record.chosen if reason.text not in own.values()]
    lines += [f"  because {reason.text}" for reason in others]
    lines += [f"  limit: {reason.text}" for reason in record.bound]
    for flip in record.flips:
        lines.append(f"  role: {flip.count} of {flip.model} from {flip.frm} to {flip.to}")
    lines += [f"  seen: {line}" for line in _observed(record.models)]
    lines += [f"  forecast: {line}" for line in _forecast(record.models)]
    rows = [
        [
            name,
            *(pool.ready, pool.starting, pool.draining, pool.failed, pool.given_up),
            *(pool.desired, pool.proposed, pool.target),
        ]
        for name, pool in record.pools.items()
    ]
    if rows:
        lines.append(table(POOL_HEADINGS, rows, indent="  "))
    for result in record.plugin_results:
        chosen = [reason.text for reason in record.chosen]
        text = "; ".join(reason.text for reason in result.reasons if reason.text not in chosen)
        wanted = ", ".join(f"{pool}={count}" for pool, count in result.targets.items())
        lines.append(f"  {result.id} ({result.stage}): {result.result}" + _after(wanted) + _after(text, ": "))
    for plugin, evidence in record.evidence.items():
        lines += _evidence(plugin, evidence)
    lines += [f"  rejected: {reason.text}" for reason in record.alternatives]
    return "\n".join(lines)


def _headline(record: TickRecord) -> str:
    pools = record.pools
    changes = [f"{name} {pool.desired} -> {pool.target}" for name, pool in pools.items() if pool.desired != pool.target]
    what = ", ".join(changes) or ("changes of role" if record.flips else "no change")
    return f"Second {record.at:.0f}, tick {record.tick}, {record.outcome}: {what} (policy {record.policy})"


def _observed(models: Mapping[str, ModelTick]) -> Iterable[str]:
    for model, tick in models.items():
        if tick.rate is None:
            yield f"the traffic of {model} is {tick.health}, so it is not known"
            continue
        words = [f"{tick.rate:.2f} requests/s"]
        lengths = (tick.shape.isl, "in"), (tick.shape.osl, "out")
        words += [f"{tokens:,.0f} tokens {what}" for tokens, what in lengths if tokens]
        times = ("TTFT", tick.ttft), ("ITL", tick.itl)
        words += [f"{name} {seconds_text(seconds)}" for name, seconds in times if seconds is not None]
        if tick.judged:
            words.append(f"{percent(tick.in_slo / tick.judged)} in SLO")
        if tick.queued:
            words.append(f"{tick.queued} wait in the router")
        yield f"{model}: {', '.join(words)}"


def _forecast(models: Mapping[str, ModelTick]) -> Iterable[str]:
    """Return the forecast of each model whose rate has quantiles, now and later, with the weights of the predictors."""
    for model, tick in models.items():
        predicted = tick.predicted
        middle, high = (predicted.get("quantiles", {}).get(rank) for rank in FORECAST_RANKS)
        if middle is None or high is None:
            continue
        words = [
            f"{middle[place]:.2f} requests/s {f'in {ahead:.0f} s' if ahead else 'now'} (P90 {high[place]:.2f})"
            for place, ahead in enumerate(predicted["horizons"])
            if ahead in FORECAST_AHEAD
        ]
        if not words:
            continue  # a plugin's forecast, for other moments
        weights = sorted(predicted.get("weights", {}).items(), key=lambda item: -item[1])
        believed = ", ".join(f"{name} {percent(weight)}" for name, weight in weights if weight >= WEIGHT_LEAST)
        period = predicted.get("period")
        line = f"{model}: {', '.join(words)}" + _after(believed, f"; {predicted['source']} of ")
        if period is not None:
            line += f"; a pattern of {seconds_text(period)}, which saves {percent(predicted['saved'])} of the error"
        yield line


def _evidence(plugin: str, evidence: Mapping[str, Any]) -> list[str]:
    """Return a plugin's evidence: a table where it lists candidates, else the numbers."""
    lines: list[str] = []
    plain: list[str] = []
    for key, value in evidence.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            heads = list(dict.fromkeys(name for row in value for name in row))
            rows = [[_evidence_cell(row.get(name)) for name in heads] for row in value[:CANDIDATES_MAX]]
            of = f" (the first {CANDIDATES_MAX} of {len(value)})" if len(value) > CANDIDATES_MAX else ""
            lines.append(f"  {key} of {plugin}{of}:")
            lines.append(table([name.upper().replace("_", " ") for name in heads], rows, indent="    "))
        else:
            plain.append(f"{key} {_evidence_cell(value)}")
    return [*([f"  {plugin} reckoned with: {', '.join(plain)}"] if plain else []), *lines]


def _evidence_cell(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return " ".join(f"{key}={_evidence_cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(str(_evidence_cell(each)) for each in value)
    return value


def _after(text: str, before: str = " ") -> str:
    return f"{before}{text}" if text else ""
