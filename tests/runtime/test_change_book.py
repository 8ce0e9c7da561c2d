"""The change book: what the supervisor's terminal says, and which of it the supervisor writes down."""

import json
from pathlib import Path

from penstock.fleet.events import DrainForgotten, DrainReported, RestartReported
from penstock.runtime.cluster_state.crash_log import Crash
from penstock.runtime.records.change_log import FILE
from penstock.runtime.supervision.change_book import ChangeBook


def test_the_terminal_has_every_change_and_the_file_those_that_nobody_else_writes(tmp_path: Path) -> None:
    lines: list[str] = []
    book = ChangeBook(tmp_path, lines.append)
    book.crashed(Crash(name="main-0", kind="engine", count=1, reason="was killed by SIGKILL", at=0.0))
    book.add("scale main", 2, 3, "planner")
    book.add("scale main", 3, 4, "local")
    book.add("router.queue.wait_max", 60.0, 5.0, "ops")
    book.reported(DrainReported(worker="main-1", state="draining", active=1))
    book.reported(DrainReported(worker="main-1", state="done", finished=1, cut=2, seconds=1.5))
    book.reported(DrainForgotten(worker="main-1"))
    book.reported(RestartReported(revision="r", state="running", left=2))
    book.reported(RestartReported(revision="r", state="failed", problem="main-0 does not start"))
    assert [line.partition("Z ")[2] for line in lines] == [
        "main-0 was killed by SIGKILL",
        "pool main: 2 -> 3 replicas, by planner",
        "pool main: 3 -> 4 replicas, by an operator",
        "router.queue.wait_max: 60.0 -> 5.0, by ops",
        "main-1 is drained after 1.5 s, 1 request finished, 2 cut off there",
        "the restart is over: main-0 does not start",
    ]
    written = [json.loads(line)["key"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert written == ["crash main-0", "scale main", "drained main-1", "restarted"]
