"""The loop's longest block: what we cause counts, what the machine causes is a delay only."""

import asyncio
import time

from penstock.runtime.loop_monitor import LoopMonitor


async def watched(work: float, *, busy: bool) -> LoopMonitor:
    monitor = LoopMonitor()
    task = asyncio.create_task(monitor.run())
    while monitor.samples < 2:
        await asyncio.sleep(0.001)
    end = time.perf_counter() + work
    if busy:
        start = time.process_time()
        while time.process_time() - start < work:
            pass
    else:
        time.sleep(max(0.0, end - time.perf_counter()))  # noqa: ASYNC251 - a loop without CPU is what is meant
    looks = monitor.samples
    while monitor.samples == looks:
        await asyncio.sleep(0.001)
    task.cancel()
    return monitor


async def test_work_on_the_loop_is_a_block() -> None:
    monitor = await watched(0.05, busy=True)
    assert monitor.longest > 0.03 and monitor.over_budget >= 1
    assert monitor.take_recent() == monitor.longest and monitor.take_recent() == 0.0


async def test_a_loop_without_cpu_is_delayed_but_not_blocked_by_us() -> None:
    monitor = await watched(0.05, busy=False)
    assert monitor.longest_delay > 0.03 and monitor.longest < 0.03
