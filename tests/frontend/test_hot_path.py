"""How much of our code does a plain streamed chat run? Files under src/penstock, and calls of functions defined there.

Counted is one request on a warm frontend, in its own process, over a kept connection: from the call that gets its first
byte until the one that ends its answer; as a second number with what follows until the connection is ready for the
next request; and as a third what it takes to enter its record and counts, which is done for many requests at once. A
scripted engine, which is no code of ours, streams nine pieces, one by one. A coroutine that goes on counts as a call,
as `sys.setprofile` has it.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import penstock
from penstock.frontend.http.http1_exchange import Http1Exchange
from tests.frontend.raw import connect, read_answer
from tests.frontend.stand import answer, eventually, stand
from tests.security.attacks import chat, post

SOURCES = str(Path(penstock.__file__).parent)
FILES_MAX = 43
CALLS_MAX = 269
ALL_CALLS_MAX = 288
ENTRY_CALLS_MAX = 111
PIECES = 8


async def test_a_streamed_chat_runs_few_files_and_few_calls() -> None:
    calls: Counter[tuple[str, str]] = Counter()
    answering: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            calls[frame.f_code.co_filename.removeprefix(SOURCES), frame.f_code.co_qualname] += 1
        elif event == "return" and frame.f_code is Http1Exchange.end.__code__:
            answering.clear()
            answering.update(calls)

    fewest: list[Counter[tuple[str, str]]] = []
    async with stand() as s:
        s.engines[0].reply = lambda request, body: answer(request, body, PIECES, gap=0.005)
        reader, writer = await connect(s)
        for number in range(8):
            calls.clear()
            answering.clear()
            sys.setprofile(count if number >= 3 else None)
            try:
                writer.write(post(chat("a question that is as long as such questions are", stream=True)))
                found = await read_answer(reader)
                assert s.server._listener is not None
                (connection,) = s.server._listener.connections
                await eventually(lambda: connection.idle)  # noqa: B023
                whole = calls.copy()
                s.service.bookkeeping.enter()
            finally:
                sys.setprofile(None)
            assert found.status == 200 and found.body.count(b"data: ") == PIECES + 2
            if number >= 3 and (not fewest or whole.total() < fewest[0].total()):
                fewest = [whole, answering.copy(), calls - whole]
        writer.close()
    whole, answered, entered = fewest
    files = {file for file, _ in answered}
    listed = "\n".join(f"{number:4} {file} {name}" for (file, name), number in sorted(answered.items()))
    told = (
        f"{len(files)} files and {answered.total()} calls, {whole.total()} with what follows, {entered.total()} to "
        f"enter it:\n{listed}"
    )
    assert answered.total() > 50 and entered.total() > 10, "it was not counted"
    assert len(files) <= FILES_MAX and answered.total() <= CALLS_MAX and whole.total() <= ALL_CALLS_MAX, told
    assert entered.total() <= ENTRY_CALLS_MAX, told
