"""Endpoints of workers: ``host:port``, as gateways name them, and back to the workers."""

from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from penstock.frontend.cluster_view import ClusterView
from penstock.kernel.errors import OverloadedError
from penstock.kernel.values import WorkerId


def endpoint_in(url: str) -> str:
    """Return ``host:port`` of a URL."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Endpoints:
    """The endpoints of the present workers; made again when workers come or go."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._changes = -1
        self._of: dict[WorkerId, str] = {}
        self._workers: dict[str, list[WorkerId]] = {}
        self._turn = 0

    def of(self, worker: WorkerId) -> str | None:
        """Return a worker's endpoint; None where it has left."""
        self._refresh()
        return self._of.get(worker)

    def worker(self, endpoint: str) -> WorkerId | None:
        """Return the worker of an endpoint; None where there is none."""
        self._refresh()
        workers = self._workers.get(endpoint)
        return None if workers is None else workers[0]

    def workers(self, subset: Iterable[str]) -> tuple[WorkerId, ...]:
        """Return the workers of some endpoints; one without a port stands for all of its host."""
        self._refresh()
        wanted = {name.strip() for name in subset}
        return tuple(
            [
                worker
                for endpoint, workers in self._workers.items()
                if endpoint in wanted or endpoint.rpartition(":")[0] in wanted
                for worker in workers
            ]
        )

    def any(self, subset: Sequence[str] | None) -> list[str]:
        """Return endpoints for a request that is not routed, in turn.

        Raises:
            OverloadedError: 503: there is none.
        """
        self._refresh()
        names = list(self._workers)
        if subset is not None:
            allowed = set(self.workers(subset))
            names = [name for name in names if not allowed.isdisjoint(self._workers[name])]
        if not names:
            raise OverloadedError("no worker is there" if subset is None else EMPTY_SUBSET, retry_after=1.0)
        self._turn += 1
        start = self._turn % len(names)
        return names[start:] + names[:start]

    def _refresh(self) -> None:
        changes = self._cluster.changes()
        if changes != self._changes:
            self._changes, self._workers = changes, {}
            self._of = {card.id: endpoint_in(card.url) for card in self._cluster.cards()}
            for worker, endpoint in self._of.items():
                self._workers.setdefault(endpoint, []).append(worker)


EMPTY_SUBSET = "none of the endpoints that the gateway allows is a worker"
