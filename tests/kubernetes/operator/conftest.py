"""One cluster's double with an operator and the PenstockCluster "demo", for all tests of this folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.kubernetes.operator.operator_cluster import OperatorCluster, operator_cluster, spec


@pytest.fixture(scope="package")
def operated(tmp_path_factory: pytest.TempPathFactory, kubectl: Path) -> Iterator[OperatorCluster]:
    """The cluster, with two engines and a frontend at its start."""
    if os.geteuid() != 0:
        skip_or_fail("root", "pods as processes have networks of their own")
    with operator_cluster(tmp_path_factory.mktemp("operator"), kubectl) as made:
        made.apply("demo", spec(2))
        made.until(lambda: made.ready("demo", 2), "two engines and a frontend")
        yield made


@pytest.fixture
def cluster(operated: OperatorCluster) -> OperatorCluster:
    """The cluster, once it is again as at its start."""
    operated.apply("demo", spec(2))
    operated.until(lambda: operated.settled("demo", 2) and len(operated.pods()) == 2, "two engines")
    return operated
