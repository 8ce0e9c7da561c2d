"""Is every option of the field's planners translated, or its absence explained; and does our config take the result?"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.config.derived.knobs import derive
from penstock.config.reading.load import load
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Slo
from penstock_dynamo.importing.dynamo_options import Imported, import_options
from penstock_dynamo.importing.option_table import RULES

PLUGIN = {
    "plugin_id": "cap",
    "plugin_type": "constrain",
    "priority": 50,
    "endpoint": "grpc://127.0.0.1:9000",
    "auth_token": "hidden-hidden-hidden",
    "protocol_version": "1.0",
    "version": "v1",
    "execution_interval_seconds": 30,
    "hold_policy": "HOLD_LAST",
    "needs": ["observations.traffic.isl", "observations.fpm"],
    "requires_produced_fields": ["predictions"],
    "observation_window_seconds": 60,
}
IN_PROCESS = {"module": "my.scaling", "class": "Cap", "plugin_id": "mine", "plugin_type": "propose", "kwargs": {"n": 3}}

TODAY: dict[str, Any] = {
    "pre_deployment_sweeping_mode": "rapid",
    "environment": "virtual",
    "backend": "vllm",
    "mode": "disagg",
    "optimization_target": "sla",
    "namespace": "dynamo",
    "throughput_adjustment_interval_seconds": 180,
    "throughput_adjustment_interval": 180,
    "load_adjustment_interval_seconds": 5,
    "load_adjustment_interval": 5,
    "max_throughput_scaling_replicas": 8,
    "max_gpu_budget": 8,
    "min_gpu_budget": -1,
    "min_endpoint": 1,
    "prefill_min_endpoint": 1,
    "decode_min_endpoint": 1,
    "control_api_port": 9086,
    "decode_engine_num_gpu": 2,
    "prefill_engine_num_gpu": 1,
    "profile_results_dir": "profiling_results",
    "aic_interpolation": {},
    "ais_perf_model": {},
    "aic_perf_model": {},
    "ttft_ms": 500.0,
    "ttft": 500.0,
    "itl_ms": 50.0,
    "itl": 50.0,
    "load_predictor": "arima",
    "load_predictor_log1p": False,
    "prophet_window_size": 50,
    "load_predictor_warmup_trace": "trace.jsonl",
    "kalman_q_level": 1.0,
    "kalman_q_trend": 0.1,
    "kalman_r": 10.0,
    "kalman_min_points": 5,
    "metric_pulling_prometheus_endpoint": "http://prometheus:9090/",
    "metric_pulling_prometheus_token": "hidden-hidden-hidden",
    "metric_pulling_prometheus_token_file": "/run/token",
    "metric_pulling_prometheus_ssl_verify": False,
    "metric_pulling_prometheus_extra_query_params": "tenant=a&x=1",
    "metric_pulling_prometheus_ca_bundle": "/run/ca.pem",
    "metric_pulling_prometheus_request_timeout_seconds": 10.0,
    "metric_reporting_prometheus_port": 9085,
    "throughput_metrics_source": "router",
    "model_name": "m",
    "global_planner_namespace": "other",
    "enable_throughput_scaling": True,
    "enable_load_scaling": False,
    "max_num_fpm_samples": 64,
    "fpm_sample_bucket_size": 16,
    "load_scaling_down_sensitivity": 80,
    "prefill_scale_up_queue_tokens": 4000,
    "prefill_scale_down_queue_tokens": 100,
    "decode_scale_up_kv_rate": 90,
    "decode_scale_down_kv_rate": 40,
    "load_min_observations": 5,
    "speculative_nextn": 0,
    "advisory": False,
    "enable_power_awareness": True,
    "total_gpu_power_limit": 5600,
    "report_interval_hours": 24.0,
    "report_output_dir": "./planner_reports",
    "report_filename": None,
    "report_write_gzip_log": True,
    "live_dashboard_port": 8080,
    "scheduling.scale_interval_seconds": 5,
    "scheduling.tick_max_duration_seconds": 30.0,
    "scheduling.external_plugins": [PLUGIN],
    "scheduling.gateway.enabled": True,
    "scheduling.gateway.listen": "unix:///run/registry.sock",
    "scheduling.gateway.allow_insecure": False,
    "plugin_registration.auth.trusted_sources": ["static_secret"],
    "plugin_registration.auth.static_secrets": {"hidden-hidden-hidden": "cap"},
    "plugin_registration.transport.allow_insecure_grpc": False,
    "plugin_registration.transport.request_timeout_seconds": 5.0,
    "plugin_registration.transport.keepalive_time_ms": 30000,
    "plugin_registration.transport.max_message_size_bytes": 10485760,
    "plugin_registration.protocol_version_min": "1.0",
    "plugin_registration.protocol_version_max": "1.0",
    "plugin_registration.heartbeat_timeout_seconds": 15.0,
    "plugin_registration.heartbeat_missed_threshold": 2,
    "plugin_registration.in_process_plugins": [IN_PROCESS],
    "plugin_registration.admin.mode": "allow_all",
}
"""Every option of PlannerConfig 1.6 and the retired spellings of it, with a value."""

TODAY_LEFT = {
    "pre_deployment_sweeping_mode",
    "backend",
    "control_api_port",
    "aic_interpolation",
    "ais_perf_model",
    "aic_perf_model",
    "metric_pulling_prometheus_token",
    "global_planner_namespace",
    "speculative_nextn",
    "report_output_dir",
    "report_filename",
    "report_write_gzip_log",
    "live_dashboard_port",
    "scheduling.gateway.allow_insecure",
    "plugin_registration.auth.trusted_sources",
    "plugin_registration.auth.static_secrets",
    "plugin_registration.transport.allow_insecure_grpc",
    "plugin_registration.transport.keepalive_time_ms",
    "plugin_registration.protocol_version_min",
    "plugin_registration.protocol_version_max",
    "plugin_registration.admin.mode",
}
"""What becomes nothing, whatever its value."""
TODAY_SAME = {
    "metric_pulling_prometheus_request_timeout_seconds",
    "max_num_fpm_samples",
    "fpm_sample_bucket_size",
    "load_min_observations",
    "scheduling.tick_max_duration_seconds",
    "plugin_registration.transport.max_message_size_bytes",
}
"""What is a constant here, with the value above."""

FIFTEEN = """
--namespace=dynamo --environment=local --served-model-name=vllm --no-operation --log-dir=log/planner
--adjustment-interval=30 --metric-pulling-interval=1 --max-gpu-budget=8 --min-gpu-budget=1
--decode-kv-scale-up-threshold=0.9 --decode-kv-scale-down-threshold=0.5
--prefill-queue-scale-up-threshold=0.5 --prefill-queue-scale-down-threshold=0.2
--decode-engine-num-gpu=1 --prefill-engine-num-gpu=1
"""
"""The threshold planner's options with their defaults (but no-operation, which is off)."""

