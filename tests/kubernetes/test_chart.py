"""The Helm chart with the real helm: what it makes, what it refuses, its rights, an upgrade; and the kustomize base."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import __version__
from tests.kubernetes.conftest import RunningApi, running_double
from tests.kubernetes.setup.kustomize_base import BASE, CHART, ROOT, base_text

FILES = CHART / "files"
"""What the chart carries as it is: kustomize takes the definitions from there, too."""
KEY = "simulated.apiKey=a-key-for-this-test"
ALL = (
    "simulated.enabled=true",
    "monitoring.podMonitors=true",
    "monitoring.rules=true",
    "monitoring.dashboards=true",
    "operator.namespaces={elsewhere}",
    KEY,
)


def run(program: Path, *words: str, fails: bool = False, **environment: str) -> str:
    """Return what a program prints; where it should fail, its complaint."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
    answer = subprocess.run([str(program), *words], capture_output=True, text=True, env=env, timeout=120)
    assert (answer.returncode != 0) == fails, f"{words}: {answer.stdout}{answer.stderr}"
    return answer.stderr if fails else answer.stdout


def template(helm: Path, *values: str) -> list[Any]:
    settings = [word for value in values for word in ("--set", value)]
    return [each for each in yaml.safe_load_all(run(helm, "template", "demo", str(CHART), *settings)) if each]


def of_kind(objects: list[Any], kind: str) -> list[Any]:
    return [each for each in objects if each["kind"] == kind]


def test_the_chart_passes_helms_own_check(helm: Path) -> None:
    run(helm, "lint", "--strict", str(CHART))
    run(helm, "lint", "--strict", str(CHART), *(word for value in ALL for word in ("--set", value)))


@pytest.mark.parametrize("values", [(), ALL], ids=["operator", "everything"])
def test_every_pod_runs_without_root_and_writes_only_where_it_may(helm: Path, values: tuple[str, ...]) -> None:
    deployments = of_kind(template(helm, *values), "Deployment")
    assert deployments
    for each in deployments:
        pod = each["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["enableServiceLinks"] is False, "PENSTOCK_SERVICE_HOST is no setting"
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_the_operators_role_is_what_the_operator_needs(helm: Path) -> None:
    # The chart's file is the output of this command.
    words = ("-m", "penstock", "operator", "--rights")
    rules = yaml.safe_load(run(Path(sys.executable), *words, PYTHONPATH=str(ROOT / "src")))
    everywhere = template(helm)
    assert of_kind(everywhere, "ClusterRole")[0]["rules"] == rules
    one = template(helm, "operator.namespaces={llm,other}")
    assert not of_kind(one, "ClusterRole") and not of_kind(one, "ClusterRoleBinding")
    roles = {(each["metadata"].get("namespace"), each["metadata"]["name"]): each for each in of_kind(one, "Role")}
    assert roles["llm", "demo-penstock-operator"]["rules"] == roles["other", "demo-penstock-operator"]["rules"] == rules
    assert {each["metadata"]["namespace"] for each in of_kind(one, "RoleBinding")[:2]} == {"llm", "other"}
    args = of_kind(one, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-2:] == ["--namespace=llm", "--namespace=other"]
    assert roles[None, "demo-penstock-operator-lease"]["rules"][0]["resources"] == ["leases"]


def test_definitions_boards_and_alerts_are_those_of_deploy(helm: Path) -> None:
    objects = template(helm, *ALL)
    definitions = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "CustomResourceDefinition")}
    files = [yaml.safe_load(path.read_text()) for path in (FILES / "crds").glob("*.yaml")]
    assert len(files) == 2
    assert definitions == {each["metadata"]["name"]: each["spec"] for each in files}
    boards = {name: text for each in of_kind(objects, "ConfigMap") for name, text in each["data"].items()}
    for path in (FILES / "grafana").glob("*.json"):
        assert json.loads(boards[path.name]) == json.loads(path.read_text())
    rules = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "PrometheusRule")}
    alerts = {path.stem: yaml.safe_load(path.read_text()) for path in (FILES / "prometheus").glob("*-alerts.*")}
    assert rules == {f"demo-penstock-{stem.removesuffix('-alerts')}": each for stem, each in alerts.items()}


