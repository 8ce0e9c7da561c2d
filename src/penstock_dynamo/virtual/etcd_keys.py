"""etcd keys: reads and writes a few plain values under one prefix, all of them at once."""

from collections.abc import Mapping

from penstock.adapters.stores.etcd_client import EtcdClient, EtcdCompare, EtcdPut


class EtcdKeys:
    """Texts under a prefix. Every call raises `StoreUnavailable` where no member of the etcd answers.

    Args:
        client: owned by this from here on.
        prefix: of all keys; it ends in a slash.
    """

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self.name = f"etcd {client.urls[0]} {prefix}"
        self._client = client
        self._prefix = prefix.encode()

    async def read(self) -> dict[str, str]:
        """Return everything under the prefix, as of one moment."""
        answer = await self._client.range(self._prefix)
        return {
            item.key.removeprefix(self._prefix).decode(errors="replace"): item.value.decode(errors="replace")
            for item in answer.items
        }

    async def write(self, expected: Mapping[str, str | None], values: Mapping[str, str]) -> bool:
        """Write all values in one transaction, or none unless each ``expected`` one is there (None: is absent).

        Returns: whether they were written.
        """
        compare = [
            EtcdCompare(self._prefix + name.encode(), None if value is None else value.encode())
            for name, value in expected.items()
        ]
        puts = [EtcdPut(self._prefix + name.encode(), value.encode()) for name, value in values.items()]
        return await self._client.txn(compare, puts)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
