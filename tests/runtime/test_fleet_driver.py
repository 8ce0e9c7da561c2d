"""Engines of this machine: restarted, drained, given their GPUs, taken over after a crash, never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.adapters.connectors.engine_process import EngineTemplate
from penstock.adapters.connectors.shim_client import ShimClient
from penstock.adapters.seams import ConnectorError
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.values import Pool
from tests.adapters.connectors.holding import TINY, Launched, Ward, alive, eventually, tiny, until

Open = Callable[..., Ward]


@pytest.fixture
async def ward(tmp_path: Path) -> AsyncIterator[Open]:
    made: list[Ward] = []

    def open_ward(name: str = "a", **options: object) -> Ward:
        made.append(Ward(tmp_path / name, **options))  # type: ignore[arg-type]
        return made[-1]

    yield open_ward
    for one in made:
        await one.close()


async def test_a_crash_is_followed_by_a_restart_and_the_routers_hear_of_both(ward):
    here = await ward().up(1)
    (first,) = (await here.pids()).values()
    os.kill(first, signal.SIGKILL)
    await eventually(
        lambda: (
            here.nurse.told == ["came main-0", "crashed main-0: was killed by SIGKILL", "gone main-0", "came main-0"]
        )
    )
    await here.settled()
    assert (await here.pids())["main-0"] != first
    assert here.connector.restarts == 1


async def test_its_output_goes_to_its_log(ward):
    here = await ward().up(1)
    assert "http://tiny/main-0" in (here.folder / "logs" / "main-0.log").read_text()


async def test_one_that_can_not_start_says_why(ward):
    here = ward()
    dies = EngineTemplate("main", lambda w, p, g: tiny(w, p, g, "import sys; sys.exit('no model there')"))
    with pytest.raises(EngineError, match=r"status 1.*no model there"):
        await here.up(1, dies)


async def test_a_program_that_is_missing_is_named(ward):
    here = ward()
    missing = EngineTemplate("main", lambda w, p, g: Launched(("no-such-program", "serve")))
    with pytest.raises(EngineError, match="no-such-program can't be run"):
        await here.up(1, missing)


async def test_one_that_is_unfit_is_ended_and_tried_again(ward):
    here = ward()
    here.nurse.refuse["main-0"] = 2
    with pytest.raises(EngineError, match="unfit"):
        await here.up(1)
    await here.settled(ready=1)
    assert here.nurse.told == [*2 * ["crashed main-0: could not be started (main-0 is unfit)"], "came main-0"]


async def test_where_the_address_is_known_it_waits_until_it_answers(ward):
    here = ward()
    here.nurse.deaf = 2
    quiet = "import signal; print('no address'); signal.pause()"
    await here.up(1, EngineTemplate("main", lambda w, p, g: tiny(w, p, g, quiet)._replace(url=f"http://127.0.0.1:{p}")))
    assert here.nurse.deaf == -1


async def test_one_that_never_answers_is_given_up_with_what_it_lacked(ward):
    here = ward()
    here.nurse.deaf = 10**9
    quiet = EngineTemplate(
        "main", lambda w, p, g: Launched(tiny(w, p, g).argv, url="http://127.0.0.1:9", start_timeout=0.3)
    )
    with pytest.raises(EngineError, match=r"not ready within 0\.3 s: nobody listens yet"):
        await here.up(1, quiet)


async def test_it_is_drained_before_it_is_ended(ward):
    here = await ward().up(2)
    here.nurse.hold = asyncio.Event()
    pids = await here.pids()
    await here.connector.scale("main", 1)
    await eventually(lambda: "leave main-1" in here.nurse.told)
    states = {replica.id: replica.state for replica in (await here.connector.pools())["main"].replicas}
    assert states == {"main-0": "ready", "main-1": "draining"} and alive(pids["main-1"])
    here.nurse.hold.set()
    await here.settled(ready=1)
    assert not alive(pids["main-1"])
    assert here.nurse.told[-2:] == ["leave main-1", "gone main-1"]


async def test_one_that_is_wanted_after_all_stays(ward):
    here = await ward().up(2)
    here.nurse.hold = asyncio.Event()
    pids = await here.pids()
    await here.connector.scale("main", 1)
    await eventually(lambda: "leave main-1" in here.nurse.told)
    await here.connector.scale("main", 2)
    await here.settled(ready=2)
    assert await here.pids() == pids
    assert here.nurse.told[-1] == "came main-1"


async def test_one_that_is_still_starting_goes_without_a_drain(ward):
    here = await ward().up(1)
    silent = EngineTemplate("slow", lambda w, p, g: tiny(w, p, g, "import signal; signal.pause()"))
    here.connector.add("slow", silent, Pool(model="m", desired=1))
    await here.connector.start()
    await eventually(lambda: (here.folder / "logs" / "slow-0.log").exists())
    await here.connector.scale("slow", 0)
    await here.settled("slow", ready=0)
    assert here.nurse.told == ["came main-0"]


async def test_one_whose_start_is_called_off_again_and_again_is_not_left_behind(ward, monkeypatch):
    here = ward()
    start, began, go = ShimClient.start, asyncio.Event(), asyncio.Event()
    shims: list[ShimClient] = []

    async def slow(*words, **how):
        began.set()
        await go.wait()
        shims.append(await start(*words, **how))
        return shims[-1]

    monkeypatch.setattr(ShimClient, "start", slow)
    here.connector.add("main", EngineTemplate("main", tiny), Pool(model="m", desired=1))
    await here.connector.start()
    await began.wait()
    closing = asyncio.create_task(here.close())
    await asyncio.sleep(0.3)  # several cancels
    go.set()
    await closing
    assert len(shims) == 1 and not alive(shims[0].pid)


async def test_ids_are_never_used_twice_at_a_time(ward):
    here = await ward().up(3)
    here.nurse.hold = asyncio.Event()
    await here.connector.scale("main", 2, without=["main-1"])
    await eventually(lambda: "leave main-1" in here.nurse.told)
    await here.connector.scale("main", 4, without=["main-1"])
    await eventually(lambda: "came main-4" in here.nurse.told)
    assert sorted(await here.pids()) == ["main-0", "main-1", "main-2", "main-3", "main-4"]
    here.nurse.hold.set()
    await here.settled(ready=4)


async def test_one_that_is_let_in_again_comes_as_itself_also_while_it_still_ends(ward, tmp_path):
    asked, end = tmp_path / "asked", tmp_path / "end"
    os.mkfifo(end)
    lingers = f"""
