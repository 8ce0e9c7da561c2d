"""The API server over plain HTTP: versions, watches, patches, server-side apply, CRDs, deletion, discovery.

The double is one process for all of these; with PENSTOCK_KUBECONFIG they run against that cluster instead.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.api_client import APPLY, JSON, MERGE, STRATEGIC, ApiClient
from tests.kubernetes.widget_kind import GROUP, NAME, deployment, pod, widget, widget_definition

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture
def config_maps(namespace: str) -> str:
    """The path of a namespace's ConfigMaps."""
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture
def deployments(namespace: str) -> str:
    """The path of a namespace's Deployments."""
    return f"/apis/apps/v1/namespaces/{namespace}/deployments"


@pytest.fixture
def widgets(api: ApiClient, namespace: str) -> Iterator[str]:
    """The path of a namespace's widgets, while their kind is defined."""
    api.post(DEFINITIONS, widget_definition())
    deadline = time.monotonic() + 10
    while api.send("GET", f"/apis/{GROUP}/v1/widgets")[0] != 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    yield f"/apis/{GROUP}/v1/namespaces/{namespace}/widgets"
    api.send("DELETE", f"{DEFINITIONS}/{NAME}")
    while api.send("GET", f"{DEFINITIONS}/{NAME}")[0] != 404 and time.monotonic() < deadline:
        time.sleep(0.1)


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_a_write_on_an_old_version_is_a_conflict(api: ApiClient, config_maps: str) -> None:
    first = api.post(config_maps, config_map("a", x="1"))
    second = api.put(f"{config_maps}/a", first | {"data": {"x": "2"}})
    assert int(second["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])
    code, status = api.send("PUT", f"{config_maps}/a", first | {"data": {"x": "3"}})
    assert (code, status["reason"], status["details"]["name"]) == (409, "Conflict", "a")
    assert "the object has been modified" in status["message"]
    assert api.send("POST", config_maps, config_map("a"))[1]["reason"] == "AlreadyExists"
    assert api.send("GET", f"{config_maps}/b")[1]["message"] == 'configmaps "b" not found'


def test_a_write_that_changes_nothing_makes_no_version(api: ApiClient, config_maps: str) -> None:
    first = api.post(config_maps, config_map("a", x="1"))
    assert api.patch(f"{config_maps}/a", {"data": {"x": "1"}}) == first


def test_dry_runs_and_generated_names(api: ApiClient, config_maps: str) -> None:
    dry = api.post(config_maps, config_map("a", x="1"), dryRun="All")
    assert dry["metadata"]["uid"]
    assert api.send("GET", f"{config_maps}/a")[0] == 404
    made = api.post(config_maps, {"metadata": {"generateName": "run-"}})
    assert made["metadata"]["name"].startswith("run-")


def test_watch_events_and_labels_that_come_and_go(api: ApiClient, config_maps: str) -> None:
    start = api.get(config_maps)["metadata"]["resourceVersion"]
    api.post(config_maps, config_map("a"))
    api.patch(f"{config_maps}/a", {"metadata": {"labels": {"app": "x"}}})
    api.patch(f"{config_maps}/a", {"data": {"x": "1"}})
    api.patch(f"{config_maps}/a", {"metadata": {"labels": None}})
    api.delete(f"{config_maps}/a")
    with api.watch(config_maps, resourceVersion=start, timeoutSeconds="1") as events:
        assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "MODIFIED", "MODIFIED", "DELETED"]
    with api.watch(config_maps, resourceVersion=start, timeoutSeconds="1", labelSelector="app=x") as events:
        assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "DELETED"]


