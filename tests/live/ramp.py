"""A ramp of load on a served cluster with a planner: few clients, many, few again; and what is asked of every planner.

Used for engines of any kind: `tests/vllm/planned` and `tests/llamacpp` start real ones.
"""

import http.client
import threading
import time
import urllib.error
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.live.cluster import Served, stream, until
from tests.live.test_operate import penstock

STEP, STEEPER = 10.0, 1.15
"""Every so many seconds so many times as much comes, from what one replica was seen to answer on."""
CLEARLY = 1.1
"""How many times the rate at which two were first wanted is sent until two serve: at the edge a policy may waver."""
QUIET = 0.25
"""What comes at last, in terms of what one replica answers."""
PATIENCE = 900.0
"""Seconds that a client waits for a token: until a second replica serves, the requests above what one answers wait.
On a busy machine vLLM was seen to need 230 for its start, and its backlog longer than that."""


class Followed(NamedTuple):
    """How many requests a ramp had; and seconds: since it began until two replicas were wanted and ready, and since few
    requests came until one was wanted and left."""

    requests: int
    two_wanted: float
    two_ready: float
    one_wanted: float
    one_left: float


class Load:
    """Requests whose answers are streamed: of clients that ask one after the other, or so many a second."""

    def __init__(self, url: str, body: Callable[[int, int], dict[str, Any]]) -> None:
        """Ask nothing yet.

        Args:
            body: what a client asks for: its number, and its how many-th request it is, to a completion's body.
        """
        self.ends: list[str] = []
        """What each stream ended with."""
        self._wanted = 0
        self._rate = 0.0
        self._url = url
        self._body = body
        self._ended = threading.Event()
        self._clients: list[threading.Thread] = []
        self._others: list[threading.Thread] = [threading.Thread(target=self._pace, daemon=True)]
        self._others[0].start()

    def clients(self, count: int) -> None:
        """Have so many clients, and nothing else."""
        self._wanted, self._rate = count, 0.0
        while len(self._clients) < count:
            thread = threading.Thread(target=self._client, args=(len(self._clients),), daemon=True)
            self._clients.append(thread)
            thread.start()

    def rate(self, per_second: float) -> None:
        """Send so many requests a second, whatever becomes of them, and nothing else."""
        self._wanted, self._rate = 0, per_second

    def end(self) -> None:
        """Let each request finish."""
        self._ended.set()
        for thread in [*self._clients, *self._others]:
            thread.join(PATIENCE)

    def _client(self, number: int) -> None:
        turn = 0
        while not self._ended.wait(0.0 if number < self._wanted else 0.1):
            if number < self._wanted:
                turn += 1
                self._ask(number, turn)

    def _pace(self) -> None:
        turn, due = 0, time.monotonic()
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            rate = self._rate
            # On time on average: a busy machine that wakes this thread late must not lower the rate.
            due += 1.0 / rate if rate else 0.1
            if rate:
                turn += 1
                thread = threading.Thread(target=self._ask, args=(len(self._clients), turn), daemon=True)
                self._others.append(thread)
                thread.start()

    def _ask(self, number: int, turn: int) -> None:
        try:
            *_, end = stream(f"{self._url}/v1/completions", self._body(number, turn), PATIENCE)
        except urllib.error.HTTPError as error:
            end = f"{error.code} {error.read()!r}"
        except (OSError, http.client.HTTPException) as error:
            end = repr(error)
        self.ends.append(end)


def pool_of(cluster: Served) -> dict[str, Any]:
    """Return what `/admin/desired` says of the only pool."""
    (found,) = cluster.get("/admin/desired")[1]["pools"]
    return dict(found)


class Rise(NamedTuple):
    """The rate that one replica answers (requests/s), and when two were wanted and ready (seconds)."""

    rate: float
    two_wanted: float
    two_ready: float


def rise(
    cluster: Served,
    load: Load,
    start_limit: float,
    story: Callable[[], str],
    learns_for: float = 0.0,
    one: float | None = None,
) -> Rise:
    """See the planner go from one replica to two; arguments as of `follow_a_ramp`."""

    def climb(began: float, rate: float) -> float:
        """Return the rate at which two are wanted."""
        found = rate
        while pool_of(cluster)["desired"] < 2:
            seconds = time.monotonic() - began
            assert seconds < 240.0, story()
            found = rate * STEEPER ** (seconds // STEP)
            load.rate(found)
            time.sleep(0.1)
        return found

    def ten_clients() -> float:
        """Return the rate that one replica answers."""
        load.clients(10)
        began, before = time.monotonic(), len(load.ends)
        until(lambda: len(load.ends) >= before + 40 and time.monotonic() >= began + learns_for, 120 + learns_for, story)
        return (len(load.ends) - before) / (time.monotonic() - began)

    load.clients(1)
    until(lambda: len(load.ends) >= 10, 120, story)
    rate = one or ten_clients()
    began = time.monotonic()
    load.rate(CLEARLY * climb(began, rate))
    two_wanted = time.monotonic() - began
    until(lambda: pool_of(cluster)["ready"] == 2, start_limit, story)
    two_ready = time.monotonic() - began
    busy = len(load.ends)
    until(lambda: len(load.ends) > busy + 20, 120, story)
    return Rise(rate, two_wanted, two_ready)


def follow_a_ramp(
    cluster: Served,
    body: Callable[[int, int], dict[str, Any]],
    start_limit: float,
    learns_for: float = 0.0,
    *,
    one: float | None = None,
    explained: Callable[[], str] | None = None,
) -> Followed:
    """See the planner go from one replica to two and back, say why, and fail no request; return how long it took.

    One client asks; then ten, which shows how many requests a second one replica answers; then those come, and more and
    more, until two are wanted, and a little more until two serve; then few come.

    Args:
        body: as of `Load`; one client must ask for far less than a replica serves.
        start_limit: seconds until a second engine must be ready.
        learns_for: seconds of the ten clients' load that the policy needs to know how fast an engine is.
        one: requests a second that one replica answers, where that is known: then no ten clients ask.
        explained: what `penstock explain scale` says; None asks the cluster, whose own planner it is then.
    """
    told = explained or (lambda: penstock(cluster, "explain", "scale", "--limit", "200"))

    def story() -> str:
        return told() + cluster.text

    load = Load(cluster.url, body)

    try:
        risen = rise(cluster, load, start_limit, story, learns_for, one)
        load.rate(QUIET * risen.rate)
        ended = time.monotonic()
        until(lambda: pool_of(cluster)["desired"] == 1, 240, story)
        one_wanted = time.monotonic() - ended
        until(lambda: len(pool_of(cluster)["replicas"]) == 1, PATIENCE, story)  # it finishes its own backlog first
        one_left = time.monotonic() - ended
    finally:
        load.end()
    assert set(load.ends) == {"[DONE]"} and len(load.ends) > 40
    assert "1 -> 2" in told() and "2 -> 1" in told(), told()
    found = cluster.get("/admin/status")[1]
    assert found["requests"]["failed"] == found["requests"]["rejected"] == 0
    assert not any(each["cut"] for each in cluster.get("/admin/desired")[1]["drained"].values())
    return Followed(len(load.ends), risen.two_wanted, risen.two_ready, one_wanted, one_left)
