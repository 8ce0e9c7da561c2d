"""Images on virtual time: who encodes them, how often, and what that takes."""

import itertools
import random
from statistics import mean
from typing import Any

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.kernel.hashing import MediaSpan
from penstock.kernel.machine import SECOND, Wake, Woken
from penstock.kernel.media.media_tokens import TOKENS_MAX, TOKENS_MIN, image_tokens, video_tokens
from penstock.kernel.values import Prompt, RequestId
from penstock.router.settings import HandoffSettings, RouterSettings
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFirstToken, SubmitRequest
from penstock_lab.engine.settings import EncoderSettings, SimSettings
from penstock_lab.simulate.simulation_plan import PoolPlan
from penstock_lab.traffic.image_spec import ImageSpec
from penstock_lab.traffic.lengths import Fixed
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import Images, images
from tests.lab.simulate.test_simulated_cluster import SIM, Run, plan

SLOW_EYES = msgspec.structs.replace(SIM, encoder=EncoderSettings(tokens_per_second=5_000, overhead=0.0))


def asked(number: int, rate: float = 2.0, **spec: Any) -> list[TrafficRequest]:
    shape = ImageSpec(**{"side": 1120, **spec}).shape()
    return list(itertools.islice(images(rate, random.Random(1), shape=shape), number))


def run(requests: list[TrafficRequest], **more: Any) -> Run:
    pools = {
        "eyes": PoolPlan(sim=SLOW_EYES, replicas=2, role="encode"),
        "main": PoolPlan(sim=SLOW_EYES, replicas=2),
    }
    return Run(plan(**{"pools": pools, "checked": True, **more}), requests)


def test_each_image_is_encoded_once_in_the_cluster_and_read_by_those_that_answer() -> None:
    requests = asked(60, count=2, repeats=0.7, popular=10)
    found = run(requests)
    assert found.outcomes() == {"ok": len(requests)}
    different = {item.id for request in requests for item in request.media}
    media = found.cluster.media()
    assert media["encoded"] == len(different) < 120 and media["fetched"] >= len(different)
    roles = {tuple(leg.role for leg in record.legs) for record in found.records}
    assert roles == {("encode", "aggregated"), ("aggregated",)}
    assert sum(record.media_cached or 0 for record in found.records) > 0
    assert {record.media for record in found.records} == {2}


def test_without_encode_workers_the_engines_encode_and_decoding_waits() -> None:
    requests = asked(30, rate=4.0, repeats=0.0)
    pools = {"main": PoolPlan(sim=SLOW_EYES, replicas=2)}
    whole, split = run(requests, pools=pools), run(requests)
    assert {tuple(leg.role for leg in record.legs) for record in whole.records} == {("aggregated",)}
    assert whole.cluster.media()["encoded"] == split.cluster.media()["encoded"] == 30

    def itl(found: Run) -> float:
        return mean(record.tpot for record in found.records if record.tpot is not None)

    assert itl(whole) > 1.5 * itl(split), "1,600 tokens of an image take 0.3 s, for all who decode there"


def test_encode_prefill_and_decode_are_three_pools() -> None:
    pools = {
        "eyes": PoolPlan(sim=SLOW_EYES, replicas=1, role="encode"),
        "prefill": PoolPlan(sim=SLOW_EYES, replicas=1, role="prefill"),
        "decode": PoolPlan(sim=SLOW_EYES, replicas=1, role="decode"),
    }
    always = RouterSettings(handoff=HandoffSettings(conditional="off"))
    requests = asked(12, repeats=0.0)
    found = run(requests, pools=pools, router=always)
    assert {tuple(leg.role for leg in record.legs) for record in found.records} == {("encode", "prefill", "decode")}
    decode = [worker for worker in found.cluster.fleet.workers.values() if worker.pool == "decode"]
    assert all(worker.engine.media_counts == (0, 0, 0) for worker in decode), "what is decoded is there as KV"