EARLY = """
python3 -m dynamo.planner.planner_sla --environment virtual --backend vllm --namespace ns --adjustment-interval 180
--profile-results-dir profiling_results --isl 3000 --osl 150 --ttft 0.5 --itl 0.05 --load-predictor prophet
--load-prediction-window-size 50 --no-correction --max-gpu-budget 8 --min-gpu-budget 1 --min-endpoint 1
--decode-engine-num-gpu 1 --prefill-engine-num-gpu 1 --prometheus-port 9085 --no-operation --log-dir log
"""


def plain(imported: Imported) -> dict[str, Any]:
    return {told.option: (dict(told.became), told.why) for told in imported.notes}


def accepted(imported: Imported, tmp_path: Path) -> PlanningSettings:
    """Load the settings as a cluster's config; return the planner's."""
    return loaded(imported, tmp_path).planner


def loaded(imported: Imported, tmp_path: Path) -> ClusterSettings:
    file = tmp_path / "cluster.yaml"
    file.write_text(imported.yaml())
    return load(file).settings


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """Put ``a.b`` under ``a``, as a config has it."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        here = found
        *groups, last = name.split(".")
        for group in groups:
            here = here.setdefault(group, {})
        here[last] = value
    return found


def test_every_option_of_today_is_translated_or_explained(tmp_path: Path) -> None:
    assert set(TODAY) <= set(RULES["planner-config"])
    imported = import_options(json.dumps(nested(TODAY)))
    assert imported.generation == "planner-config"
    told = plain(imported)
    assert set(told) == set(TODAY)
    assert {name for name, (became, _) in told.items() if not became} == TODAY_LEFT | TODAY_SAME
    assert {name for name, (_, why) in told.items() if why == "as here"} == TODAY_SAME
    assert all(why for became, why in told.values() if not became)
    assert not [why for _, why in told.values() if "unknown key" in why or "can't be read" in why]
    assert "hidden-hidden" not in imported.yaml() + str(imported.notes)
    settings = accepted(imported, tmp_path)
    assert (settings.mode, settings.policy, settings.connector) == ("disaggregated", "throughput-fpm", "virtual")
    slo = loaded(imported, tmp_path).slo
    assert (slo.ttft, slo.itl, settings.budget.max_gpus, settings.budget.min_gpus) == (
        0.5,
        0.05,
        8,
        None,
    )
    assert settings.source == "prometheus" and settings.prometheus.url == "http://prometheus:9090"
    assert settings.prometheus.params == {"tenant": "a", "x": "1"} and not settings.prometheus.verify
    assert (settings.virtual.namespace, settings.virtual.model, settings.virtual.gpus_decode) == ("dynamo", "m", 2)
    assert settings.budget.watts == 5600 and settings.report.interval == 86400
    assert settings.classic.fpm.load_scaling_down_sensitivity == 0.8
    assert settings.classic.thresholds.decode_scale_up_kv_rate == 0.9
    assert settings.classic.forecast.predictor == "arima"
    assert settings.plugins.heartbeat == 30 and settings.plugins.listen == "unix:///run/registry.sock"
    cap = settings.plugins.use["cap"]
    assert (cap.stage, cap.priority, cap.interval, cap.hold, cap.window) == ("constrain", 50, 30, "hold_last", 60)
    assert (cap.needs, cap.requires) == (("traffic", "engines"), ("predictions",))
    mine = settings.plugins.use["mine"]
    assert (mine.module, mine.name, mine.stage, mine.options) == ("my.scaling", "Cap", "propose", {"n": "3"})


def test_each_option_alone_makes_a_config(tmp_path: Path) -> None:
    knobs = derive(ClusterSettings)
    faults = []
    for name in [name for name in TODAY if name not in TODAY_LEFT]:
        imported = import_options(json.dumps(nested({name: TODAY[name]})), "planner-config")
        try:
            accepted(imported, tmp_path)
        except ConfigError as error:
            faults.append(f"{name}: {error}")
        became, why = plain(imported)[name]
        if not became and not why:
            faults.append(f"{name} is neither translated nor explained")
        for path in became:
            if not any(_fits(where, knob.dotted) for knob in knobs for where in (path, f"planner.{path}")):
                faults.append(f"{name} became {path}, which is not a knob")
    assert not faults, "\n".join(faults)


def _fits(path: str, knob: str) -> bool:
    ours, theirs = path.removeprefix("planner.").split("."), knob.split(".")
    return all(a == b or b == "*" for a, b in zip(ours, theirs)) and len(ours) <= len(theirs)


def test_all_fifteen_options_of_the_threshold_planner(tmp_path: Path) -> None:
    imported = import_options(f"PYTHONPATH=/workspace python components/planner.py {FIFTEEN}".replace("\n", " "))
    assert imported.generation == "load-classic" and len(imported.notes) == 15
    assert {told.option: told.why for told in imported.left} == {
        "--namespace": "it names keys in etcd and a label in Prometheus, and neither is used here",
        "--served-model-name": "models are those of the config: models.NAME",
        "--decode-engine-num-gpu": "it belongs to the pool: models.NAME.pools.POOL.gpus: 1, of role decode",
        "--prefill-engine-num-gpu": "it belongs to the pool: models.NAME.pools.POOL.gpus: 1, of role prefill",
    }
    settings = accepted(imported, tmp_path)
    assert (settings.policy, settings.advisory, settings.tensorboard) == ("load-classic", True, "log/planner")
    assert (settings.connector, settings.budget.max_gpus, settings.budget.min_gpus) == ("process", 8, 1)
    assert settings.classic.load == PlanningSettings().classic.load  # the same names, and the same defaults


def test_an_option_that_is_a_constant_here_says_whether_its_value_is_the_same() -> None:
    for given, why in ((5, "as here"), (8, "it is fixed at 5 here")):
        imported = import_options(f"load_min_observations: {given}\n", "planner-config")
        assert plain(imported)["load_min_observations"] == ({}, why)
    unbounded = import_options("max_gpu_budget: -1\n", "load-classic")
    assert not unbounded.notes[0].became and "set planner.budget.max_gpus" in unbounded.notes[0].why


def test_options_as_a_deployments_yaml_are_the_same(tmp_path: Path) -> None:
    text = "Frontend:\n  port: 8000\nPlanner:\n  environment: local\n  no-operation: false\n  log-dir: log/planner\n"
    text += "  decode-kv-scale-up-threshold: 0.8\n"
    imported = import_options(text)
    assert set(plain(imported)) == {"environment", "no-operation", "log-dir", "decode-kv-scale-up-threshold"}
    settings = accepted(imported, tmp_path)
    assert settings.classic.load.decode_kv_scale_up_threshold == 0.8 and not settings.advisory
    flags = import_options("dynamo serve graphs:F -f d.yaml --Planner.environment=local --Planner.log-dir=log/planner")
    assert set(plain(flags)) >= {"--Planner.environment", "--Planner.log-dir"}


def test_the_planner_with_correction_factors(tmp_path: Path) -> None:
    imported = import_options(EARLY.replace("\n", " "))
    assert imported.generation == "sla-classic"
    assert {told.option for told in imported.left} == {"--backend", "--isl", "--osl"}
    settings = accepted(imported, tmp_path)
    assert (settings.policy, loaded(imported, tmp_path).slo) == ("sla-classic", Slo(ttft=0.5, itl=0.05))
    assert settings.classic.sla.no_correction and settings.classic.forecast.predictor == "prophet"
    assert settings.classic.profile == "profiling_results" and settings.metrics_port == 9085
    later = import_options("planner --no-correction --ttft 200 --itl 20")
    assert loaded(later, tmp_path).slo.ttft == 0.2
    assert "read as milliseconds" in plain(later)["--ttft"][1]


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, "throughput-fpm"),
        ({"enable_load_scaling": True}, "hybrid"),
        ({"enable_throughput_scaling": False, "enable_load_scaling": True}, "load-fpm-1.6"),
    ],
)
def test_which_loops_run_says_the_policy(options: dict[str, Any], policy: str, tmp_path: Path) -> None:
    imported = import_options(json.dumps({"optimization_target": "sla", **options}))
    settings = accepted(imported, tmp_path)
    assert (settings.policy, settings.optimization_target) == (policy, "sla")
    assert loaded(imported, tmp_path).slo == Slo(ttft=0.5, itl=0.05)  # its defaults, where nothing else is said


def test_what_is_not_given_keeps_its_meaning(tmp_path: Path) -> None:
    imported = import_options("ttft: 300\n")
    settings = accepted(imported, tmp_path)
    assert (settings.optimization_target, settings.mode, settings.budget.max_gpus) == ("throughput", "disaggregated", 8)
    assert {told.option for told in imported.notes if told.implied} == {"optimization_target", "mode", "max_gpu_budget"}


def external(**plugin: Any) -> dict[str, Any]:
    return {"scheduling": {"external_plugins": [plugin]}}


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"ttft_ms": "fast"}, "ttft_ms", "its value can't be read"),
        ({"ttft_ms": -3}, "ttft_ms", "slo.ttft"),
        ({"ttft_ms": math.nan}, "ttft_ms", "slo.ttft"),
        ({"mode": "both"}, "mode", "it takes one of disagg"),
        ({"environment": "nomad"}, "environment", "it takes kubernetes, virtual, local or global-planner"),
        ({"max_gpu_budget": 1.5}, "max_gpu_budget", "not a whole number"),
        ({"enable_load_scaling": True}, "enable_load_scaling", "without effect"),
        (
            {"throughput_metric_source": "router", "mode": "agg"},
            "throughput_metric_source",
            "did you mean throughput_metrics_source",
        ),
        ({"total_gpu_power_limit": 300}, "total_gpu_power_limit", "enable_power_awareness is false"),
        ({"decode_engine_num_gpu": 4}, "decode_engine_num_gpu", "models.NAME.pools.POOL.gpus: 4"),
        (external(**{**PLUGIN, "plugin_type": "cook"}), "scheduling.external_plugins", "stage"),
        (external(plugin_id="x"), "scheduling.external_plugins", "it lacks 'endpoint'"),
        (external(**{**PLUGIN, "endpoint": "inproc://x"}), "scheduling.external_plugins", "in process"),
    ],
)
def test_what_can_not_be_translated_says_why(options: dict[str, Any], name: str, words: str, tmp_path: Path) -> None:
    imported = import_options(yaml.safe_dump(options), "planner-config")
    became, why = plain(imported)[name]
    assert not became and words in why
    accepted(imported, tmp_path)  # and what is left of it is a config all the same


@pytest.mark.parametrize("text", ["", "[1, 2]", "42", "a: [", "python planner.py", "'--open"])
def test_only_what_can_not_be_read_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        import_options(text)
    (tmp_path / "f").write_text(text)
    assert CliRunner().invoke(cli, ["config", "import", str(tmp_path / "f")]).exit_code != 0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("throughput_metric_source: router\n", "did you mean throughput_metrics_source"),
        ('{"foo": 1, "bar": 2}', "foo, bar"),
        ("python -m dynamo.vllm --model m --tensor-parallel-size 2", "--model"),
        ("apiVersion: apps/v1\nkind: Deployment\nspec: {replicas: 3}\n", "apiVersion, kind, spec"),
        ("kind: DynamoGraphDeployment\nspec: {services: {Worker: {componentType: worker}}}\n", "Worker"),
        ("kind: DynamoGraphDeployment\nspec: {}\n", "no frontend and no planner"),
    ],
)
@pytest.mark.parametrize("generation", [None, "planner-config"])
def test_what_nothing_is_known_of_is_an_error_and_not_a_set_of_defaults(
    text: str, names: str, generation: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        import_options(text, generation)
    assert names in str(caught.value)
    (tmp_path / "f").write_text(text)
    done = CliRunner().invoke(cli, ["config", "import", str(tmp_path / "f")])
    assert done.exit_code != 0 and "planner:" not in done.stdout


def test_kubernetes_is_our_connector_and_its_prometheus_the_one_of_the_cluster(tmp_path: Path) -> None:
    imported = import_options("environment: kubernetes\nnamespace: team-chat\n")
    settings = accepted(imported, tmp_path)
    assert (settings.connector, settings.source, settings.kubernetes.target) == ("kubernetes", "prometheus", None)
    assert settings.prometheus.url.startswith("http://prometheus-kube-prometheus-prometheus.monitoring")
    assert settings.prometheus.namespace == "team-chat"
    assert "metric_pulling_prometheus_endpoint" in {told.option for told in imported.notes if told.implied}
    classic = import_options("planner_sla --environment=kubernetes --adjustment-interval=60 --no-correction")
    assert accepted(classic, tmp_path).connector == "kubernetes"
    ours = import_options("environment: kubernetes\nmetric_pulling_prometheus_endpoint: http://p:9090\n")
    assert accepted(ours, tmp_path).prometheus.url == "http://p:9090"


PLANNED = {"environment": "kubernetes", "optimization_target": "sla", "ttft_ms": 300, "max_gpu_budget": 16}
FRONTEND_ARGS = ["--router-mode", "kv", "--router-temperature", "0.5"]
PLANNER_ARGS = ["--config", json.dumps(PLANNED)]


def manifest(version: str, frontend: dict[str, Any], planner: dict[str, Any]) -> dict[str, Any]:
    """A graph of either version; the two programs' ``command``, ``args`` and ``env``."""
    worker: dict[str, Any] = {"args": ["--model", "m"]}
    parts = {"Frontend": ("frontend", frontend), "Planner": ("planner", planner), "VllmWorker": ("worker", worker)}
    spec: dict[str, Any]
    if version == "v1alpha1":
        spec = {
            "services": {
                name: {"componentType": kind, "extraPodSpec": {"mainContainer": {"image": "i", **container}}}
                for name, (kind, container) in parts.items()
            }
        }
    else:
        side = {"name": "sidecar", "args": ["--router-mode", "random"]}
        spec = {
            "components": [
                {"name": name, "type": kind, "podTemplate": {"spec": {"containers": [side, {"name": "main", **c}]}}}
                for name, (kind, c) in parts.items()
            ]
        }
    metadata = {"name": "chat", "namespace": "team"}
    return {
        "apiVersion": f"nvidia.com/{version}",
        "kind": "DynamoGraphDeployment",
        "metadata": metadata,
        "spec": spec,
    }


