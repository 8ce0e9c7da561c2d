"""Is a fleet of hundreds of workers shown by its pools, the worst first, and what is said of many said once?"""

from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from penstock.cli.shared.output import WIDE
from penstock.cli.shared.worker_tables import WORST_MAX, finding_lines, natural, workers_text
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.router.status_rows import StatusFinding, WorkerStatus
from tests.contracts.versions.record_messages import sample

T = TypeVar("T")


def of(type_: type[T]) -> T:
    return msgspec.convert(sample(inspect.type_info(type_)), type_)


def worker(name: str, **more: Any) -> WorkerStatus:
    fields = {"id": name, "state": "ready", "why_not": None, "breaker": "closed", "failures": 0, "restarts": 0, **more}
    return msgspec.structs.replace(of(WorkerStatus), model="m", active_requests=2, requests=10, **fields)


def fleet(*workers: WorkerStatus, findings: tuple[StatusFinding, ...] = ()) -> ClusterStatus:
    status = of(ClusterStatus)
    return msgspec.structs.replace(status, workers=list(workers), pools=[], crashes=[], findings=list(findings))


def test_names_stand_in_the_order_in_which_people_count() -> None:
    names = ["main-10", "main-2", "decode-1", "main-2-b", "main", "7", "main-02"]
    assert sorted(names, key=natural)[:4] == ["7", "decode-1", "main", "main-2"]
    shown = workers_text(fleet(*(worker(f"main-{n}") for n in (10, 9, 2))), 200).splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["main-2", "main-9", "main-10"]


def test_of_a_large_fleet_pools_come_first_and_then_who_is_worth_a_look() -> None:
    broken = {"state": "ready", "why_not": "its breaker is open", "breaker": "open"}
    workers = [worker(f"main-{n}") for n in range(498)] + [worker("main-498", **broken), worker("main-499", failures=3)]
    text = workers_text(fleet(*workers), 120)
    lines = text.splitlines()
    assert lines[0].split()[0] == "POOL" and lines[1].split()[:5] == ["m", "499", "of", "500", "1,000"]
    listed = [line.split()[0] for line in lines if line.startswith("main-")]
    assert listed[:2] == ["main-498", "main-499"] and len(lines) < 12
    assert lines[-1] == "498 workers more: penstock status --wide."
    assert sum(line.startswith("main-") for line in workers_text(fleet(*workers), WIDE).splitlines()) == 500


def test_as_many_of_the_worst_are_listed_as_a_screen_takes() -> None:
    workers = [worker(f"main-{n}", failures=n) for n in range(200)]
    listed = [line.split()[0] for line in workers_text(fleet(*workers), 200).splitlines() if line.startswith("main-")]
    assert listed == [f"main-{n}" for n in range(199, 199 - WORST_MAX, -1)]


def test_what_is_said_of_a_hundred_workers_is_said_once() -> None:
    silent = tuple(StatusFinding("warning", f"main-{n} sends no events", f"restart main-{n}") for n in range(100))
    other = StatusFinding("error", "main-3 and main-4 have different blocks", "give them the same")
    lines = finding_lines(fleet(*(worker(f"main-{n}") for n in range(100)), findings=(*silent[::-1], other, other)))
    assert lines == [
        "  warning: main-0 sends no events (restart main-0); the same of main-1, main-2 and 97 more",
        "  error: main-3 and main-4 have different blocks (give them the same)",
    ]
    (line,) = finding_lines(fleet(worker("main-0"), worker("main-1"), findings=silent[:2]))
    assert line.endswith("; the same of main-1")