def test_the_same_seed_comes_to_the_same() -> None:
    requests = asked(30, count=2, repeats=0.5)
    assert run(requests).bytes() == run(requests).bytes()


def first_token(engine: Engine, id: str, *media: MediaSpan, **more: Any) -> float:
    """Return the seconds to the first token of a prompt of 4,000 tokens, alone in the engine."""
    wake = engine._now
    submit = SubmitRequest(id=RequestId(id), prompt=Prompt(4000), max_tokens=1, media=list(media), **more)
    began, effects = wake, list(engine.handle(wake, submit))
    while True:
        for effect in effects:
            if isinstance(effect, EngineFirstToken):
                return (effect.at - began) / SECOND
            if isinstance(effect, Wake):
                wake = effect.at
        effects = list(engine.handle(wake, Woken()))


def test_encoding_takes_its_time_once_and_reading_takes_less() -> None:
    settings = SimSettings(encoder=EncoderSettings(tokens_per_second=1_000, overhead=0.5, cache_tokens=2_500))
    engine = Engine(settings)
    plain = first_token(engine, "a")
    cat, dog, cow = (MediaSpan(name, 0, 1_000) for name in ("cat", "dog", "cow"))
    assert first_token(engine, "b", cat) == pytest.approx(plain + 1.5, abs=1e-6)
    assert first_token(engine, "c", cat) == pytest.approx(plain, abs=1e-6), "its own cache has it"
    assert first_token(engine, "d", cat, dog) == pytest.approx(plain + 1.5, abs=1e-6)
    first_token(engine, "e", cow)
    assert first_token(engine, "f", cat) == pytest.approx(plain + 1.5, abs=1e-6), "it has made room"
    assert 0 < first_token(engine, "g", dog, embedded=["dog"]) - plain < 0.1
    again = Engine(settings)
    again.restore(engine.snapshot())
    assert again.snapshot() == engine.snapshot() and again.media_counts == engine.media_counts == (4, 2, 1)
    eyes = Engine(settings)
    assert first_token(eyes, "a", cat, encode=True) == pytest.approx(1.5, abs=1e-6), "it prefills nothing"


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(28, 28, 4), (1, 1, 4), (56, 56, 4), (448, 448, 256), (1920, 1080, 69 * 39), (1120, 1120, 1600)],
)
def test_tokens_of_a_picture_are_its_tiles(width: int, height: int, tokens: int) -> None:
    assert image_tokens(width, height) == tokens


def test_tokens_stay_within_limits_and_grow_with_the_picture() -> None:
    last = 0
    for side in range(1, 20_000, 97):
        found = image_tokens(side, side)
        assert TOKENS_MIN <= found <= TOKENS_MAX and found >= 0.98 * last
        last = found
    assert image_tokens(100_000, 1) >= TOKENS_MIN and image_tokens(0, 0) >= TOKENS_MIN
    assert video_tokens(448, 448, 5) == 3 * 256


def test_the_workload_has_images_in_their_places() -> None:
    requests = asked(50, count=3, repeats=0.5)
    for request in requests:
        assert len(request.media) == 3 and request.isl == len(request.hash_ids) * request.block_size
        for item in request.media:
            assert item.start % request.block_size == 0 and item.start + item.tokens <= request.isl
    by_id: dict[str, set[tuple[int, ...]]] = {}
    for request in requests:
        for item in request.media:
            first = item.start // request.block_size
            ids = tuple(request.hash_ids[first : first + -(-item.tokens // request.block_size)])
            by_id.setdefault(item.id, set()).add(ids)
    assert all(len(found) == 1 for found in by_id.values()), "the same image is the same blocks"
    assert len({ids for found in by_id.values() for ids in found}) == len(by_id)
    with pytest.raises(ConfigError, match="text"):
        next(images(1.0, random.Random(1), form="text", shape=Images(count=Fixed(1))))
