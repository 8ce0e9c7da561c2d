"""Whatever becomes of a leg whose client has gone: the KV that a prefill worker holds for it is fetched by somebody."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.adapters.engines.http.engine_call import EngineUnreachable
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.exchange.open_attempts import OpenAttempts
from penstock.frontend.exchange.prefill_stages import PrefillResult, PrefillStages
from penstock.kernel.values import RequestId, WorkerCard, WorkerId
from penstock.router.events import Handoff


def card(name: str, role: Any = "decode", layout: str = "l") -> WorkerCard:
    return WorkerCard(
        id=WorkerId(name),
        epoch=1,
        model="m",
        url=f"http://{name}",
        role=role,
        engine="vllm",
        handoff="completed",
        layout=layout,
    )


class Call:
    """A call to an engine that answers with this status and these pieces, or can't be made."""

    def __init__(self, status: int = 200, *pieces: bytes, refused: bool = False) -> None:
        self.status, self.pieces, self.refused, self.closed = status, list(pieces), refused, False

    async def begin(self) -> None:
        if self.refused:
            raise EngineUnreachable("connection refused")

    async def next(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def read(self) -> bytes:
        return b"{}"

    def close(self) -> None:
        self.closed = True


async def asked_after(leg: Call, *others: WorkerCard) -> tuple[list[str], PrefillStages]:
    """Return the engines that were asked to fetch after a leg to d0 whose client has gone."""
    asked: list[str] = []

    def call(url: str, *words: object) -> Call:
        asked.append(url)
        return Call()

    prefill, decode = card("p0", "prefill"), card("d0")
    cards = [prefill, decode, *others]
    engines: Any = SimpleNamespace(call=call)
    cluster: Any = SimpleNamespace(cards=lambda: cards)
    stages = PrefillStages(engines, cluster, OpenAttempts(), ClusterSettings)
    request = RequestId("r")
    fields = {"kv_transfer_params": {"remote_block_ids": [1]}}
    stages.done(request, PrefillResult(1, prefill, fields, {"model": "m"}, "completions", {}))
    handoff = Handoff(protocol="completed", key=0, source=prefill, source_attempt=1)
    word: Any = SimpleNamespace(id=request, attempt=2, card=decode, handoff=handoff)
    made = stages.taken_by(word, request)
    assert made is not None and made.taken_by == 2
    del stages.made[request]  # the request is over before its leg is
    leg_call: Any = leg
    stages.finish_fetch(word, made, leg_call, asyncio.create_task(leg.begin()))
    async with asyncio.timeout(10):
        while stages._tasks:
            await asyncio.sleep(0)
    assert leg.closed
    return asked, stages


@pytest.mark.parametrize(
    "leg", [Call(refused=True), Call(503), Call(200)], ids=["can't be reached", "refuses", "ends without a token"]
)
async def test_another_worker_fetches_what_the_leg_did_not(leg: Call) -> None:
    asked, stages = await asked_after(leg, card("p1", "prefill"), card("odd", layout="other"), card("d1"))
    assert asked == ["http://d1"] and (stages.released, stages.release_failures) == (1, 0)


async def test_a_leg_that_had_its_token_has_fetched_it() -> None:
    asked, _ = await asked_after(Call(200, b'data: {"role": "x"}', b'data: {"choices": [{"text": "a"}]}'), card("d1"))
    assert asked == []


async def test_without_another_worker_it_is_left_to_the_engines_time_out() -> None:
    asked, stages = await asked_after(Call(refused=True))
    assert asked == [] and stages.released == 0