import signal, sys
def ending(*_):
    open({str(asked)!r}, "w").close()
    open({str(end)!r}).read()
    sys.exit(0)
signal.signal(signal.SIGTERM, ending)
{TINY.replace("signal.signal", "None and signal.signal")}"""
    here = await ward().up(3, EngineTemplate("main", lambda w, p, g: tiny(w, p, g, lingers if w == "main-1" else TINY)))
    await here.connector.scale("main", 1, without=["main-0", "main-1"])
    await eventually(asked.exists)
    await here.connector.scale("main", 2, without=["main-0"])
    assert "main-3" not in await here.pids(), "nobody takes its place"
    end.write_text("")
    await here.settled(ready=2)
    assert sorted(await here.pids()) == ["main-1", "main-2"]


async def test_gpus_belong_to_one_engine_each_and_come_back(ward):
    here = await ward(gpus=(0, 1, 2, 5, 7)).up(2, EngineTemplate("main", tiny, gpus=2))
    found = (await here.connector.pools())["main"]
    assert [replica.gpus for replica in found.replicas] == [(0, 1), (2, 5)]
    assert found.limit == 2
    assert '"gpus": "2,5"' in (here.folder / "logs" / "main-1.log").read_text()
    with pytest.raises(ConnectorError, match=r"0 to 2 replicas, not 3: each has 2 of the GPUs 0, 1, 2, 5, 7"):
        await here.connector.scale("main", 3)
    await here.connector.scale("main", 1)
    await here.settled(ready=1)
    assert here.gpus.free == 3


async def test_a_restarted_engine_keeps_its_gpus_and_a_new_one_waits_for_its_own(ward):
    here = await ward(gpus=(0, 1)).up(2, EngineTemplate("main", tiny, gpus=1))
    os.kill((await here.pids())["main-0"], signal.SIGKILL)
    await eventually(lambda: here.nurse.told.count("came main-0") == 2)
    assert [r.gpus for r in (await here.connector.pools())["main"].replicas] == [(0,), (1,)]
    here.nurse.hold = asyncio.Event()
    await here.connector.scale("main", 2, without=["main-0"])
    await eventually(lambda: "leave main-0" in here.nurse.told)
    await asyncio.sleep(0)
    waiting = (await here.connector.pools())["main"].replicas[2]
    assert waiting.state == "starting" and waiting.reason == "waits for 1 GPUs; 0 are free"
    here.nurse.hold.set()
    await here.settled(ready=2)


async def test_too_few_gpus_start_nothing(ward):
    here = ward(gpus=(0,))
    with pytest.raises(ConfigError, match=r"takes 2 x 1 GPUs, all together 2; there are: 0 \(the test\)"):
        await here.up(2, EngineTemplate("main", tiny, gpus=1))
    assert not here.nurse.told


# --- what outlives what -----------------------------------------------------------------------------------------------

SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from penstock.adapters.connectors.engine_process import EngineTemplate
from tests.adapters.connectors.holding import Ward, tiny

async def main(folder, grace, replicas):
    ward = Ward(Path(folder), grace=float(grace), gpus=(0, 1, 2, 3))
    await ward.up(int(replicas), EngineTemplate("main", tiny, 1))
    print(*(await ward.pids()).values(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


def killed_supervisor(folder: Path, *, grace: float, replicas: int = 2) -> list[int]:
    """Start engines from another process, kill that with -9, and return the engines' pids."""
    words = [sys.executable, "-c", SUPERVISOR, str(folder), str(grace), str(replicas)]
    supervisor = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    with supervisor.stdout:
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        supervisor.kill()
        supervisor.wait()
    assert len(pids) == replicas
    return pids