def test_without_the_operator_there_is_one_cluster_with_a_key_and_no_rights(helm: Path) -> None:
    objects = template(helm, "operator.enabled=false", "simulated.enabled=true", "crds.install=false", KEY)
    kinds = sorted(each["kind"] for each in objects)
    assert kinds == ["ConfigMap", "Deployment", "NetworkPolicy", "Secret", "Service"]
    assert of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    config = yaml.safe_load(of_kind(objects, "ConfigMap")[0]["data"]["penstock.yaml"])
    assert config["frontend"] == {"host": "0.0.0.0", "port": 8000} and config["runs"] == {"dir": "/run/penstock"}
    digest = template(helm, "image.digest=sha256:" + "a" * 64)
    images = [each["spec"]["template"]["spec"]["containers"][0]["image"] for each in of_kind(digest, "Deployment")]
    assert images == ["penstock@sha256:" + "a" * 64]


def test_the_key_is_the_same_however_often_it_is_rendered(helm: Path) -> None:
    keys = [of_kind(template(helm, "simulated.enabled=true", KEY), "Secret")[0]["data"] for _ in range(2)]
    assert keys[0] == keys[1]
    named = template(helm, "simulated.enabled=true", "simulated.existingSecret=ours")
    assert not of_kind(named, "Secret")
    (pod,) = [each for each in of_kind(named, "Deployment") if each["metadata"]["name"].endswith("simulated")]
    env = pod["spec"]["template"]["spec"]["containers"][0]["env"]
    assert env[0]["valueFrom"]["secretKeyRef"] == {"name": "ours", "key": "api-key"}


@pytest.mark.parametrize("release", ["a" * 53, "my-penstock-" + "b" * 41, "penstock", "a"])
def test_names_are_short_enough_whatever_a_release_is_called(helm: Path, release: str) -> None:
    words = [word for value in ALL for word in ("--set", value)]
    objects = [each for each in yaml.safe_load_all(run(helm, "template", release, str(CHART), *words)) if each]
    ours = [each["metadata"]["name"] for each in objects if each["kind"] != "CustomResourceDefinition"]
    assert max(map(len, ours)) <= 63
    other = run(helm, "template", release[:-1] + "z", str(CHART), *words)
    assert not {each["metadata"]["name"] for each in yaml.safe_load_all(other) if each} & set(ours), (
        "two in a namespace"
    )


def test_pods_have_probes_and_what_a_cluster_asks_of_pods_and_no_user_by_number(helm: Path) -> None:
    values = []
    for part in ("operator", "simulated"):
        values += [f"{part}.podAnnotations.team=a", f"{part}.priorityClassName=high"]
        values += [f"{part}.env[0].name=HTTPS_PROXY", f"{part}.env[0].value=proxy"]
    annotated = "operator.serviceAccountAnnotations.role=arn"
    objects = template(helm, *ALL, *values, annotated)
    assert of_kind(objects, "ServiceAccount")[0]["metadata"]["annotations"] == {"role": "arn"}
    for each in of_kind(objects, "Deployment"):
        made = each["spec"]["template"]
        (container,) = made["spec"]["containers"]
        assert made["metadata"]["annotations"]["team"] == "a" and made["spec"]["priorityClassName"] == "high"
        assert {"name": "HTTPS_PROXY", "value": "proxy"} in container["env"]
        assert {"livenessProbe", "readinessProbe", "startupProbe"} <= container.keys()
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & made["spec"]["securityContext"].keys()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("operator.replicas=0", "operator/replicas"),
        ("operator.replcas=2", "replcas"),
        ("image.digest=latest", "image/digest"),
        ("simulated.service.type=Ingress", "simulated/service/type"),
        ("monitoring.rules=maybe", "monitoring/rules"),
        ("operator.namespaces={Llm}", "operator/namespaces"),
        ("simulated.enabled=true", "set simulated.apiKey, or simulated.existingSecret"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_their_place(helm: Path, value: str, words: str) -> None:
    assert words in run(helm, "template", "demo", str(CHART), "--set", value, fails=True)


def test_an_api_server_takes_every_object(helm: Path, kubectl: Path, api_server: RunningApi, tmp_path: Path) -> None:
    objects = [each for each in template(helm, *ALL, "operator.namespaces=null") if "coreos" not in each["apiVersion"]]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(objects))
    words = ("apply", "--server-side", "--dry-run=server", "-f", str(tmp_path / "all.yaml"))
    said = run(kubectl, "--kubeconfig", str(api_server.kubeconfig), *words, HOME=str(tmp_path))
    assert len(said.splitlines()) == len(objects)


