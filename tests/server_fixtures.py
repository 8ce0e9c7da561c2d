"""Which servers and disks do the tests of a session share? A conftest imports the fixtures that its folder needs."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, where this machine lets us mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("tmpfs: this machine mounts none for us")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
