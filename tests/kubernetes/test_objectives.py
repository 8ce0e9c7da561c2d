"""InferenceObjectives of an InferencePool are followed from the API server, in both of their groups."""

import asyncio

import pytest

pytest.importorskip("lightkube")

from lightkube import ApiError, Client, KubeConfig
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock_kubernetes.picker.objectives import GROUPS, VERSION, Objectives, follow_objectives
from tests.frontend.stand import eventually
from tests.kubernetes.conftest import RunningApi


def definition(group: str) -> CustomResourceDefinition:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": VERSION, "served": True, "storage": True, "schema": schema}
    names = {"plural": "inferenceobjectives", "singular": "inferenceobjective", "kind": "InferenceObjective"}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
    return CustomResourceDefinition.from_dict({"metadata": {"name": f"inferenceobjectives.{group}"}, "spec": spec})


async def test_objectives_of_the_pool_are_followed(api_server: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig))
    client = Client(config=KubeConfig.from_file(api_server.kubeconfig).get(), namespace="default")
    for group in GROUPS:
        try:
            client.create(definition(group))
        except ApiError as error:
            assert error.status.code == 409
    kinds = {
        group: create_namespaced_resource(group, VERSION, "InferenceObjective", "inferenceobjectives")
        for group in GROUPS
    }

    def made(group: str, name: str, pool: str, priority: int | None) -> None:
        spec = {"poolRef": {"name": pool}, **({} if priority is None else {"priority": priority})}
        client.create(kinds[group](metadata={"name": name}, spec=spec))

    made(GROUPS[0], "urgent", "chat", 9)
    made(GROUPS[1], "batch", "chat", -3)
    made(GROUPS[1], "elsewhere", "other", 5)
    objectives = Objectives("chat")
    tasks = [asyncio.create_task(follow_objectives(ClusterSettings(), objectives, group)) for group in GROUPS]
    try:
        await eventually(lambda: (objectives.priority("urgent"), objectives.priority("batch")) == (9, -3), 15)
        assert objectives.priority("elsewhere") == objectives.priority("absent") == objectives.priority(None) == 0
        made(GROUPS[0], "late", "chat", 4)
        await eventually(lambda: objectives.priority("late") == 4, 15)
        client.delete(kinds[GROUPS[0]], "urgent")
        await eventually(lambda: objectives.priority("urgent") == 0, 15)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for group, name in ((GROUPS[1], "batch"), (GROUPS[1], "elsewhere"), (GROUPS[0], "late")):
            client.delete(kinds[group], name)
        client.close()
