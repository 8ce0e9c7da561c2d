"""Plug-ins of the router: scorers and filters of others count as its own terms do, and none of them can break it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from penstock.config.reading.load import load
from penstock.extension import Extension
from penstock.kernel.errors import ConfigError
from penstock.kernel.journal_frames import packed
from penstock.kernel.values import plain
from penstock.router.events import Decision, OperatorNote, PluginLeftOut, Preferences
from penstock.router.router import Router
from penstock.router.selection.decision_summary import DecisionSummaries, whole
from penstock.router.settings import AffinitySettings, CostSettings, RouterPluginSettings
from penstock.runtime.node.router_node import OVERRUNS_MAX, STALL, PluginWatch
from penstock.testing import RouterWorld, arrived, card, none, only, prompt
from penstock.testing.installed_extensions import extension_installed, project_installed

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extension"


class Grudge:
    """Scorer: what each worker costs more, by its name, in a unit that no binary fraction has."""

    def __init__(self, names: list[str], more: float = 0.1) -> None:
        self._names, self._more = names, more

    def score(self, request: Any, candidates: Any) -> list[float]:
        return [self._more * (1 + load) * (card.id in self._names) for card, load in zip(
            candidates.cards, candidates.requests.tolist())]  # fmt: skip


class Faulty:
    """Scorer and filter: works until the prompt is longer than 100 tokens."""

    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    def score(self, request: Any, candidates: Any) -> Any:
        if request.prompt_tokens > 100:
            return 1 / 0 if self._answer is None else self._answer
        return [0.0] * len(candidates)


class NotHere:
    """Filter: excludes workers by name."""

    def __init__(self, names: list[str], answer: Any = None) -> None:
        self._names, self._answer = names, answer

    def exclude(self, request: Any, candidates: Any) -> Any:
        if self._answer is not None:
            return self._answer
        return {place: "is not here" for place, card in enumerate(candidates.cards) if card.id in self._names}


EXTENSION = Extension(
    name="of-tests",
    entries={
        "scorer": {"grudge": Grudge, "faulty": "tests.router.test_router_plugins:Faulty"},
        "filter": {"not-here": NotHere},
    },
)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with extension_installed(tmp_path, "of-tests", f"{__name__}:EXTENSION"):
        yield


def plugin(weight: float = 1.0, **options: Any) -> RouterPluginSettings:
    return RouterPluginSettings(weight, {name: msgspec.json.encode(value).decode() for name, value in options.items()})


def fleet(count: int, **settings: Any) -> RouterWorld:
    return RouterWorld(*[card(f"w{number}", labels={"n": str(number)}) for number in range(count)], **settings)


def decision(world: RouterWorld, name: str) -> Decision:
    return world.sent(name).decision


def test_a_scorer_adds_to_the_cost_and_stands_in_candidates_and_reason() -> None:
    world = fleet(3, plugins={"grudge": plugin(4.0, names=["w0", "w2"], more=2.0)})
    for number in range(3):
        world.post(arrived(f"r{number}", prompt(number)))
    first = decision(world, "r0")
    assert first.chosen.worker == "w1" and {row.target.worker: row.plugins for row in first.candidates} == {
        "w0": {"grudge": 8.0},
        "w1": {"grudge": 0.0},
        "w2": {"grudge": 8.0},
    }
    assert [row.total - 8.0 * (row.target.worker != "w1") for row in first.candidates] == [
        first.candidates[1].total
    ] * 3
    assert "(grudge added 0)" in first.reason
    assert decision(world, "r1").candidates[1].total > first.candidates[1].total, "load counts as before"


@pytest.mark.parametrize("settings", [{}, {"cost": CostSettings(kind="latency")}])
def test_rows_and_columns_agree_to_the_last_bit(settings: dict[str, Any]) -> None:
    """Of one fleet priced in both ways, with two scorers, a filter and the discount of sessions."""
    plugins = {
        "grudge": plugin(0.7, names=[f"w{number}" for number in range(0, 40, 3)]),
        "faulty": plugin(),
        "not-here": plugin(names=["w5", "w7"]),
    }
    affinity = AffinitySettings(mode="soft")
    decisions = []
    for limit in (24, 1000):
        with mock.patch("penstock.router.selection.select.COLUMNS_MIN", limit):
            world = fleet(40, plugins=plugins, affinity=affinity, **settings)
            for number in range(60):
                wish = Preferences(session=f"s{number % 7}")
                world.post(arrived(f"r{number}", prompt(number % 5, 80), preferences=wish))
            decisions.append([msgspec.json.encode(decision(world, f"r{n}"), enc_hook=plain) for n in range(60)])
    assert decisions[0] == decisions[1]
    last = msgspec.json.decode(decisions[0][-1], type=Decision)
    assert len(last.candidates) == 38 and list(last.candidates[0].plugins or {}) == ["faulty", "grudge"]


def test_a_summary_of_many_candidates_has_what_scorers_added() -> None:
    world = fleet(40, plugins={"grudge": plugin(names=["w3"])})
    world.post(arrived("r"))
    made = decision(world, "r")
    short, line, cut = DecisionSummaries(lambda: 1.0).lines(made)
    assert cut and b'"plugins":{"grudge":' in short
    restored = msgspec.json.decode(whole(line), type=Decision)
    assert list(restored.candidates) == list(made.candidates)


def test_without_plug_ins_a_decision_is_written_as_before() -> None:
    world = fleet(2)
    world.post(arrived("r"))
    assert b"plugins" not in msgspec.json.encode(decision(world, "r"), enc_hook=plain)


def test_a_filter_excludes_with_its_reason() -> None:
    world = fleet(3, plugins={"not-here": plugin(names=["w0", "w1"])})
    world.post(arrived("r"))
    made = decision(world, "r")
    assert made.chosen.worker == "w2"
    assert [(each.target.worker, each.reason) for each in made.excluded] == [
        ("w0", "is not here (filter not-here)"),
        ("w1", "is not here (filter not-here)"),
    ]
    none_left = fleet(1, plugins={"not-here": plugin(names=["w0"])})
    none_left.post(arrived("r"))
    closed = none_left.ended("r")
    assert closed.status == 503 and closed.reason is not None and "is not here (filter not-here)" in closed.reason


@pytest.mark.parametrize(
    ("plugins", "why"),
    [
        ({"faulty": plugin()}, "it raised ZeroDivisionError: division by zero"),
        ({"faulty": plugin(answer=[1.0])}, "its scores have the shape (1,) for 2 candidates"),
        ({"faulty": plugin(answer=["a", "b"])}, "it raised ValueError: could not convert string to float"),
        ({"faulty": plugin(1e308, answer=[100.0, 1.0])}, "it gave a score that is not a finite number"),
        ({"not-here": plugin(names=[], answer={"7": "x"})}, "it raised TypeError: range indices must be integers"),
        ({"not-here": plugin(names=[], answer=3)}, "it raised TypeError: 'int' object is not iterable"),
    ],
)
def test_one_that_fails_is_left_out_and_requests_go_on(plugins: dict[str, RouterPluginSettings], why: str) -> None:
    world, name = fleet(2, plugins=plugins), next(iter(plugins))
    effects = world.post(arrived("long", prompt(1, 200)))
    assert world.sent("long").decision.candidates[0].plugins is msgspec.UNSET
    noted = only(effects, OperatorNote)
    assert noted.kind == "plugin_left_out" and noted.fields == {"plugin": name}
    assert f"{name} is left out from now on: {why}" in noted.text
    assert none(world.post(arrived("next", prompt(2, 200))), OperatorNote), "it is not called again"
    findings = [one.text for one in world.router.status(world.now).findings]
    assert any(f"plug-in {name} is left out: {why}" in text for text in findings)
    other = Router(world.router.settings, name="other")
    other.restore(world.router.snapshot())
    assert packed(other.snapshot()) == packed(world.router.snapshot()) and other.plugins is not None
    assert name in other.plugins.left_out and not other.plugins.scorers and not other.plugins.filters


def test_one_whose_settings_change_is_tried_again() -> None:
    world = fleet(2, plugins={"faulty": plugin()})
    world.post(arrived("long", prompt(1, 200)))
    router = world.router
    assert router.plugins is not None and router.plugins.left_out
    router.use_plugins(msgspec.structs.replace(router.settings, plugins={"faulty": plugin(answer=[1.0, 2.0])}))
    assert not router.plugins.left_out
    world.post(arrived("other", prompt(1, 200)))
    assert [row.plugins for row in decision(world, "other").candidates] == [{"faulty": 1.0}, {"faulty": 2.0}]


class Hands:
    """A clock that goes on by so much at each reading."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(("took", "calls"), [(STALL, 1), (0.002, OVERRUNS_MAX), (0.0001, None)])