def test_a_streamed_list_ends_with_a_bookmark(api: ApiClient, config_maps: str) -> None:
    api.post(config_maps, config_map("a"))
    query = {"sendInitialEvents": "true", "allowWatchBookmarks": "true", "resourceVersionMatch": "NotOlderThan"}
    with api.watch(config_maps, timeoutSeconds="2", fieldSelector="metadata.name=a", **query) as events:
        first, mark = next(events), next(events)
    assert (first["type"], first["object"]["metadata"]["name"], mark["type"]) == ("ADDED", "a", "BOOKMARK")
    assert mark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_a_version_of_the_future_is_a_timeout(api: ApiClient, config_maps: str) -> None:
    for query in ({"resourceVersionMatch": "NotOlderThan"}, {"watch": "true", "timeoutSeconds": "1"}):
        code, status = api.send("GET", config_maps, resourceVersion="99999999999", **query)
        assert (code, status["reason"]) == (504, "Timeout")
        assert status["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


def test_lists_in_pages_show_one_moment(api: ApiClient, config_maps: str) -> None:
    for name in ("a", "b", "c"):
        api.post(config_maps, config_map(name), fieldManager="test")
    first = api.get(config_maps, limit="2", labelSelector="!other")
    api.post(config_maps, config_map("b2"))
    names = [item["metadata"]["name"] for item in first["items"]]
    rest = api.get(config_maps, limit="9", labelSelector="!other", **{"continue": first["metadata"]["continue"]})
    names += [item["metadata"]["name"] for item in rest["items"]]
    assert names == ["a", "b", "c", "kube-root-ca.crt"]
    assert rest["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("app=x", ["a"]),
        ("app!=x", ["b", "c"]),
        ("app in (x, y)", ["a", "b"]),
        ("app notin (x),app", ["b"]),
        ("!app", ["c"]),
        ("app,tier=front", ["a"]),
    ],
)
def test_label_selectors(api: ApiClient, namespace: str, selector: str, names: list[str]) -> None:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    for name, labels in (("a", {"app": "x", "tier": "front"}), ("b", {"app": "y"}), ("c", {})):
        api.post(path, {"metadata": {"name": name, "labels": labels}})
    assert [item["metadata"]["name"] for item in api.get(path, labelSelector=selector)["items"]] == names


