"""`FORMER`: settings of earlier versions, with what is done instead of each."""

from collections.abc import Sequence

from penstock.config.derived.knobs import ANY_KEY

POOL = "models.*.pools.*."
LOAD = "planner.classic.load."
FPM = "planner.classic.fpm."
KALMAN = "planner.classic.forecast.kalman_"
FORMER: dict[str, str] = {
    "models.*.pools.*.vllm.start_timeout": "is supervise.start_timeout now, of all processes",
    "models.*.pools.*.llamacpp.start_timeout": "is supervise.start_timeout now, of all processes",
    "models.*.pools.*.vllm.shutdown_timeout": "is fixed at 20 s",
    "models.*.pools.*.sim.timing.operator_gap_ms": "is fixed at 0",
    "models.*.pools.*.sim.timing.aiconfigurator_engine": "is fixed at vllm",
    "supervise.restart_backoff_max": "is fixed at 30 s",
    "canary.misses": "is fixed at 2",
    "discovery.nats.timeout": "is fixed at 5 s",
    "discovery.nats.events_max": "is fixed at 100000",
    "discovery.nats.snapshot_every": "is fixed at 2000",
    "discovery.etcd.timeout": "is fixed at 5 s",
    "runs.journal_segment": "is a quarter of runs.journal_bytes now",
    "runs.journal_segments": "is fixed at 4: runs.journal_bytes is their sum",
    "runs.records_segment": "is a quarter of runs.records_bytes now",
    "runs.records_segments": "is fixed at 4: runs.records_bytes is their sum",
    "frontend.tokenize.queue_max": "is fixed at 1024",
    "frontend.tokenize.cache_entries": "is fixed at 65536",
    "frontend.upstream.connections_max": "is fixed at 4096",
    "frontend.keep_alive": "is fixed at 75 s",
    "router.cost.credit_decay": "is fixed at 0",
    "router.cost.transfer_ms_per_block": "is 0.05 until hand-offs have been measured",
    "router.cost.prefill_tokens_per_second": "is 20000 until it has been measured",
    "router.cost.decode_ms_per_block": "is 0.002 until it has been measured",
    "router.index.approximate_blocks_max": "is fixed at 1048576",
    "router.index.hits_half_life": "is gone: no hits are counted per prefix",
    "router.index.text_block_bytes": "is fixed at 256",
    "router.affinity.sessions_max": "is fixed at 65536",
    "router.affinity.discount": "is fixed at 0.3",
    "router.breaker.open_max": "is fixed at 60 s",
    "planner.slo.ttft": "is slo.ttft now: router, planner and reports read one SLO",
    "planner.slo.itl": "is slo.itl now: router, planner and reports read one SLO",
    "planner.slo.classes.*": "is slo.classes.NAME now",
    "router.handoff.ttft": "is slo.ttft now, with router.handoff.conditional=slo",
    "router.handoff.itl": "is slo.itl now, with router.handoff.conditional=slo",
    "router.handoff.new_share_max": "is fixed at 0.7",
    "router.handoff.fallback_share": "is fixed at 0.1",
    "router.handoff.fallback_burst": "is fixed at 10",
    "router.handoff.prefill.overlap_credit": "is router.cost.overlap_credit now",
    "router.handoff.prefill.prefill_scale": "is router.cost.prefill_scale now",
    "router.handoff.prefill.decode_scale": "is fixed at 0",
    "router.handoff.decode.prefill_scale": "is fixed at 1",
    "router.handoff.decode.decode_scale": "is router.cost.decode_scale now",
    "router.decisions_kept": "is fixed at 4096",
    "frontend.closed_kept": "is fixed at 4096",
    f"{POOL}sim.timing.calibration.*": "is an entry of the mapping sim.timing.calibration: {NAME: NUMBER}",
    f"{POOL}sim.timing.prefill_quadratic": "is the first number of sim.timing.prefill now",
    f"{POOL}sim.timing.prefill_linear": "is the second number of sim.timing.prefill now",
    f"{POOL}sim.timing.prefill_base": "is the third number of sim.timing.prefill now",
    f"{POOL}sim.timing.decode_quadratic": "is the first number of sim.timing.decode now",
    f"{POOL}sim.timing.decode_linear": "is the second number of sim.timing.decode now",
    f"{POOL}sim.timing.decode_base": "is the third number of sim.timing.decode now",
    f"{LOAD}namespace": "is planner.virtual.namespace now",
    f"{LOAD}environment": "is planner.connector now",
    f"{LOAD}served_model_name": "is gone: every model of the config is planned",
    f"{LOAD}no_operation": "is planner.advisory now",
    f"{LOAD}log_dir": "is planner.tensorboard now",
    f"{LOAD}metric_pulling_interval": "is fixed at 1 s",
    f"{LOAD}max_gpu_budget": "is planner.budget.max_gpus now",
    f"{LOAD}min_gpu_budget": "is planner.budget.min_gpus now",
    f"{LOAD}decode_engine_num_gpu": "is the pool's own: models.NAME.pools.POOL.gpus",
    f"{LOAD}prefill_engine_num_gpu": "is the pool's own: models.NAME.pools.POOL.gpus",
    f"{LOAD}waiting_kv": "is fixed at 0.02",
    f"{LOAD}new_decode_worker_grace_period": "is fixed at 3",
    f"{LOAD}new_prefill_worker_queue_buffer_period": "is fixed at 3",
    "planner.classic.sla.min_endpoint": "is planner.budget.min_replicas now",
    "planner.classic.sla.max_gpu_budget": "is planner.budget.max_gpus now",
    f"{FPM}load_min_observations": "is fixed at 5",
    f"{FPM}max_num_fpm_samples": "is fixed at 64",
    f"{FPM}fpm_sample_bucket_size": "is fixed at 16",
    f"{KALMAN}q_level": "is fixed at 1",
    f"{KALMAN}q_trend": "is fixed at 0.1",
    f"{KALMAN}r": "is fixed at 10",
    f"{KALMAN}min_points": "is fixed at 5",
    "planner.plugins.modules": "is planner.plugins.use now, where each plugin has a module or an endpoint",
    "planner.plugins.external": "is planner.plugins.use now, where each plugin has a module or an endpoint",
    "planner.plugins.message_max": "is fixed at 10 MiB",
    "planner.tick_timeout": "is fixed at 30 s",
    "planner.prometheus.timeout": "is fixed at 10 s",
    "planner.virtual.check_interval": "is fixed at 10 s",
    "planner.webhook.timeout": "is fixed at 10 s",
    "planner.webhook.backoff": "is fixed at 0.5 s",
}
"""Dotted path (`*` for a mapping's key) of a setting or a group that is gone -> what is true now."""


def way_on(path: Sequence[str]) -> str | None:
    """Return what is true now of a former setting, whose path counts from the root or from a pool."""
    for former, hint in FORMER.items():
        for name in {former, former.removeprefix(POOL)}:
            parts = name.split(".")
            if len(parts) <= len(path) and all(part in (ANY_KEY, given) for part, given in zip(parts, path)):
                return hint
    return None
