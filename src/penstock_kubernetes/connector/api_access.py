"""API access of the connector: pods as replicas, rights of our account, marks on pods, over one client."""

from collections.abc import Collection, Mapping, Sequence

from lightkube import AsyncClient

from penstock.kernel.values import Replica
from penstock_kubernetes.connector.api_calls import missing_rights
from penstock_kubernetes.connector.pool_pods import mark_victims, replicas_of
from penstock_kubernetes.connector.scale_target import ApiRight


class ApiAccess:
    """A `penstock_kubernetes.connector.scale_target.ClusterAccess` over an API server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def replicas(self, labels: Mapping[str, str]) -> tuple[Replica, ...]:
        return await replicas_of(self._client, labels)

    async def mark_victims(self, labels: Mapping[str, str], workers: Collection[str]) -> None:
        await mark_victims(self._client, labels, workers)

    async def missing(self, rights: Sequence[ApiRight]) -> Sequence[ApiRight]:
        return await missing_rights(self._client, rights)

    async def close(self) -> None:
        await self._client.close()
