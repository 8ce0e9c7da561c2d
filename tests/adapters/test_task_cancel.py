"""Does a task end that took its first cancel for something else?"""

import asyncio

from penstock.adapters.task_cancel import end


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
