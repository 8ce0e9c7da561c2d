"""The definition of PenstockCluster: made from the knobs, structural, and as strict as the config itself."""

from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from penstock.config.derived.knobs import ANY_KEY, derive
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.cluster_crd import cluster_crd, crd_text
from penstock_kubernetes.operator.cluster_spec import merge, read_spec
from penstock_kubernetes.operator.structural_schema import LEFT_OUT

FILE = Path(__file__).parents[2] / "deploy/helm/penstock/files/crds/penstockclusters.yaml"
SCHEMA = cluster_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]


def resource(**spec: object) -> JsonObject:
    return {"metadata": {"name": "demo", "namespace": "llm", "generation": 1}, "spec": spec}


def parts(schema: JsonObject, path: str = "") -> Iterator[tuple[str, JsonObject]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from parts(part, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from parts(schema[word], f"{path}.*")


def checked(spec: JsonObject) -> list[str]:
    """Return what an API server would say of a spec: numbers below an exclusive bound are draft 4's, as there."""
    return [error.message for error in jsonschema.Draft4Validator(SPEC).iter_errors(spec)]


def test_the_file_is_what_the_command_prints() -> None:
    assert FILE.read_text() == crd_text(), f"penstock operator --crd > {FILE}"


def test_every_knob_that_is_no_secret_and_not_of_one_machine_is_in_the_schema() -> None:
    paths = {path.lstrip(".") for path, _ in parts(SPEC)}
    for knob in derive(ClusterSettings):
        name = ".".join("*" if part == ANY_KEY else part for part in knob.path)
        apart = any(name == left or name.startswith(f"{left}.") for left in LEFT_OUT) or name == "name"
        secret = knob.knob.secret and knob.path[-1] != "env"
        assert (name in paths) != (apart or secret), name


def test_replicas_and_live_knobs_replace_no_frontend_and_no_planner(tmp_path: Path) -> None:
    def lasting(replicas: int, **more: object) -> str:
        pools = {"main": {"replicas": replicas}}
        models = {"sim": {"tokenizer": "builtin:sim", "pools": pools}}
        return read_spec(resource(models=models, **more), tmp_path).lasting

    assert lasting(1) == lasting(3, frontend={"limits": {"rate": 1000}})
    assert lasting(1) != lasting(1, frontend={"port": 8100})


def test_the_schema_is_structural() -> None:
    for path, part in parts(SCHEMA):
        typed = (
            "type" in part or part.get("x-kubernetes-int-or-string") or part.get("x-kubernetes-preserve-unknown-fields")
        )
        assert typed, path
        assert "$ref" not in part and "anyOf" not in part, path
        assert not ("properties" in part and "additionalProperties" in part), path
        if part.get("default") is not None:
            assert not list(jsonschema.Draft4Validator(part).iter_errors(part["default"])), path


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"models": {"m": {"pools": {"main": {"replicas": 3, "engine": "vllm", "gpus": 2, "args": ["--x"]}}}}},
        {"slo": {"ttft": "500ms", "itl": 0.05}, "supervise": {"drain_timeout": 30}},
        {"discovery": {"ttl": "20s"}, "runs": {"records_bytes": "64MiB"}},
        {"kubernetes": {"podTemplates": {"main": {"spec": {"nodeSelector": {"gpu": "h100"}}}}}},
    ],
)
def test_a_right_spec_passes(spec: JsonObject) -> None:
    assert checked(spec) == []


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"models": {"m": {"pools": {"main": {"replicas": 0}}}}}, "0 is less than"),
        ({"models": {"m": {"pools": {"main": {"engine": "gpt"}}}}}, "'gpt' is not one of"),
        ({"supervise": {"restart_backoff": 0}}, "0 is less than or equal"),
        ({"discovery": {"ttl": "soon"}}, "'soon' does not match"),
        ({"discovery": {"ttl": True}}, "should not be valid"),
        ({"discovery": {"ttl": {"a": 1}}}, "is expected to be empty"),
        ({"discovery": {"store": "sqlite"}}, "'sqlite' is not one of"),
        ({"frontend": {"port": 70000}}, "70000 is greater than"),
        ({"kubernetes": {"gpus": -1}}, "-1 is less than"),
    ],
)
def test_a_wrong_spec_is_refused_by_the_schema_alone(spec: JsonObject, part: str) -> None:
    assert any(part in message for message in checked(spec)), checked(spec)


def test_a_spec_is_a_config(tmp_path: Path) -> None:
    spec = read_spec(resource(slo={"ttft": "250ms"}, frontend={"processes": 3}, kubernetes={"gpus": 8}), tmp_path)
    assert (spec.settings.name, spec.settings.slo.ttft, spec.frontends, spec.kubernetes.gpus) == ("demo", 0.25, 3, 8)
    assert spec.settings.discovery.kubernetes.namespace == "llm"
    assert "$(POD_IP)" in spec.config and "processes: 2" in spec.config


def test_what_no_schema_shows_is_refused_with_its_line(tmp_path: Path) -> None:
    wrong = resource(models={"m": {"pools": {"main": {"role": "prefill"}}}})
    with pytest.raises(ConfigError, match="no pool of its model answers clients"):
        read_spec(wrong, tmp_path)
    with pytest.raises(ConfigError, match=r"spec\.kubernetes"):
        read_spec(resource(kubernetes={"gpus": "many"}), tmp_path)


def test_a_pod_template_is_merged_by_the_names_of_its_parts() -> None:
    ours = {
        "spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}], "volumes": [{"name": "run"}]}
    }
    theirs = {
        "spec": {
            "containers": [{"name": "main", "env": [{"name": "B", "value": "2"}], "resources": {"limits": {"cpu": 2}}}],
            "volumes": [{"name": "models"}],
            "nodeSelector": {"gpu": "h100"},
        }
    }
    merged = merge(ours, theirs)["spec"]
    assert [entry["name"] for entry in merged["containers"][0]["env"]] == ["A", "B"]
    assert [entry["name"] for entry in merged["volumes"]] == ["run", "models"]
    assert merged["containers"][0]["resources"] == {"limits": {"cpu": 2}} and merged["nodeSelector"]