async def test_engines_of_a_killed_supervisor_are_taken_over(ward, tmp_path):
    pids = killed_supervisor(tmp_path / "a", grace=60)
    here = await ward("a", gpus=(0, 1, 2, 3)).up(2, EngineTemplate("main", tiny, 1))
    assert list((await here.pids()).values()) == pids
    assert sorted(here.connector.adopted) == ["main-0", "main-1"]
    assert sorted(here.nurse.told) == ["came main-0", "came main-1"]
    assert here.gpus.free == 2, "theirs are not given to others"
    os.kill(pids[0], signal.SIGKILL)
    await eventually(lambda: here.nurse.told.count("came main-0") == 2)
    await here.close()
    assert not any(alive(pid) for pid in pids)


async def test_nobody_takes_them_over_and_they_end_by_themselves(tmp_path):
    pids = killed_supervisor(tmp_path / "a", grace=2)
    assert all(alive(pid) for pid in pids)
    until(lambda: not any(alive(pid) for pid in pids))


async def test_what_is_not_wanted_any_more_is_ended_not_taken_over(ward, tmp_path):
    pids = killed_supervisor(tmp_path / "a", grace=60, replicas=3)
    other = EngineTemplate("main", lambda w, p, g: tiny(w, p, g, TINY + "#"), 1)
    here = await ward("a", gpus=(0, 1, 2, 3)).up(4, other)
    assert not here.connector.adopted
    assert not any(alive(pid) for pid in pids)
    assert len(await here.pids()) == 4


async def test_more_than_are_wanted_are_ended(ward, tmp_path):
    pids = killed_supervisor(tmp_path / "a", grace=60, replicas=3)
    here = await ward("a", gpus=(0, 1, 2, 3)).up(1, EngineTemplate("main", tiny, 1))
    await here.settled(ready=1)
    assert [pid for pid in pids if alive(pid)] == list((await here.pids()).values())


async def test_a_pool_is_as_it_was_scaled_before_the_crash(ward, tmp_path):
    first = await ward("a", grace=60).up(2)
    await first.connector.scale("main", 4)
    await first.settled(ready=4)
    pids = await first.pids()
    leases = [entry["lease"] for entry in first.file().values()]
    file = (first.folder / "state" / "test.json").read_bytes()
    await first.connector.close()  # its engines are gone, but say that they are not: others stand in for them
    assert not any(alive(pid) for pid in pids.values())
    stand_ins = [
        await ShimClient.start(
            f"main-{n}", tiny(f"main-{n}", 0, ()), log_path=tmp_path / "log", grace=60, end=5, env={}
        )
        for n in range(4)
    ]
    for lease, stand_in in zip(leases, stand_ins):
        file = file.replace(lease.encode(), stand_in.lease.encode())
    first.state.close()
    first.closed = True
    (first.folder / "state" / "test.json").write_bytes(file)
    here = await ward("a").up(2)
    await here.settled(ready=4)
    assert sorted((await here.pids()).values()) == sorted(stand_in.pid for stand_in in stand_ins)


async def test_what_an_engine_leaves_behind_is_ended_with_it(ward, tmp_path):
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()'],\n"
        "                         start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n" + TINY
    )
    here = await ward().up(1, EngineTemplate("main", lambda w, p, g: tiny(w, p, g, code)))
    grandchild = int((tmp_path / "pid").read_text())
    assert alive(grandchild)
    os.kill((await here.pids())["main-0"], signal.SIGKILL)
    await eventually(lambda: not alive(grandchild))


async def test_one_that_does_not_listen_to_sigterm_is_killed(tmp_path):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    launch = tiny("w", 0, (), stubborn + 'print(\'{"url": "u"}\', flush=True)\nwhile True: signal.pause()')
    kept = await ShimClient.start("w", launch, log_path=tmp_path / "log", grace=0, end=5, env={})
    await kept.first_line(30)
    assert not await kept.stop(0.1)
    assert not alive(kept.pid)


async def test_an_engine_whose_shim_is_killed_is_ended_and_replaced(ward):
    here = await ward().up(1)
    (pid,) = (await here.pids()).values()
    (entry,) = here.file().values()
    shim = parent_of(pid)
    assert entry["pid"] == pid
    os.kill(shim, signal.SIGKILL)
    await eventually(lambda: here.nurse.told.count("came main-0") == 2)
    assert not alive(pid)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def test_a_lease_that_nobody_keeps_is_no_engine(tmp_path):
    assert await ShimClient.adopt("w", "penstock-nobody", tmp_path / "log") is None
