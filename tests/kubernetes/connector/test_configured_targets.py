"""Which object the planner's connector scales: named in the settings, or by Dynamo's operator in the environment."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lightkube import AsyncClient, KubeConfig

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.planning_settings import KubernetesScaling, PlanningSettings
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.values import Pool
from penstock_kubernetes.connector.configured_targets import connector_of
from penstock_kubernetes.connector.graph_deployment import PARENT_ENV
from penstock_kubernetes.connector.kubernetes_connector import KubernetesConnector
from tests.doubles.kubernetes.api.api_server import ApiServer
from tests.kubernetes.connector.cluster_objects import (
    GRAPHS,
    NVIDIA,
    define,
    graph_alpha,
    put,
    service_alpha,
)

GRAPH = "DynamoGraphDeployment"
POOLS = {"main": Pool(model="m", role="aggregated", desired=1)}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with (
        ApiServer(tmp_path) as server,
        AsyncClient(config=KubeConfig.from_file(server.kubeconfig).get()) as client,
    ):
        yield client


def made(client: AsyncClient, models: tuple[str, ...] = ("m",), **scaling: Any) -> KubernetesConnector:
    settings = ClusterSettings(
        models={name: ModelSettings(tokenizer=None, pools={"main": PoolSettings()}) for name in models},
        planner=PlanningSettings(connector="kubernetes", kubernetes=KubernetesScaling(**scaling)),
    )
    return connector_of(client, settings, POOLS, lambda model: {"prefill": 1, "decode": 1})


async def test_the_graph_that_dynamos_operator_names_is_scaled_where_nothing_else_is_named(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await define(client, NVIDIA, GRAPH, GRAPHS, "v1alpha1")
    services = {"P": service_alpha("prefill", 1), "D": service_alpha("decode", 2)}
    await put(client, NVIDIA, "v1alpha1", GRAPH, GRAPHS, "llm", spec=graph_alpha(**services))
    monkeypatch.setenv(PARENT_ENV, "llm")
    scaling = made(client)
    await scaling.validate()
    assert {name: each.desired for name, each in (await scaling.look()).items()} == {"prefill": 1, "decode": 2}
    with pytest.raises(ConfigError, match="no DynamoGraphDeployment other"):
        await made(client, target=f"{GRAPH}/other").validate()
    with pytest.raises(PenstockError, match="Deployment absent"):
        await made(client, pools={"main": "Deployment/absent"}).look()


@pytest.mark.parametrize(
    ("models", "scaling", "words"),
    [
        (("m",), {}, "nothing is named that could be scaled"),
        (("m",), {"target": "Deployment/llm"}, "planner.kubernetes.target is Deployment/llm"),
        (("m",), {"target": f"{GRAPH}/llm", "pools": {"main": "Deployment/a"}}, "and pools are named as well"),
        (("m",), {"target": "llm"}, "planner.kubernetes.target is 'llm'"),
        (("m",), {"pools": {"other": "Deployment/a"}}, "names 'other', and the config's pools are main"),
        (("m", "n"), {"target": f"{GRAPH}/llm"}, "the config has 2 models: m, n"),
    ],
)
async def test_settings_that_name_no_object_to_scale_are_refused(
    client: AsyncClient, models: tuple[str, ...], scaling: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PARENT_ENV, raising=False)
    with pytest.raises(ConfigError, match=words):
        made(client, models, **scaling)
