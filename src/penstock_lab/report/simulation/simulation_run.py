"""Command ``penstock simulate``: runs a cluster on virtual time, once per variant, and compares them."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from multiprocessing import parent_process
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.adapters.engines.dialects.kv_transfer_protocol import USUAL
from penstock.config.reading.load import load, resolved_yaml
from penstock.config.reading.units import parse_number
from penstock.config.settings.cluster_settings import HELD_ADAPTERS, ClusterSettings, PoolSettings
from penstock.config.worker_names import pool_prefix
from penstock.fleet.journal import fleet_book
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import SECOND, Effect, Event, Nanos
from penstock.kernel.plurals import counted
from penstock.kernel.request_record import RequestRecord
from penstock.page.page_file import write_page
from penstock.planner.journal import planner_book
from penstock.planner.planner import Planner
from penstock.router.events import Decision
from penstock.router.journal import router_book
from penstock.router.selection.decision_summary import DecisionSummaries
from penstock.runtime.planning.planner_report import RECORDS as TICK_RECORDS
from penstock.runtime.records.journal_writer import JournalWriter
from penstock.runtime.records.run_folder import CsvRows, LineWriter, RunFolder
from penstock_lab.config.described_speeds import inputs_of
from penstock_lab.config.tier_plans import tier_plan
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.timing.timing_model import source_of
from penstock_lab.report.outcome import json_text
from penstock_lab.report.run.run_page import write_gaps, write_report
from penstock_lab.report.run.run_summary import RunTally, judged_by
from penstock_lab.report.simulation.simulation_options import SimulateOptions, policy_of
from penstock_lab.report.simulation.simulation_outcome import (
    SimulationOutcome,
    all_as_dict,
    as_dict,
    comparison_page,
    print_table,
)
from penstock_lab.report.simulation.variant_processes import cores, in_processes
from penstock_lab.report.traffic_options import cut, of_clients, of_trace, of_workload, trace_notes
from penstock_lab.simulate.effect_handlers import FLEET, ROUTER
from penstock_lab.simulate.simulated_cluster import PLANNER, SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan, StartUp, checked
from penstock_lab.traffic.adapter_mix import ADAPTER_KINDS, AdapterMix
from penstock_lab.traffic.inline_spec import parse
from penstock_lab.traffic.sessions import Sessions
from penstock_lab.traffic.traffic_request import TrafficRequest

ON_GPU = "model"
"""Name in the settings for the model of ``--gpu``: a path is no valid name there."""
COMPARISON = "compare.html"
"""Page of a comparison, in the run folder of the first variant."""
REFRESH = 0.2
"""Seconds between drawings of the bar."""


@dataclass(slots=True)
class SimulationVariant:
    """One set of settings, with its plan and notes."""

    name: str
    settings: ClusterSettings
    plan: SimulationPlan
    notes: list[str] = field(default_factory=list)


def main(options: SimulateOptions) -> int:
    """Simulate every variant.

    Returns: 0.
    Raises:
        ConfigError: the settings, the trace, the script of faults, the policy or the run folder is at fault.
        PenstockError: the process of a variant ended early.
    """
    variants = variants_of(options)
    traffic, notes = traffic_of(options)
    for variant in variants:
        variant.notes += notes
    jobs = min(options.jobs or cores(), len(variants))
    if jobs > 1:
        outcomes = in_processes(partial(run, options, traffic), variants, jobs, quiet=options.json)
    else:
        outcomes = [run(options, traffic, variant) for variant in variants]
    if options.json:
        sys.stdout.write(json_text(all_as_dict(outcomes)))
    else:
        print_table(outcomes)
    if options.html and len(outcomes) > 1:
        page = Path(outcomes[0].run) / COMPARISON
        write_page(page, comparison_page(outcomes))
        if not options.json:
            sys.stdout.write(f"All variants side by side: {page}\n")
    return 0


# --- variants and traffic --------------------------------------------------------------------------------------------


def variants_of(options: SimulateOptions) -> list[SimulationVariant]:
    """Read the settings of every variant.

    Raises:
        ConfigError: a setting is invalid.
    """
    axes: list[list[str]] = []
    for text in options.compare:
        name, equals, values = text.partition("=")
        choices = [value for value in values.split(",") if value]
        if not equals or not name or not choices:
            raise ConfigError(f"--compare {text!r} names nothing to compare", hint="such as router.mode=kv,round_robin")
        axes.append([f"{name}={value}" for value in choices])
    variants = []
    for chosen in product(*axes):
        settings = load(options.config, [*_gpu_settings(options), *options.overrides, *chosen], os.environ).settings
        variants.append(_variant_of(options, " ".join(chosen) or "as configured", settings))
    return variants


def _gpu_settings(options: SimulateOptions) -> list[str]:
    """Return the settings of a model on GPUs of the table, where ``--gpu`` is given."""
    if options.gpu is None or options.model is None:
        return []
    timing = {"kind": "roofline", "model": options.model, "gpu": options.gpu, "tensor_parallel_size": options.gpus}
    sim = {"timing": timing, "async_scheduling": True, "block_size": 16}
    pools = {"main": {"replicas": 1, "sim": sim}}
    return [f"models={json.dumps({ON_GPU: {'tokenizer': 'builtin:sim', 'pools': pools}})}"]


def _variant_of(options: SimulateOptions, name: str, settings: ClusterSettings) -> SimulationVariant:
    model = options.model if options.gpu is None else ON_GPU
    if model is None:
        if len(settings.models) != 1:
            raise ConfigError(
                f"the config has several models: {', '.join(settings.models)}", hint="say which one with --model"
            )
        model = next(iter(settings.models))
    if model not in settings.models:
        raise ConfigError(f"the config has no model {model!r}", hint=f"it has {', '.join(settings.models)}")
    settings = msgspec.structs.replace(
        _with_blocks(_with_cache(options, settings, model), model),
        slo=settings.slo.otherwise(options.slo_ttft, options.slo_itl),
    )
    prefix = pool_prefix(model, len(settings.models))
    notes: list[str] = []
    pools: dict[str, PoolPlan] = {}
    for pool_name, pool in _split_pools(options, settings.models[model].pools).items():
        if pool.engine != "sim":
            notes.append(f"pool {pool_name} is {pool.engine}: simulated by its sim settings")
        requested = {"prefill": options.prefill, "decode": options.decode, "encode": options.encode}.get(pool.role)
        replicas = requested or options.workers or (len(pool.urls) if pool.urls else pool.replicas)
        # A timing model that is composed from the data of one GPU knows how many GPUs an engine takes.
        gpus = pool.sim.timing.gpus if pool.gpus is None else pool.gpus
        pools[f"{prefix}{pool_name}"] = PoolPlan(
            sim=pool.sim,
            replicas=replicas,
            gpus=gpus,
            role=pool.role,
            handoff=pool.handoff or (None if pool.role == "aggregated" else USUAL.get(pool.engine, "completed")),
            table=load_timing(pool.sim.timing),
            cache=tier_plan(pool.cache),
            sleeping=pool.sleeping,
            adapter_slots=None if options.adapters is None else pool.max_cpu_loras or HELD_ADAPTERS,
            share_weights=pool.share_weights,
        )
    plan = SimulationPlan(
        model=model,
        pools=pools,
        router=settings.routing,
        seed=options.seed,
        until=options.duration,
        faults=options.faults,
        start_up=StartUp(median=options.start_up, sigma=options.start_up_sigma),
        drain_timeout=settings.supervise.drain_timeout,
        restart_backoff=settings.supervise.restart_backoff,
        policy_interval=options.policy_interval,
        slo=settings.slo,
    )
    return SimulationVariant(name, settings, checked(plan), notes)


def _with_cache(options: SimulateOptions, settings: ClusterSettings, model: str) -> ClusterSettings:
    """Return the settings with the tiers that the options request, for every pool of the model."""
    sizes = {"host": options.host_cache, "disk": options.disk_cache}
    wanted = {tier: int(size) for tier, size in sizes.items() if size is not None}
    if not wanted:
        return settings
    replace, chosen = msgspec.structs.replace, settings.models[model]
    pools = {name: replace(pool, cache=replace(pool.cache, **wanted)) for name, pool in chosen.pools.items()}
    return replace(settings, models={**settings.models, model: replace(chosen, pools=pools)})


def _with_blocks(settings: ClusterSettings, model: str) -> ClusterSettings:
    """Return the settings with numbers of KV blocks: the run folder keeps those, since the source files may go."""
    replace, chosen = msgspec.structs.replace, settings.models[model]
    pools = {
        name: replace(pool, sim=with_blocks(pool.sim, load_timing(pool.sim.timing)))
        for name, pool in chosen.pools.items()
    }
    return replace(settings, models={**settings.models, model: replace(chosen, pools=pools)})


def _split_pools(options: SimulateOptions, pools: Mapping[str, PoolSettings]) -> Mapping[str, PoolSettings]:
    """Return the pools, with one that does everything split in two, and one that encodes, where the options want it.

    Raises:
        ConfigError: only one half was requested, or the pool to split is ambiguous.
    """
    pools = _split_roles(options, pools)
    if options.encode is None or any(pool.role == "encode" for pool in pools.values()):
        return pools
    like = next((pool for pool in pools.values() if pool.role != "decode"), None)
    if like is None:
        raise ConfigError("--encode needs a pool like which its engines are", hint="give the config one of role encode")
    return {**pools, "encode": msgspec.structs.replace(like, role="encode")}


def _split_roles(options: SimulateOptions, pools: Mapping[str, PoolSettings]) -> Mapping[str, PoolSettings]:
    if options.prefill is None and options.decode is None:
        return pools
    roles = {pool.role for pool in pools.values()}
    if {"prefill", "decode"} <= roles:
        return pools
    if options.prefill is None or options.decode is None:
        raise ConfigError("--prefill and --decode belong together", hint="give both, such as --prefill 2 --decode 2")
    if len(pools) != 1 or roles != {"aggregated"}:
        raise ConfigError(
            f"which pool is to be split can't be told: there are {', '.join(pools)}",
            hint="give the config pools of role prefill and decode",
        )
    whole = next(iter(pools.values()))
    return {role: msgspec.structs.replace(whole, role=role) for role in ("prefill", "decode")}


Traffic = Callable[[], Iterator[TrafficRequest]]
"""Makes the same requests anew; picklable."""


def traffic_of(options: SimulateOptions) -> tuple[Traffic, list[str]]:
    """Return a function that makes the same requests anew for each variant, and notes about them.

    Raises:
        ConfigError: the trace can't be read or has nothing in the slice, or the workload can't be made.
    """
    traffic, notes = _plain_traffic(options)
    if options.adapters is None:
        return traffic, notes
    mix = parse("--adapters", f"adapters:{options.adapters}", ADAPTER_KINDS, parse_number)
    return partial(_with_adapters, options.seed, mix, traffic), notes


def _with_adapters(seed: int, mix: AdapterMix, traffic: Traffic) -> Iterator[TrafficRequest]:
    return mix.named(traffic(), seed)


def _plain_traffic(options: SimulateOptions) -> tuple[Traffic, list[str]]:
    if options.trace is None:
        of_workload(options)  # so that its errors are raised before anything runs
        if options.concurrency is not None:
            return partial(of_clients, options, options.concurrency), []
        return partial(_workload_requests, options), []
    if options.concurrency is not None:
        raise ConfigError("--concurrency is for workloads; a trace has its own times", hint="leave one of them out")
    requests, trace = of_trace(options)
    chosen = list(cut(options, iter(requests)))
    return partial(iter, chosen), trace_notes(trace)


def _workload_requests(options: SimulateOptions) -> Iterator[TrafficRequest]:
    return cut(options, of_workload(options))


# --- one run ---------------------------------------------------------------------------------------------------------


def run(options: SimulateOptions, traffic: Traffic, variant: SimulationVariant) -> SimulationOutcome:
    """Simulate one variant and leave its run folder."""
    policy = None if options.policy is None else policy_of(options.policy)
    planner = planner_of(variant.settings) if policy is None else None
    folder = RunFolder.create(options.out, "simulate", config=resolved_yaml(variant.settings), seed=options.seed)
    requests, decisions = folder.writer("requests.jsonl"), folder.writer("decisions.jsonl")
    files: list[LineWriter | JournalWriter] = [requests, decisions]
    ticks = None if planner is None else folder.writer(TICK_RECORDS)
    if ticks is not None:
        files.append(ticks)
    rows = CsvRows(folder.path / "metrics.csv")
    slo = judged_by(variant.settings.slo)
    tally, recent = RunTally(slo), list[RequestRecord]()
    retries = 0

    summaries = DecisionSummaries(lambda: variant.settings.router.decisions)

    def decided(decision: Decision) -> None:
        decisions.write(msgspec.Raw(summaries.lines(decision)[1]))

    def flush() -> None:
        nonlocal retries
        for record in recent:
            requests.write(record)
            retries += max(0, (record.attempts or 1) - 1)
        for file in files:
            file.flush()
        tally.add(recent)
        recent.clear()

    source = traffic()
    journals: dict[str, JournalWriter] = {}

    def watch(now: Nanos, name: str, event: Event, effects: Sequence[Effect]) -> None:
        journals[name].watch(now, name, event, effects)

    keep = variant.settings.runs
    cluster = SimulatedCluster(
        variant.plan,
        Sessions(source) if options.closed_loop or options.concurrency is not None else source,
        watch=watch if keep.journal else None,
        policy=policy,
        planner=planner,
        ticked=lambda record: None if ticks is None else ticks.write(record),
        record=recent.append,
        decided=decided if options.decisions else lambda decision: None,
        observe=lambda at, row: rows.append({"seconds": at, **row}),
    )
    if keep.journal:
        books = {ROUTER: router_book(cluster.router), FLEET: fleet_book(cluster.supervisor)}
        if planner is not None:
            books[PLANNER] = planner_book(planner, inputs_of(variant.settings))
        for name, book in books.items():
            journals[name] = JournalWriter(folder.path / "journal" / name, book, wall_ns=time.time_ns())
            journals[name].begin(0)
            files.append(journals[name])
    started = time.perf_counter()
    with _progress_bar(options, variant, cluster) as draw, _few_collections():

        def progress() -> None:
            flush()
            draw()

        cluster.run(progress)
    wall = time.perf_counter() - started
    flush()
    gaps = cluster.gaps()
    outcome = SimulationOutcome(
        name=variant.name,
        summary=tally.summary(gaps),
        slo=slo,
        seed=options.seed,
        gpu_hours=cluster.gpu_hours(),
        asleep_hours=cluster.asleep_hours(),
        preemptions=cluster.world.preemptions,
        prefetched=cluster.fleet.prefetched(),
        retries=retries,
        migrations=cluster.world.notes.get("migrated", 0),
        handoffs=cluster.handoffs(),
        media=cluster.media(),
        adapters=cluster.adapters(),
        bytes_handed=cluster.world.handoffs.bytes_moved,
        events=cluster.simulation.events_handled,
        simulated=cluster.end / SECOND,
        wall=wall,
        run=str(folder.path),
        notes=[
            *variant.notes,
            *_timing_notes(variant, cluster),
            *cluster.refused,
            *_lost_line_notes(requests),
            *_lost_line_notes(decisions),
            *_journal_notes(journals.values()),
        ],
    )
    (folder.path / "simulate.json").write_text(json_text(as_dict(outcome)))
    write_gaps(folder.path, gaps)
    if options.html:
        write_report(folder.path)
    return outcome


def planner_of(settings: ClusterSettings) -> Planner | None:
    """Return the planner that the settings switch on, as a live cluster has it; None where they do not.

    Raises:
        ConfigError: its policy can't be built.
    """
    if not settings.planner.enabled:
        return None
    from penstock.runtime.planning.planner_assembly import build_planner

    return build_planner(settings)


def _timing_notes(variant: SimulationVariant, cluster: SimulatedCluster) -> list[str]:
    """Return, for each pool, the source of its timing, and the share of it outside the measured range."""
    lookups = cluster.fleet.lookups()
    notes = []
    for pool, plan in variant.plan.pools.items():
        looked, beyond = lookups.get(pool, (0, 0))
        share = f"; {beyond / looked:.1%} of its look-ups lie beyond what was measured" if looked else ""
        notes.append(f"timing of {pool}: {source_of(plan.sim.timing)}{share}; {plan.sim.blocks:,} KV blocks")
    return notes


@contextmanager
def _few_collections() -> Iterator[None]:
    """Keep the garbage collector from walking a growing heap repeatedly: a run makes no cycles."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 50, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def _progress_bar(
    options: SimulateOptions, variant: SimulationVariant, cluster: SimulatedCluster
) -> Iterator[Callable[[], object]]:
    """Show the progress of a run on a terminal while the block runs; yields the function that draws."""
    if options.json or not sys.stderr.isatty() or parent_process() is not None:
        yield lambda: None
        return
    columns = (TextColumn(variant.name), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        line = bar.add_task("", total=options.duration or options.requests, state="")
        drawn = 0.0

        def draw() -> None:
            nonlocal drawn
            now = time.perf_counter()
            if now - drawn < REFRESH:
                return
            drawn = now
            simulated = cluster.simulation.now / SECOND
            done = simulated if options.duration else cluster.world.closed
            bar.update(
                line, completed=done, state=f"{counted(cluster.world.closed, 'request')}, {simulated:,.0f} s simulated"
            )
            bar.refresh()

        yield draw


def _journal_notes(journals: Iterable[JournalWriter]) -> list[str]:
    reasons = [journal.ended or journal.failing for journal in journals]
    return [f"the journal ends early: {why}" for why in reasons if why is not None]


def _lost_line_notes(writer: LineWriter) -> list[str]:
    return (
        [f"{counted(writer.lost, 'line')} of {writer.path.name} could not be written: {writer.failing}"]
        if writer.lost
        else []
    )
