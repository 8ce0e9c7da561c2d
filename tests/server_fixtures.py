"""Which servers do the tests of a session share? A conftest imports the fixtures that its folder needs."""

from collections.abc import Iterator

import pytest

from tests.servers import Etcd, Nats


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd that runs."""
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nats]:
    """A nats-server that runs, with JetStream."""
    server = Nats(tmp_path_factory.mktemp("nats"), jetstream=True)
    server.start()
    yield server
    server.kill()