@pytest.fixture
def older_chart(tmp_path: Path) -> Iterator[Path]:
    """The chart as a version before this one: with another number, and a definition that had one column less."""
    older = tmp_path / "older"
    shutil.copytree(CHART, older)
    chart = yaml.safe_load((older / "Chart.yaml").read_text())
    (older / "Chart.yaml").write_text(yaml.safe_dump({**chart, "version": "0.0.9", "appVersion": "0.0.9"}))
    path = older / "files" / "crds" / "penstockclusters.yaml"
    definition = yaml.safe_load(path.read_text())
    definition["spec"]["versions"][0]["additionalPrinterColumns"].pop()
    path.write_text(yaml.safe_dump(definition))
    yield older


@pytest.fixture
def empty_api(tmp_path: Path) -> Iterator[RunningApi]:
    """A double of a test's own, in which nobody has put our definitions: helm takes over no object of others."""
    folder = tmp_path / "api"
    folder.mkdir()
    with running_double(folder) as server:
        yield server


def test_an_upgrade_brings_new_definitions_and_leaves_the_key_and_the_users_resources(
    helm: Path, kubectl: Path, empty_api: RunningApi, older_chart: Path, tmp_path: Path
) -> None:
    place = ("--kubeconfig", str(empty_api.kubeconfig), "--namespace", "chart")

    def get(*words: str) -> Any:
        return json.loads(run(kubectl, *place, "get", *words, "-o", "json", HOME=str(tmp_path)))

    def columns() -> int:
        return len(get("crd", "penstockclusters.penstock.io")["spec"]["versions"][0]["additionalPrinterColumns"])

    values = ("--set", "simulated.enabled=true")
    run(helm, "install", "demo", str(older_chart), *place, *values, "--create-namespace", HOME=str(tmp_path))
    key, before = get("secret", "demo-penstock-simulated")["data"], columns()
    cluster = {
        "apiVersion": "penstock.io/v1alpha1",
        "kind": "PenstockCluster",
        "metadata": {"name": "mine"},
        "spec": {"models": {"sim": {"pools": {"main": {"engine": "sim", "replicas": 1}}}}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(cluster))
    run(kubectl, *place, "apply", "-f", str(tmp_path / "mine.yaml"), HOME=str(tmp_path))

    run(helm, "upgrade", "demo", str(CHART), *place, *values, HOME=str(tmp_path))
    assert columns() == before + 1
    assert get("secret", "demo-penstock-simulated")["data"] == key, "clients have it"
    image = get("deployment", "demo-penstock-operator")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"penstock:{__version__}"
    assert get("penstockcluster", "mine")["spec"]["models"]

    run(helm, "rollback", "demo", "1", *place, HOME=str(tmp_path))
    assert columns() == before
    run(helm, "uninstall", "demo", *place, HOME=str(tmp_path))
    assert get("penstockcluster", "mine")["spec"]["models"], "users' resources outlive the chart"
    run(kubectl, *place, "delete", "penstockcluster", "mine", "--wait=false", HOME=str(tmp_path))


def test_the_kustomize_base_has_the_charts_objects(helm: Path, kubectl: Path) -> None:
    assert BASE.read_text() == base_text(str(helm)), "run: python -m tests.kubernetes.setup.kustomize_base HELM"
    built = list(yaml.safe_load_all(run(kubectl, "kustomize", str(BASE.parent))))
    assert {each["kind"] for each in built} >= {"CustomResourceDefinition", "Deployment", "ClusterRole"}
    subjects = of_kind(built, "ClusterRoleBinding")[0]["subjects"]
    assert subjects[0]["namespace"] == "penstock"