def test_field_selectors(api: ApiClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    api.post(path, pod("a"))
    assert len(api.get(path, fieldSelector="status.phase=Pending,metadata.name=a")["items"]) == 1
    code, status = api.send("GET", path, fieldSelector="spec.colour=red")
    assert (code, status["reason"]) == (400, "BadRequest")
    assert "spec.colour" in status["message"]


def test_json_patch_and_merge_patch(api: ApiClient, config_maps: str) -> None:
    api.post(config_maps, config_map("a", x="1", y="2"))
    assert api.patch(f"{config_maps}/a", {"data": {"x": None, "z": "3"}}, MERGE)["data"] == {"y": "2", "z": "3"}
    patch = [{"op": "test", "path": "/data/y", "value": "2"}, {"op": "replace", "path": "/data/y", "value": "4"}]
    assert api.patch(f"{config_maps}/a", patch, JSON)["data"] == {"y": "4", "z": "3"}
    assert api.send("PATCH", f"{config_maps}/a", patch, JSON)[0] == 422


def test_strategic_merge_patch_knows_lists_with_keys(api: ApiClient, deployments: str) -> None:
    api.post(deployments, deployment())
    add = {"name": "proxy", "image": "proxy:1"}
    patch = {
        "spec": {"template": {"spec": {"containers": [add, {"name": "engine", "env": [{"name": "B", "value": "2"}]}]}}}
    }
    containers = api.patch(f"{deployments}/web", patch, STRATEGIC)["spec"]["template"]["spec"]["containers"]
    by_name = {each["name"]: each for each in containers}
    assert by_name["engine"]["image"] == "sim:1"
    assert {each["name"]: each["value"] for each in by_name["engine"]["env"]} == {"A": "1", "B": "2"}
    remove = {"spec": {"template": {"spec": {"containers": [{"name": "proxy", "$patch": "delete"}]}}}}
    left = api.patch(f"{deployments}/web", remove, STRATEGIC)["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in left] == ["engine"]


def test_generations_count_changes_of_the_spec_alone(api: ApiClient, deployments: str) -> None:
    api.post(deployments, deployment())
    labelled = api.patch(f"{deployments}/web", {"metadata": {"labels": {"a": "b"}}})
    assert labelled["metadata"]["generation"] == 1
    ready = api.patch(f"{deployments}/web/status", {"status": {"observedGeneration": 1}, "spec": {"replicas": 9}})
    assert (ready["metadata"]["generation"], ready["spec"]["replicas"]) == (1, 2)
    changed = api.patch(f"{deployments}/web", {"spec": {"replicas": 3}, "status": {"observedGeneration": 7}})
    assert (changed["metadata"]["generation"], changed["status"]["observedGeneration"]) == (2, 1)


def test_scale_is_a_resource_of_its_own(api: ApiClient, deployments: str) -> None:
    api.post(deployments, deployment())
    scale = api.get(f"{deployments}/web/scale")
    assert (scale["kind"], scale["spec"], scale["status"]["selector"]) == ("Scale", {"replicas": 2}, "app=web")
    assert api.patch(f"{deployments}/web/scale", {"spec": {"replicas": 5}})["spec"] == {"replicas": 5}
    code, status = api.send("PUT", f"{deployments}/web/scale", scale)
    assert (code, status["reason"]) == (409, "Conflict")
    assert api.get(f"{deployments}/web")["spec"]["replicas"] == 5
    assert api.send("PATCH", f"{deployments}/web/scale", {"spec": {"replicas": -1}}, MERGE)[0] == 422


def test_rules_of_built_in_kinds(api: ApiClient, deployments: str) -> None:
    wrong = deployment()
    wrong["spec"]["template"]["metadata"]["labels"] = {"app": "other"}
    code, status = api.send("POST", deployments, wrong)
    assert (code, status["reason"]) == (422, "Invalid")
    assert status["details"]["causes"][0]["field"] == "spec.template.metadata.labels"
    typo = deployment()
    typo["spec"]["replica"] = 3
    code, status = api.send("POST", deployments, typo, fieldValidation="Strict")
    assert (code, 'unknown field "spec.replica"' in status["message"]) == (400, True)
    text = deployment()
    text["spec"]["replicas"] = "three"
    assert api.send("POST", deployments, text)[0] == 400
    api.post(deployments, deployment())
    code, status = api.send("PATCH", f"{deployments}/web", {"spec": {"selector": {"matchLabels": {"app": "x"}}}}, MERGE)
    assert (code, "immutable" in status["message"] or "selector" in status["message"]) == (422, True)
    assert api.send("POST", deployments, deployment("Bad_Name"))[0] == 422


def test_server_side_apply_with_two_managers(api: ApiClient, deployments: str) -> None:
    path = f"{deployments}/web"
    api.apply(path, deployment(), "chart")
    code, status = api.send("PATCH", path, deployment(replicas=4), APPLY, fieldManager="planner")
    assert (code, status["reason"]) == (409, "Conflict")
    assert status["details"]["causes"][0]["field"] == ".spec.replicas"
    assert '"chart"' in status["message"]
    api.apply(path, deployment(replicas=4), "planner", force="true")
    owners = {entry["manager"]: entry["fieldsV1"] for entry in api.get(path)["metadata"]["managedFields"]}
    assert "f:replicas" in owners["planner"]["f:spec"]
    assert "f:replicas" not in owners["chart"]["f:spec"]
    assert api.apply(path, deployment(replicas=None), "chart")["spec"]["replicas"] == 4, "it is the planner's now"


def test_server_side_apply_removes_what_its_manager_says_no_more(api: ApiClient, deployments: str) -> None:
    path, more = f"{deployments}/web", deployment()
    container = more["spec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "B", "value": "2"})
    more["metadata"]["labels"] = {"tier": "front"}
    api.apply(path, more, "chart")
    api.patch(path, {"metadata": {"labels": {"mine": "yes"}}}, fieldManager="somebody")
    item = api.apply(path, deployment(), "chart")
    assert item["metadata"]["labels"] == {"mine": "yes"}
    assert [each["name"] for each in item["spec"]["template"]["spec"]["containers"][0]["env"]] == ["A"]
    again = api.apply(path, deployment(), "chart")
    assert again["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]


def test_custom_resources_are_checked_pruned_and_given_defaults(api: ApiClient, widgets: str) -> None:
    made = api.post(widgets, widget("a", oops=1, free={"any": [1]}, limit="50%"))
    assert made["spec"] == {"size": 3, "colour": "red", "replicas": 1, "free": {"any": [1]}, "limit": "50%"}
    code, status = api.send("POST", widgets, widget("b", size=99, colour="green"))
    assert (code, status["reason"]) == (422, "Invalid")
    fields = {cause["field"]: cause["reason"] for cause in status["details"]["causes"]}
    assert fields == {"spec.size": "FieldValueInvalid", "spec.colour": "FieldValueNotSupported"}
    no_size = {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "metadata": {"name": "c"}, "spec": {}}
    code, status = api.send("POST", widgets, no_size)
    assert (code, status["details"]["causes"][0]["field"]) == (422, "spec.size")
    code, status = api.send("POST", widgets, widget("d", oops=1), fieldValidation="Strict")
    assert (code, 'unknown field "spec.oops"' in status["message"]) == (400, True)
    older = api.get(widgets.replace("/v1/", "/v1alpha1/") + "/a")
    assert (older["apiVersion"], older["spec"]["size"]) == (f"{GROUP}/v1alpha1", 3)


def test_custom_resources_have_status_scale_and_owned_list_items(api: ApiClient, widgets: str) -> None:
    api.apply(f"{widgets}/a", widget("a", parts=[{"name": "x", "count": 1}]), "one")
    api.apply(f"{widgets}/a", {**widget("a", parts=[{"name": "y", "count": 2}])}, "two")
    parts = api.get(f"{widgets}/a")["spec"]["parts"]
    assert {part["name"]: part["count"] for part in parts} == {"x": 1, "y": 2}
    api.patch(f"{widgets}/a/status", {"status": {"replicas": 1, "selector": "app=a"}})
    scale = api.patch(f"{widgets}/a/scale", {"spec": {"replicas": 4}})
    assert (scale["spec"], scale["status"]) == ({"replicas": 4}, {"replicas": 1, "selector": "app=a"})
    item = api.get(f"{widgets}/a")
    assert (item["spec"]["replicas"], item["metadata"]["generation"]) == (4, 3)


def test_a_definition_that_is_not_structural_is_refused(api: ApiClient) -> None:
    definition = widget_definition()
    version = definition["spec"]["versions"][0]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["size"]["type"]
    version["storage"] = False
    code, status = api.send("POST", DEFINITIONS, definition)
    assert (code, status["reason"]) == (422, "Invalid")
    assert any("size" in cause["field"] for cause in status["details"]["causes"])
    assert any("storage" in cause["message"] for cause in status["details"]["causes"])


def test_a_status_is_applied_and_owned_apart(api: ApiClient, widgets: str) -> None:
    api.apply(f"{widgets}/a", widget("a"), "user")
    status = {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "status": {"phase": "Ready"}}
    item = api.apply(f"{widgets}/a/status", status, "operator")
    assert (item["spec"]["size"], item["status"]) == (3, {"phase": "Ready"})
    owners = {entry["manager"]: entry for entry in item["metadata"]["managedFields"]}
    assert owners["operator"]["subresource"] == "status"
    assert owners["operator"]["fieldsV1"] == {"f:status": {"f:phase": {}}}
    assert api.apply(f"{widgets}/a", widget("a", size=4), "user")["status"] == {"phase": "Ready"}


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": [1]},
        {"metadata": {"name": 7}},
        {"metadata": {"name": "a", "labels": {"a": 1}}},
        {"metadata": {"name": "a"}, "spec": "text"},
        {"metadata": {"name": "a"}, "spec": {"template": {"spec": {"containers": [None]}}}},
        {"kind": "Pod", "metadata": {"name": "a"}},
    ],
)
def test_what_has_wrong_types_is_a_bad_request(api: ApiClient, deployments: str, body: dict[str, Any]) -> None:
    code, status = api.send("POST", deployments, body)
    assert (code, status["reason"], status["kind"]) == (400, "BadRequest", "Status")


def test_tables_have_the_columns_of_a_definition(api: ApiClient, widgets: str) -> None:
    api.post(widgets, widget("a"))
    accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
    _, table = api.send("GET", widgets, accept=accept)
    assert [(each["name"], each["priority"]) for each in table["columnDefinitions"]] == [
        ("Name", 0),
        ("Size", 0),
        ("Colour", 1),
        ("Age", 0),
    ]
    assert table["rows"][0]["cells"][:3] == ["a", 3, "red"]


def test_finalizers_delay_a_deletion(api: ApiClient, config_maps: str) -> None:
    api.post(config_maps, {"metadata": {"name": "a", "finalizers": ["penstock.io/test"]}})
    assert api.delete(f"{config_maps}/a")["metadata"]["deletionTimestamp"]
    assert api.send("DELETE", f"{config_maps}/a")[0] == 200
    item = api.get(f"{config_maps}/a")
    code, _ = api.send("PUT", f"{config_maps}/a", item | {"metadata": {**item["metadata"], "finalizers": []}})
    assert code == 200
    assert api.send("GET", f"{config_maps}/a")[0] == 404


def test_deletions_have_preconditions_and_policies(api: ApiClient, deployments: str) -> None:
    item = api.post(deployments, deployment())
    options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": "another"}}
    assert api.send("DELETE", f"{deployments}/web", options)[0] == 409
    right = {"uid": item["metadata"]["uid"]}
    options |= {"preconditions": right, "propagationPolicy": "Foreground", "dryRun": ["All"]}
    assert api.send("DELETE", f"{deployments}/web", options)[0] == 200
    assert "deletionTimestamp" not in api.get(f"{deployments}/web")["metadata"]


def test_a_namespace_ends_with_its_last_object(api: ApiClient, config_maps: str, namespace: str) -> None:
    api.post(config_maps, {"metadata": {"name": "a", "finalizers": ["penstock.io/test"]}})
    api.delete(f"/api/v1/namespaces/{namespace}")
    code, status = api.send("POST", config_maps, config_map("b"))
    assert (code, "being terminated" in status["message"]) == (403, True)
    assert api.get(f"/api/v1/namespaces/{namespace}")["status"]["phase"] == "Terminating"
    api.patch(f"{config_maps}/a", {"metadata": {"finalizers": None}})
    deadline = time.monotonic() + 20
    while api.send("GET", f"/api/v1/namespaces/{namespace}")[0] != 404:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_discovery_names_every_kind(api: ApiClient) -> None:
    listed = {group["name"] for group in api.get("/apis")["groups"]}
    assert {"apps", "policy", "coordination.k8s.io", "discovery.k8s.io"} <= listed
    assert "deployments/scale" in {each["name"] for each in api.get("/apis/apps/v1")["resources"]}
    names = {each["name"]: each for each in api.get("/api/v1")["resources"]}
    assert "po" in names["pods"]["shortNames"]
    assert "pods/portforward" in names
    paths = api.get("/openapi/v3")["paths"]
    schemas = api.get(paths["apis/apps/v1"]["serverRelativeURL"])["components"]["schemas"]
    assert "replicas" in schemas["io.k8s.api.apps.v1.DeploymentSpec"]["properties"]


def test_leases_have_microseconds(api: ApiClient, namespace: str) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2026-11-25T07:00:00.000001Z"}
    api.post(path, {"metadata": {"name": "leader"}, "spec": spec})
    assert api.get(f"{path}/leader")["spec"] == spec
    assert api.send("POST", path, {"metadata": {"name": "b"}, "spec": spec | {"leaseDurationSeconds": 0}})[0] == 422
