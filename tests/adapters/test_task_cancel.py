"""Does a task end that took its first cancel for something else?"""

import asyncio

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.task_cancel import cancel_all, end


async def test_a_task_that_swallows_a_cancel_is_ended_all_the_same() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    async def fails() -> None:
        raise ValueError("of no interest here")

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await end(tasks)
    assert swallowed == 2
    assert isinstance(tasks[1].exception(), ValueError)
    await end(tasks)  # once more is no error


async def test_a_task_that_is_cancelled_once_may_clean_up_for_longer() -> None:
    cancels, cleaned = 0, asyncio.Event()

    async def tidy() -> None:
        nonlocal cancels
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancels += 1
            await asyncio.sleep(0.25)  # `end` would have cancelled it again
            cleaned.set()

    task = asyncio.create_task(tidy())
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await cancel_all([task])
    assert task.done() and cleaned.is_set() and cancels == 1


async def test_background_tasks_are_kept_until_they_end() -> None:
    tasks, go = BackgroundTasks(), asyncio.Event()

    async def wait() -> None:
        await go.wait()

    first, second = tasks.spawn(wait(), "first"), tasks.spawn(wait())
    assert (len(tasks), first.get_name(), set(tasks)) == (2, "first", {first, second})
    waiter = asyncio.create_task(tasks.settled())
    await asyncio.sleep(0)
    await cancel_all([waiter])
    assert not first.done(), "whoever waits for them does not end them"
    go.set()
    await tasks.settled()
    assert len(tasks) == 0 and first.done() and not first.cancelled()
    last = tasks.spawn(asyncio.sleep(3600))
    await tasks.close()
    assert last.cancelled()
