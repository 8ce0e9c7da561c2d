"""Contract suite of a router plug-in: what the router relies on, whichever scorer or filter it is.

A test module imports all names and has a fixture ``make_plugin``, a function that makes the plug-in with its options:

    from penstock.testing.router_plugin_contract import *
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.kernel.errors import InvariantError
from penstock.kernel.values import RequestId, Target, WorkerCard
from penstock.router.selection.router_plugins import PluginRequest, PricedCandidates, RouterPlugins
from penstock.router.settings import RouterPluginSettings
from penstock.testing.router_world import MODEL, card

NAME = "under-test"
REQUESTS = [
    PluginRequest(id=RequestId("r0"), model=MODEL, stage="aggregated", prompt_tokens=64),
    PluginRequest(
        id=RequestId("r1"), model=MODEL, stage="prefill", prompt_tokens=1, output_tokens=8, session="s", program="p"
    ),
    PluginRequest(
        id=RequestId("r2"), model=MODEL, stage="decode", prompt_tokens=9000, tenant="a", adapter="x", priority=2
    ),
]
LABELS: list[dict[str, str]] = [{}, {"rack": "r1"}, {"rack": "r2", "zone": "z1"}, {"tenant": "a"}]


def candidates(places: list[int], count: int = 40, seed: int = 1) -> PricedCandidates:
    """Return the candidates at some places of a fleet of ``count`` workers, which is the same for the same seed."""
    rng = random.Random(seed)
    numbers = [[rng.randrange(4000), rng.randrange(64), rng.randrange(900), rng.randrange(2000)] for _ in range(count)]
    costs = [rng.uniform(0.0, 500.0) for _ in range(count)]
    columns = np.array([numbers[place] for place in places], dtype=np.int64).T
    cards: list[WorkerCard] = [card(f"w{place}", labels=LABELS[place % len(LABELS)]) for place in places]
    targets = [Target(each.id, 0) for each in cards]
    cost = np.array([costs[place] for place in places], dtype=np.float64)
    return PricedCandidates(targets, cards, lambda: list(columns[:3]), cost, columns[3])


def answers(make: Callable[[], Any], request: PluginRequest, among: PricedCandidates) -> list[Any]:
    """Ask a plug-in that was just made as the router does; return a number, or a reason, for each candidate.

    Raises:
        InvariantError: the router would leave the plug-in out.
    """
    failed: list[str] = []
    plugins = RouterPlugins(
        {NAME: RouterPluginSettings()}, lambda name, text: failed.append(text), lambda name, settings: make()
    )
    scores = [column.tolist() for column in plugins.added(request, among).values()] or [[0.0] * len(among)]
    reasons = plugins.excluded(request, among)
    if failed:
        raise InvariantError(failed[0])
    return [reasons.get(place, score) for place, score in enumerate(scores[0])]


@pytest.mark.parametrize("request_of", REQUESTS, ids=lambda each: each.stage)
def test_it_answers_for_one_candidate_and_for_thousands(make_plugin: Any, request_of: PluginRequest) -> None:
    for count in (1, 23, 24, 3000):
        assert len(answers(make_plugin, request_of, candidates(list(range(count)), count))) == count


@pytest.mark.parametrize("request_of", REQUESTS, ids=lambda each: each.stage)
def test_what_it_says_of_a_candidate_does_not_depend_on_the_others(make_plugin: Any, request_of: PluginRequest) -> None:
    of_all = answers(make_plugin, request_of, candidates(list(range(40))))
    for places in ([0], [39, 3], list(range(0, 40, 3)), list(reversed(range(40)))):
        assert answers(make_plugin, request_of, candidates(places)) == [of_all[place] for place in places]


@pytest.mark.parametrize("request_of", REQUESTS, ids=lambda each: each.stage)
def test_it_remembers_nothing(make_plugin: Any, request_of: PluginRequest) -> None:
    used = make_plugin()
    among = candidates(list(range(40)))
    first = answers(lambda: used, request_of, among)
    for other in REQUESTS:
        answers(lambda: used, other, candidates(list(range(40)), seed=2))
    assert answers(lambda: used, request_of, among) == first == answers(make_plugin, request_of, among)