def test_one_that_takes_too_long_is_left_out_by_an_event(took: float, calls: int | None) -> None:
    """Which whoever measures sends: the router has no clock, and a replay has the event."""
    world, events = fleet(3, plugins={"grudge": plugin(names=["w0"])}), list[PluginLeftOut]()
    assert world.router.plugins is not None
    world.router.plugins.call = PluginWatch(events.append, Hands(took)).call
    for number in range(2 * OVERRUNS_MAX):
        if events:
            assert only(world.post(events[0]), OperatorNote).kind == "plugin_left_out"
            break
        world.post(arrived(f"r{number}"))
    else:
        number = 0
    assert (number or None) == calls
    world.post(arrived("last"))
    assert (decision(world, "last").candidates[0].plugins is msgspec.UNSET) == (calls is not None)


def test_an_unknown_name_lists_the_known_ones() -> None:
    for name in ("grunge", "label-cost"):
        with pytest.raises(ConfigError, match=rf"router.plugins.{name}: no installed extension.*known: faulty, grudge"):
            load(None, [f"router.plugins.{name}={{weight: 2}}"])


@pytest.mark.parametrize(
    ("name", "option", "wrong"),
    [("grudge", "name", "names"), ("grudge", "names", None), ("not-here", "name", "names")],
)
def test_options_that_it_does_not_take_are_refused(name: str, option: str, wrong: str | None) -> None:
    given = [f"router.plugins.{name}={{options: {{{option}: '[\"w1\"]'}}}}"]
    if wrong is None:
        assert load(None, given).settings.router.plugins[name].options == {option: '["w1"]'}
    else:
        with pytest.raises(ConfigError, match=f"router.plugins.{name}.*does not take them"):
            load(None, given)


def test_the_example_does_what_its_page_says(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with project_installed(EXAMPLE, tmp_path / "other"):
        costs = {"label": "gpu", "costs": {"h100": 30.0, "l4": 0.0}}
        world = RouterWorld(
            card("big", labels={"gpu": "h100"}),
            card("small", labels={"gpu": "l4"}),
            card("theirs", labels={"tenant": "them"}),
            plugins={"label-cost": plugin(2.0, **costs), "tenant-label": plugin()},
        )
        world.post(arrived("r", 1000))
        made = decision(world, "r")
        assert made.chosen.worker == "small" and "label-cost added 0" in made.reason
        assert [row.plugins for row in made.candidates] == [{"label-cost": 60.0}, {"label-cost": 0.0}]
        assert made.excluded[0].reason == "is for the tenant them (filter tenant-label)"
        world.post(arrived("t", 100, tenant="them"))
        assert len(decision(world, "t").candidates) == 3
