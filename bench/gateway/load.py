"""What does a client see of a gateway, and what does the gateway's process need for it? One measurement.

usage: python load.py '{"port": 8000, "pids": [12], "concurrency": 16, "seconds": 2, ...}'    (prints JSON)

Closed loop: so many clients, each with one kept connection, ask again as soon as they are answered. With ``rate``, so
many requests per second are sent on time, whatever came back. CPU is user and system time of the processes named,
from the scheduler's own account (nanoseconds), over the measured span only.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import uvloop
from prompts import bodies

QUICKACK = 12
TIMEOUT = 30.0
"""Seconds that one request may take."""


class Client(asyncio.Protocol):
    """One kept connection with at most one request on it."""

    def __init__(self, stream: bool, quickack: bool) -> None:
        self.stream = stream
        self.quickack = quickack
        self.got = bytearray()
        self.done: asyncio.Future[float] | None = None
        self.first = 0.0
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.socket = transport.get_extra_info("socket")

    def ask(self, raw: bytes) -> "asyncio.Future[float]":
        self.got.clear()
        self.first = 0.0
        self.events = 0
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(raw)
        return self.done

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.quickack:
            self.socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
        if self.done is None or self.done.done():
            return
        got = self.got
        got += data
        if self.stream:
            self.events += data.count(b"data:")
            if not self.first and self.events:
                self.first = now
            ended = bool(self.events) and got.endswith(b"\r\n0\r\n\r\n")
            if len(got) > 4096:
                del got[256:-16]  # the head and the end are all that is looked at again
        else:
            ended = whole(got)
        if ended:
            if not got.startswith(b"HTTP/1.1 200"):
                self.done.set_exception(ValueError(bytes(got[:200]).decode("latin-1")))
            else:
                self.done.set_result(now)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(error or ConnectionError("the gateway closed the connection"))


def whole(got: bytearray) -> bool:
    end = got.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(got[:end]).lower()
    at = head.find(b"\r\ncontent-length:")
    if at >= 0:
        return len(got) >= end + 4 + int(head[at + 17 :].split(b"\r\n", 1)[0])
    return got.endswith(b"0\r\n\r\n")


def request(body: bytes, key: str | None = None) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    if key is not None:
        head += f"authorization: Bearer {key}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time that processes have had so far."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except OSError:
                continue  # a thread that has just ended
    return total / 1e9


class Measurement:
    """The clients and what they saw."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.port = asked["port"]
        self.pids: list[int] = asked.get("pids", [])
        self.concurrency = asked.get("concurrency", 1)
        self.seconds = asked.get("seconds", 2.0)
        self.rate: float | None = asked.get("rate")
        self.stream = asked.get("stream", False)
        self.quickack = asked.get("quickack", True)
        self.warm = asked.get("warm", 0.4)
        made = bodies(
            asked.get("kind", "new"),
            asked.get("words", 100),
            asked.get("seed", 1),
            stream=self.stream,
            tokens=asked.get("tokens", 16),
            gap_ms=asked.get("gap_ms", 0),
        )
        # Made beforehand, so that making them does not take the gateway's CPU; a new prompt stays new for a whole run.
        count = int(asked.get("prepared", 4000))
        keys = cycle(asked.get("keys") or [None])
        self.requests: list[bytes] = [request(body, key) for body, key, _ in zip(made, keys, range(count))]
        self.took: list[float] = []
        self.ttft: list[float] = []
        self.events = 0
        self.errors: list[str] = []
        self.closed_between = 0
        """Connections that the gateway closed after a whole answer."""

    async def run(self) -> dict[str, Any]:
        feed = self.endless()
        clients = [await self.client() for _ in range(self.concurrency)]
        await self.span(clients, feed, self.warm)
        self.took, self.ttft, self.events, self.errors = [], [], 0, []
        before, started = cpu_seconds(self.pids), time.perf_counter()
        await self.span(clients, feed, self.seconds)
        elapsed = time.perf_counter() - started
        return self.result(elapsed, cpu_seconds(self.pids) - before)

    def endless(self) -> Iterator[bytes]:
        while True:
            yield from self.requests

    async def client(self) -> Client:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: Client(self.stream, self.quickack), "127.0.0.1", self.port)
        return made

    async def span(self, clients: list[Client], feed: Iterator[bytes], seconds: float) -> None:
        until = time.perf_counter() + seconds
        if self.rate is None:
            await asyncio.gather(*(self.closed(client, feed, until) for client in clients))
        else:
            await self.open(clients, feed, until, self.rate)

    async def closed(self, client: Client, feed: Iterator[bytes], until: float) -> None:
        while time.perf_counter() < until:
            client = await self.one(client, next(feed), time.perf_counter())

    async def open(self, clients: list[Client], feed: Iterator[bytes], until: float, rate: float) -> None:
        idle = list(clients)
        running = set()
        due = time.perf_counter()

        async def ask(at: float) -> None:
            client = idle.pop() if idle else await self.client()
            idle.append(await self.one(client, next(feed), at))

        while due < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(ask(due))
            running.add(task)
            task.add_done_callback(running.discard)
            due += 1 / rate
        await asyncio.gather(*running)

    async def one(self, client: Client, raw: bytes, started: float) -> Client:
        if client.transport.is_closing():
            self.closed_between += 1
            client = await self.client()
        try:
            ended = await asyncio.wait_for(client.ask(raw), TIMEOUT)
        except (OSError, ValueError, TimeoutError) as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:200])
            client.transport.abort()
            return await self.client()
        self.took.append(ended - started)
        if self.stream:
            self.ttft.append(client.first - started)
            self.events += client.events
        return client

    def result(self, elapsed: float, cpu: float) -> dict[str, Any]:
        count = len(self.took)
        found: dict[str, Any] = {
            "requests": count,
            "errors": len(self.errors),
            "closed_between": self.closed_between,
            "first_error": self.errors[0] if self.errors else None,
            "rps": count / elapsed,
            "cpu_ms": cpu / count * 1e3 if count else None,
            "p50_ms": at(self.took, 0.5),
            "p99_ms": at(self.took, 0.99),
        }
        if self.stream:
            found |= {
                "ttft_p50_ms": at(self.ttft, 0.5),
                "ttft_p99_ms": at(self.ttft, 0.99),
                "events": self.events,
                "cpu_us_per_event": cpu / self.events * 1e6 if self.events else None,
            }
        return found


def at(values: list[float], share: float) -> float | None:
    """Return a quantile in milliseconds."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3


if __name__ == "__main__":
    print(json.dumps(uvloop.run(Measurement(json.loads(sys.argv[1])).run())))
