"""Are a program's requests counted together, whichever sub-agent and frontend they came by, and is it bounded?"""

import random

from penstock.frontend import program_ledger
from penstock.frontend.program_ledger import ProgramLedger, ProgramStatus, join_programs
from penstock.kernel.request_record import RequestLeg, RequestRecord
from tests.frontend.stand import stand


def record(program: str, session: str = "s", worker: str | None = "w0", **fields: object) -> RequestRecord:
    legs = [] if worker is None else [RequestLeg(role="aggregated", worker=worker, dispatched=0.0)]
    given = {"id": "r", "arrival": 0.0, "model": "m", "outcome": "ok", "isl": 100, "osl": 10, "cached": 60, **fields}
    return RequestRecord(program=program, session=session, legs=legs, **given)  # type: ignore[arg-type]


def test_what_was_not_told_is_not_counted_as_a_miss() -> None:
    ledger = ProgramLedger()
    ledger.enter(record("p"), "p", 1.0)
    ledger.enter(record("p", cached=None), "p", 2.0)
    ledger.enter(record("p", worker=None, outcome="failed", isl=None, cached=None, osl=0), "p", 3.0)
    (program,) = ledger.newest()
    assert (program.requests, program.failed, program.prompt_tokens, program.output_tokens) == (3, 1, 200, 20)
    assert program.hit_rate == 0.6 and program.workers == {"w0": 2} and program.last == 3.0
    assert ProgramStatus(name="x", model="m").hit_rate is None


def test_processes_together_say_what_one_would() -> None:
    rng = random.Random(7)
    one, parts = ProgramLedger(), [ProgramLedger() for _ in range(3)]
    for moment in range(400):
        program = f"p{rng.randrange(9)}"
        given = record(program, f"s{rng.randrange(5)}", f"w{rng.randrange(4)}", isl=rng.randrange(50))
        one.enter(given, program, moment)
        rng.choice(parts).enter(given, program, moment)
    joined, whole = join_programs(*(part.newest() for part in parts)), one.newest()
    for program in (*joined, *whole):
        program.sessions.sort()
    assert joined == whole and len(whole) == 9


def test_programs_sessions_and_workers_are_bounded() -> None:
    ledger = ProgramLedger()
    for number in range(program_ledger.PROGRAMS_MAX + 5):
        ledger.enter(record(f"p{number}"), f"p{number}", number)
    assert len(ledger.newest()) == program_ledger.GIVEN_MAX and len(ledger._programs) == program_ledger.PROGRAMS_MAX
    assert len(join_programs(ledger.newest())) == program_ledger.SHOWN_MAX
    for number in range(40):
        ledger.enter(record("last", f"s{number}", f"w{number}"), "last", 999.0)
    last = ledger.newest()[0]
    assert last.requests == 40 and len(last.sessions) == program_ledger.SESSIONS_MAX and last.more_sessions
    assert len(last.workers) == program_ledger.WORKERS_MAX


async def test_a_status_lists_programs_with_their_sub_agents() -> None:
    async with stand(2) as s:
        for agent in ("plan", "edit", "test"):
            headers = {"x-penstock-program-id": "build-42", "x-penstock-session-id": agent}
            assert (await s.chat(agent, headers=headers)).status == 200
        await s.chat("alone", headers={"x-penstock-session-id": "chat-1"})
        await s.chat("other", headers={"x-penstock-program-id": "build-43"})
        status = await (await s.http.get("/admin/status")).json()
        assert [program["name"] for program in status["programs"]] == ["build-43", "build-42"]
        program = status["programs"][1]
        assert (program["requests"], sorted(program["sessions"])) == (3, ["edit", "plan", "test"])
        assert (program["cached_tokens"], program["output_tokens"]) == (9, 15)
        assert sum(program["workers"].values()) == 3 and program["workers"].keys() <= {"e0", "e1"}
