"""Router plug-ins beyond one decision: simulations and replays decide with them as the cluster did."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.extension import Extension
from penstock.kernel.machine import Wake
from penstock.kernel.values import plain
from penstock.router.events import Dispatch, OperatorNote, PluginLeftOut
from penstock.router.journal import router_book
from penstock.router.settings import RouterPluginSettings, RouterSettings
from penstock.runtime.live_driver import LiveDriver
from penstock.runtime.node.router_node import OVERRUNS_MAX, PluginWatch
from penstock.runtime.records.journal_writer import JournalWriter
from penstock.testing import RouterWorld, arrived, card
from penstock.testing.installed_extensions import extension_installed
from penstock_lab.report.journal_replay import replay
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from tests.lab.simulate.test_simulated_cluster import chat, plan


class LessOfFirst:
    """Scorer: the first worker costs so much more; fails at a prompt of some length."""

    def __init__(self, fails_at: int = 1 << 30) -> None:
        self._fails_at = fails_at

    def score(self, request: Any, candidates: Any) -> Any:
        if request.prompt_tokens > self._fails_at:
            raise RuntimeError("too long for me")
        return 30.0 * (candidates.requests + 1) * [card.id == "main-0" for card in candidates.cards]


EXTENSION = Extension(name="of-tests", entries={"scorer": {"less-of-first": LessOfFirst}})


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with extension_installed(tmp_path, "of-tests", f"{__name__}:EXTENSION"):
        yield


def settings(**options: str) -> RouterSettings:
    return RouterSettings(plugins={"less-of-first": RouterPluginSettings(options=options)})


def simulated(folder: Path | None = None, **changes: Any) -> list[bytes]:
    decided: list[bytes] = []
    journal: JournalWriter | None = None

    def watch(*happened: Any) -> None:
        if journal is not None and happened[1] == "router":
            journal.watch(*happened)
            journal.flush()

    def note(decision: Any) -> None:
        decided.append(msgspec.json.encode(decision, enc_hook=plain))

    cluster = SimulatedCluster(plan(**changes), chat(25), watch=watch, decided=note)
    if folder is not None:
        book = router_book(cluster.router)
        journal = JournalWriter(folder, book, wall_ns=1, segment_bytes=1 << 16, segments=100)
        journal.begin(0)
    cluster.run()
    if journal is not None:
        journal.encode()
        journal.flush()
    return decided


def test_a_simulation_runs_them_in_either_form_of_prompts_and_repeats_itself() -> None:
    runs = simulated(router=settings())
    assert runs == simulated(router=settings()) == simulated(router=settings(), by_block=True)
    assert all(b'"plugins":{"less-of-first":' in line for line in runs) and runs != simulated()


@pytest.mark.parametrize("options", [{}, {"fails_at": "6000"}])
def test_every_segment_of_a_journal_replays_with_them(tmp_path: Path, options: dict[str, str]) -> None:
    lines = simulated(tmp_path / "j", router=settings(**options))
    assert any(b'"plugins"' in line for line in lines)
    assert all(b'"plugins"' in line for line in lines) == (not options), "after it failed it is left out"
    files = sorted((tmp_path / "j").iterdir())
    assert len(files) > 2
    for path in (tmp_path / "j", *files):
        again = replay(path, [])
        assert again.mismatch is None and again.problems == []


async def test_the_live_driver_puts_a_slow_one_out_by_an_event_of_the_journal() -> None:
    world = RouterWorld(card("main-0"), card("main-1"), plugins=settings().plugins)
    heard: list[Any] = []
    live = LiveDriver({"router": world.router}, watch=lambda now, name, event, effects: heard.append(event))
    for effect in (Dispatch, OperatorNote, Wake):
        live.on(effect, lambda now, name, effect: None)
    readings = iter(range(1000))
    assert world.router.plugins is not None
    world.router.plugins.call = PluginWatch(
        lambda event: live.post("router", event), lambda: next(readings) * 0.01
    ).call
    for number in range(OVERRUNS_MAX + 3):
        live.post("router", arrived(f"r{number}"))
    assert [type(event) for event in heard].index(PluginLeftOut) == OVERRUNS_MAX
    (event,) = [event for event in heard if isinstance(event, PluginLeftOut)]
    assert event.name == "less-of-first" and "10 of its calls took too long" in event.reason
    assert world.router.plugins.left_out
    live.close()
