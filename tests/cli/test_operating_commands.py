"""scale, drain, restart and set: what they take for done, and what they say while it is not."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.cli import drain, restart, scale
from penstock.cli import set as setting
from penstock.cli.shared.waiting import NotDone, wait_for
from penstock.frontend.admin.admin_answers import LiveSettings, ProcessSettings
from penstock.runtime.cluster_state.desired_state import DrainStatus, RestartStatus
from penstock.runtime.cluster_state.fleet_api import DesiredState, DrainBegun, PoolScaled


def replica(name: str, state: str = "ready", reason: str | None = None) -> dict[str, Any]:
    return {"id": name, "state": state, "reason": reason}


def pool(*replicas: dict[str, Any], desired: int, revision: str = "r", problem: str | None = None) -> dict[str, Any]:
    ready = sum(one["state"] == "ready" for one in replicas)
    return {
        "name": "main",
        "model": "m",
        "kind": "process",
        "desired": desired,
        "ready": ready,
        "replicas": list(replicas),
        "revision": revision,
        "problem": problem,
    }


def desired(pools: Sequence[Any] = (), drained: Any = None, restart: Any = None) -> DesiredState:
    state = {"pools": list(pools), "drains": {}, "drained": drained or {}, "restart": restart}
    return msgspec.convert(state, DesiredState)


WISH = {"main": PoolScaled(was=1, wanted=2, revision="r")}
BEFORE = {"main": desired([pool(replica("main-0"), desired=1)]).pools[0]}
DRAINED = DrainStatus(name="main-1", state="done", active=0, finished=3, cut=0, seconds=1.25)


def missing(*pools: dict[str, Any]) -> str | None:
    return scale._late_pools(desired(pools), WISH, BEFORE)


def test_a_scaling_is_done_when_the_supervisor_has_heard_it_and_all_serve():
    two = (replica("main-0"), replica("main-1"))
    assert missing(pool(*two, desired=2)) is None
    assert missing(pool(*two, desired=2, revision="older")) is not None, "what is there is not yet the answer"
    assert "main-1 is starting" in str(missing(pool(two[0], replica("main-1", "starting"), desired=2)))
    assert missing(pool(*two, replica("main-2", "draining"), desired=2)) is not None
    assert "not reported" in str(missing())


def test_a_scaling_that_fails_says_why_and_how_to_end_it():
    with pytest.raises(NotDone, match=r"main-1 does not start: no such file.*penstock scale main=1"):
        missing(pool(replica("main-0"), replica("main-1", "failed", "no such file"), desired=2))
    with pytest.raises(NotDone, match="too few"):
        missing(pool(replica("main-0"), desired=1, problem="too few GPUs"))
    crashed = pool(replica("main-0", "failed", "ended"), replica("main-1"), desired=2)
    assert missing(crashed) is not None, "an engine that was there before is started again"


@pytest.mark.parametrize(("kind", "done"), [("engine", False), ("server", True), ("frontend", True)])
def test_a_drain_is_done_when_its_report_says_so_and_an_engine_when_it_is_gone(kind: str, done: bool):
    wished = DrainBegun("main-1", kind, "r")  # type: ignore[arg-type]
    pools = [pool(replica("main-1", "stopping"), desired=1)]
    assert (drain._pending_drain(desired(pools, {"main-1": DRAINED}), wished) is None) == done
    assert drain._pending_drain(desired(), DrainBegun("main-1", "engine", "r")) is None
    busy = {"main-1": replace(DRAINED, state="draining", active=2)}
    assert "still has 2 requests; finished: 3" in str(drain._pending_drain(desired(pools, busy), wished))
    assert drain._pending_drain(desired(pools), wished) == "main-1 is to be drained"


def test_what_is_said_of_a_drain():
    report = replace(DRAINED, cut=2)
    told = drain._drain_result(DrainBegun("w", "engine", "r"), report)
    assert "after 1.2 s: 3 requests finished, 2 were cut off there" in told
    assert "served nothing" in drain._drain_result(DrainBegun("w", "engine", "r"), None)
    unknown = replace(report, finished=None)
    assert drain._drain_result(DrainBegun("frontend-1", "frontend", "r"), unknown).endswith("has ended after 1.2 s.")


def test_a_restart_is_done_when_this_one_is():
    assert restart._pending_restart(desired(), "r") == "the supervisor has not begun"
    report = RestartStatus(revision="r", state="running", done=("main-0",), left=3)
    assert restart._pending_restart(desired(restart=replace(report, revision="older", state="done")), "r") is not None
    assert restart._pending_restart(desired(restart=report), "r") == "1 replaced, 3 to go"
    assert restart._pending_restart(desired(restart=replace(report, state="done")), "r") is None
    with pytest.raises(NotDone, match="no room; replaced so far: main-0"):
        restart._pending_restart(desired(restart=replace(report, state="failed", problem="no room")), "r")


def test_a_setting_is_done_when_every_frontend_goes_by_it():
    frontends = [ProcessSettings("f0", {"k": 2}), ProcessSettings("f1", {"k": 1})]
    assert setting._late_frontends(LiveSettings({}, {}, frontends), {"k": 2}) == "f1 is to take it"
    assert setting._late_frontends(LiveSettings({}, {}, frontends[:1]), {"k": 2}) is None


class Asked:
    """A client that answers in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def get(self, path: str, kind: type[Any]) -> Any:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_waiting_ends_when_there_is_nothing_missing_or_no_patience(monkeypatch, capsys):
    monkeypatch.setattr("penstock.cli.shared.waiting.EVERY", 0.001)
    client: Any = Asked({"n": 2}, {"n": 1}, {"n": 1}, {"n": 0})
    look = lambda found: f"{found['n']} to go" if found["n"] else None  # noqa: E731
    assert wait_for(client, "/x", dict, 60, look) == {"n": 0}
    assert capsys.readouterr().err.split("\n")[:2] == ["... 2 to go", "... 1 to go"], "each state is said once"
    with pytest.raises(NotDone, match="1 to go"):
        wait_for(Asked({"n": 1}), "/x", dict, 0.05, look)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [["scale", "main"], ["scale", "main=x"], ["scale", "=3"], ["set", "router.mode"], ["set", "=1"], ["drain"]],
    ids=" ".join,
)
def test_a_command_line_that_makes_no_sense_asks_nobody(penstock, cluster, arguments):
    assert penstock(*arguments, "--url", cluster.url).exit_code == 2
    assert cluster.asked == []
