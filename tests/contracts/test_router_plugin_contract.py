"""The example's scorer and filter keep the contract of router plug-ins, found as an installed package's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.errors import InvariantError
from penstock.router.selection.router_plugins import plugin_of
from penstock.router.settings import RouterPluginSettings
from penstock.testing.installed_extensions import project_installed
from penstock.testing.router_plugin_contract import *  # noqa: F403
from penstock.testing.router_plugin_contract import REQUESTS, answers, candidates

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extension"
COSTS = {"label": "rack", "costs": '{"r1": 3.5, "r2": 0.1}'}


@pytest.fixture(params=[("label-cost", COSTS), ("tenant-label", {})], ids=lambda param: param[0])
def make_plugin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    name, options = request.param
    with project_installed(EXAMPLE, tmp_path):
        yield lambda: plugin_of(name, RouterPluginSettings(options=options))


class Rank:
    """Says of a candidate what depends on the others."""

    def score(self, request: Any, among: Any) -> list[int]:
        return sorted(range(len(among)), key=among.cost.__getitem__)


class Counter:
    """Remembers how often it was asked."""

    calls = 0

    def score(self, request: Any, among: Any) -> list[int]:
        self.calls += 1
        return [self.calls] * len(among)


class Writer:
    """Changes what it is shown."""

    def score(self, request: Any, among: Any) -> Any:
        among.cost[0] = 0.0
        return among.cost


@pytest.mark.parametrize(
    ("make", "broken"),
    [
        (Rank, test_what_it_says_of_a_candidate_does_not_depend_on_the_others),  # noqa: F405
        (Counter, test_it_remembers_nothing),  # noqa: F405
    ],
)
def test_the_suite_finds_what_breaks_the_contract(make: Callable[[], Any], broken: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        broken(make, REQUESTS[0])


def test_nobody_changes_what_a_plug_in_is_shown() -> None:
    with pytest.raises(InvariantError, match="read-only"):
        answers(Writer, REQUESTS[0], candidates([0, 1]))
