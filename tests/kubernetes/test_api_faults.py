"""Faults of the API server's double on demand, over HTTP; and rights, tokens and TLS of doubles of their own."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.doubles.kubernetes.api.api_faults import ApiFault
from tests.doubles.kubernetes.api.api_server import ApiServer
from tests.kubernetes.api_client import ApiClient
from tests.kubernetes.conftest import RunningApi


class Faults:
    """Begins faults at a double in another process."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def begin(self, kind: str, **options: Any) -> None:
        code, answer = self._api.send("POST", "/faults", {"kind": kind} | options)
        assert code == 200, answer


@pytest.fixture
def faults(double: RunningApi, api: ApiClient) -> Iterator[Faults]:
    """Faults that end with the test."""
    yield Faults(api)
    api.send("DELETE", "/faults")


@pytest.fixture
def path(namespace: str, api: ApiClient) -> str:
    """A ConfigMap that is there."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    api.post(path, {"metadata": {"name": "a"}})
    return path


@pytest.mark.parametrize(("kind", "code"), [("too-many-requests", 429), ("error", 500), ("unauthorized", 401)])
def test_a_fault_meets_as_many_requests_as_it_says(
    faults: Faults, api: ApiClient, path: str, kind: str, code: int
) -> None:
    faults.begin(kind, times=2, seconds=3, verbs=["patch"], resources=["configmaps"], names=["a"])
    codes = [api.send("PATCH", f"{path}/a", {"data": {"x": "1"}}, "application/merge-patch+json")[0] for _ in range(3)]
    assert (codes, api.send("GET", f"{path}/a")[0]) == ([code, code, 200], 200)


def test_too_many_requests_say_when_to_come_back(faults: Faults, double: RunningApi) -> None:
    faults.begin("too-many-requests", times=1, seconds=7)
    answer = httpx2.get(f"{double.url}/api/v1/namespaces")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert answer.json()["details"]["retryAfterSeconds"] == 7


def test_a_lost_answer_was_carried_out(faults: Faults, api: ApiClient, path: str) -> None:
    faults.begin("lost-answer", times=1, verbs=["create"])
    with pytest.raises(httpx2.TransportError):
        api.post(path, {"metadata": {"name": "b"}})
    assert api.send("POST", path, {"metadata": {"name": "b"}})[0] == 409


def test_a_watch_is_dropped(faults: Faults, api: ApiClient, path: str) -> None:
    version = api.get(path)["metadata"]["resourceVersion"]
    with api.watch(path, resourceVersion=version, timeoutSeconds="60") as events:
        faults.begin("drop-watch", times=1)
        assert list(events) == []


def test_a_forgotten_history_is_410_in_a_watch_and_in_a_list(faults: Faults, api: ApiClient, path: str) -> None:
    version = api.get(path)["metadata"]["resourceVersion"]
    api.post(path, {"metadata": {"name": "b"}})
    faults.begin("forget-history")
    with api.watch(path, resourceVersion=version, timeoutSeconds="5") as events:
        [event] = list(events)
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert api.send("GET", path, resourceVersion=version, resourceVersionMatch="Exact")[0] == 410


def test_a_stale_list_shows_what_there_was(faults: Faults, api: ApiClient, path: str) -> None:
    version = api.get(path)["metadata"]["resourceVersion"]
    faults.begin("stale-list", resources=["configmaps"])
    api.post(path, {"metadata": {"name": "b"}})
    stale = api.get(path)
    assert "b" not in [item["metadata"]["name"] for item in stale["items"]]
    assert int(stale["metadata"]["resourceVersion"]) >= int(version)
    with api.watch(path, resourceVersion=stale["metadata"]["resourceVersion"], timeoutSeconds="1") as events:
        assert [event["object"]["metadata"]["name"] for event in events] == ["b"], "a watch makes up for it"


def test_a_clock_that_is_wrong(faults: Faults, api: ApiClient, path: str) -> None:
    faults.begin("clock-skew", seconds=-86400.0)
    item = api.post(path, {"metadata": {"name": "b"}})
    assert item["metadata"]["creationTimestamp"] < api.get(f"{path}/a")["metadata"]["creationTimestamp"]


def test_a_fault_with_a_wrong_name_is_refused(double: RunningApi, api: ApiClient) -> None:
    code, answer = api.send("POST", "/faults", {"kind": "sometimes"})
    assert (code, "this is no fault" in answer["message"]) == (400, True)


async def test_an_outage_refuses_connections_and_ends_watches(tmp_path: Path) -> None:
    async with ApiServer(tmp_path) as server, httpx2.AsyncClient(timeout=10) as http:
        url = server.url
        async with http.stream("GET", f"{url}/api/v1/namespaces", params={"watch": "true"}) as watch:
            lines = watch.aiter_lines()
            await anext(lines)
            server.faults.add(ApiFault(kind="refuse", seconds=0.5))
            with pytest.raises((httpx2.TransportError, StopAsyncIteration)):
                while True:
                    await anext(lines)
        with pytest.raises(httpx2.ConnectError):
            await httpx2.AsyncClient().get(f"{url}/version")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                answer = await http.get(f"{url}/api/v1/namespaces")
                break
            except httpx2.TransportError:
                await asyncio.sleep(0.1)
        assert len(answer.json()["items"]) == 4, "the objects are still there"


async def test_rights_of_a_service_account(tmp_path: Path) -> None:
    async with ApiServer(tmp_path) as server:
        await asyncio.to_thread(_check_rights, server.url)


def _check_rights(url: str) -> None:
    space = "/api/v1/namespaces/default"
    rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    with ApiClient(url, "admin") as admin:
        admin.post(f"{space}/serviceaccounts", {"metadata": {"name": "planner"}})
        rule = {"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods", "configmaps"]}
        named = {
            "verbs": ["patch"],
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["web"],
        }
        admin.post(f"{rbac}/roles", {"metadata": {"name": "planner"}, "rules": [rule, named]})
        subject = {"kind": "ServiceAccount", "name": "planner", "namespace": "default"}
        reference = {"kind": "Role", "name": "planner", "apiGroup": "rbac.authorization.k8s.io"}
        admin.post(
            f"{rbac}/rolebindings", {"metadata": {"name": "planner"}, "subjects": [subject], "roleRef": reference}
        )
        request = {"spec": {"expirationSeconds": 600}}
        token = admin.post(f"{space}/serviceaccounts/planner/token", request)["status"]["token"]
        with ApiClient(url, token) as planner:
            assert planner.send("GET", f"{space}/pods")[0] == 200
            code, status = planner.send("GET", f"{space}/secrets")
            user = "system:serviceaccount:default:planner"
            assert (code, status["message"]) == (
                403,
                f'secrets is forbidden: User "{user}" cannot list resource "secrets" in API group "" in the '
                'namespace "default"',
            )
            assert planner.send("GET", "/api/v1/namespaces/kube-system/pods")[0] == 403
            scale = "/apis/apps/v1/namespaces/default/deployments"
            merge = "application/merge-patch+json"
            assert planner.send("PATCH", f"{scale}/web/scale", {}, merge)[0] == 404, "allowed, but there is none"
            assert planner.send("PATCH", f"{scale}/other/scale", {}, merge)[0] == 403
            review = {"spec": {"resourceAttributes": {"namespace": "default", "verb": "list", "resource": "pods"}}}
            answer = planner.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
            assert answer["status"]["allowed"]
            admin.send("POST", "/faults", {"kind": "clock-skew", "seconds": 601.0})
            assert planner.send("GET", f"{space}/pods")[0] == 401, "its ten minutes are over"
            admin.send("DELETE", "/faults")
            assert planner.send("GET", f"{space}/pods")[0] == 200
    with ApiClient(url, "made up") as stranger:
        assert stranger.send("GET", f"{space}/pods")[0] == 401