SHELL = {"command": ["/bin/sh", "-c"], "args": ["python3 -m dynamo.frontend " + " ".join(FRONTEND_ARGS)]}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arguments": ({"args": FRONTEND_ARGS}, {"command": ["python3", "-m", "dynamo.planner"], "args": PLANNER_ARGS}),
    "a shell": (SHELL, {"command": ["python3", "-m", "dynamo.planner", *PLANNER_ARGS]}),
    "environment": (
        {"env": [{"name": "DYN_ROUTER_MODE", "value": "kv"}, {"name": "DYN_ROUTER_TEMPERATURE", "value": "0.5"}]},
        {"args": PLANNER_ARGS, "env": [{"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
    ),
    "a ConfigMap": ({"args": FRONTEND_ARGS}, {"args": ["--config", "/etc/planner/planner_config.json"]}),
}


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
@pytest.mark.parametrize("way", WAYS)
def test_options_inside_manifests_reach_the_result(version: str, way: str, tmp_path: Path) -> None:
    files = {"kind": "ConfigMap", "data": {"planner_config.json": json.dumps(PLANNED)}}
    imported = import_options(yaml.safe_dump_all([files, manifest(version, *WAYS[way])]))
    assert imported.generation == "frontend and planner-config"
    settings = loaded(imported, tmp_path)
    assert (settings.router.mode, settings.router.cost.temperature) == ("kv", 0.5)
    planner = settings.planner
    assert (planner.connector, planner.kubernetes.target) == ("kubernetes", "DynamoGraphDeployment/chat")
    assert (settings.slo.ttft, planner.budget.max_gpus, planner.policy) == (0.3, 16, "throughput-fpm")
    assert "VllmWorker" in {told.option for told in imported.left}
    only = import_options(yaml.safe_dump_all([files, manifest(version, *WAYS[way])]), "frontend")
    assert only.generation == "frontend" and "planner" not in only.settings


def test_a_planner_of_older_options_in_a_manifest_is_of_kubernetes_all_the_same(tmp_path: Path) -> None:
    args = ["--backend=vllm", "--adjustment-interval=60", "--no-correction", "--ttft=200"]
    env = [{"name": "PROMETHEUS_ENDPOINT", "value": "http://p:9090"}, {"name": "DYN_NAMESPACE", "value": "team-chat"}]
    graph = manifest("v1alpha1", {}, {"command": ["python3", "-m", "planner_sla"], "args": args, "env": env})
    imported = import_options(yaml.safe_dump(graph))
    settings = loaded(imported, tmp_path)
    assert (settings.planner.policy, settings.planner.connector) == ("sla-classic", "kubernetes")
    assert (settings.planner.prometheus.url, settings.planner.prometheus.namespace) == ("http://p:9090", "team-chat")
    assert settings.planner.classic.sla.adjustment_interval == 60 and settings.slo.ttft == 0.2
    assert settings.router.mode == "round_robin", "a frontend without options has Dynamo's default"


@pytest.mark.parametrize(
    "spec",
    [
        {"sla": {"ttft": 200, "itl": 20}, "features": {"planner": {"optimization_target": "sla", "mode": "agg"}}},
        {"profilingConfig": {"config": {"sla": {"ttft": 200, "itl": 20}, "planner": {"planner_min_endpoint": 2}}}},
    ],
)
def test_a_deployment_request_of_either_version_is_read(spec: dict[str, Any], tmp_path: Path) -> None:
    request = {"kind": "DynamoGraphDeploymentRequest", "spec": {"model": "m", **spec}}
    imported = import_options(yaml.safe_dump(request))
    assert accepted(imported, tmp_path).connector == "kubernetes"
    assert loaded(imported, tmp_path).slo == Slo(ttft=0.2, itl=0.02)
    assert not [told for told in imported.left if "no such option" in told.why]


def test_a_config_of_the_whole_deployment_is_looked_into() -> None:
    request = {"spec": {"model": "m", "features": {"planner": {"optimization_target": "load", "mode": "agg"}}}}
    assert import_options(yaml.safe_dump(request)).planner["optimization_target"] == "load"
    inline = import_options("python -m dynamo.planner --config '" + json.dumps({"mode": "agg"}) + "'")
    assert inline.planner["mode"] == "aggregated"


def test_the_command_prints_the_section_and_names_each_option(tmp_path: Path) -> None:
    file, out = tmp_path / "planner.json", tmp_path / "planner.yaml"
    file.write_text(json.dumps({"mode": "agg", "backend": "vllm", "max_gpu_budget": 4}))
    done = CliRunner().invoke(cli, ["config", "import", str(file)], standalone_mode=False)
    assert yaml.safe_load(done.stdout)["planner"]["mode"] == "aggregated"
    assert "max_gpu_budget (4) became planner.budget.max_gpus = 4" in done.stderr
    assert "backend (vllm) became nothing: engines are said by the pools" in done.stderr
    assert "3 options translated, 1 not (planner-config)." in done.stderr
    CliRunner().invoke(cli, ["config", "import", str(file), "--out", str(out)], standalone_mode=False)
    assert load(out).settings.planner.budget.max_gpus == 4
    told = json.loads(CliRunner().invoke(cli, ["config", "import", str(file), "--json"], standalone_mode=False).stdout)
    assert {one["option"] for one in told["options"]} == {"mode", "backend", "max_gpu_budget", "optimization_target"}
    missing = CliRunner().invoke(cli, ["config", "import", str(tmp_path / "none")], standalone_mode=False)
    assert isinstance(missing.exception, ConfigError)
