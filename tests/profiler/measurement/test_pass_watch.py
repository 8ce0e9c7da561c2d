"""Are only passes of equal requests joined, and is it said where production has not been?"""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from penstock.config.files.profile_manifest import read_measured
from penstock.engine.settings import SimSettings, TimingSettings
from penstock.kernel.errors import EngineError
from penstock.kernel.values import StepStats
from penstock.profiler.measurement.pass_watch import PassBook, alike, watch
from penstock.testing import simulated_servers


def window(passes: int = 1, wall: float = 0.1, **sums: int) -> StepStats:
    usual = {"prefill_tokens": 0, "prefill_requests": 0, "decode_seqs": 0, "decode_seqs_sq": 0, "decode_kv": 0}
    return StepStats(passes=passes, wall=wall, **{**usual, **sums})


def test_unequal_requests_are_never_averaged_into_equal_ones() -> None:
    book = PassBook(1, None)
    book.add(window(prefill_tokens=3_100, prefill_requests=2))  # 100 and 3,000 tokens are no two prompts of 1,550
    book.add(window(2, prefill_tokens=3_100, prefill_requests=2))
    book.add(window(2, decode_seqs=12, decode_seqs_sq=4 + 100, decode_kv=12_000))  # 2 and 10 sequences are not 6
    assert book.points() == [] and (book.passes, book.unequal) == (5, 5)
    book.add(window(4, 0.4, decode_seqs=24, decode_seqs_sq=4 * 36, decode_kv=4 * 6_000))
    book.add(window(prefill_tokens=3_000, prefill_requests=1, wall=0.3))
    book.add(window(prefill_tokens=1_000, prefill_requests=1, decode_seqs=5, decode_seqs_sq=25, decode_kv=5_000))
    found = {(p.kind, p.tokens, p.seqs, p.context, round(p.mean, 6)) for p in book.points()}
    assert found == {("decode", 0, 6, 1_000.0, 0.1), ("prefill", 3_000, 0, 0.0, 0.3), ("mixed", 1_000, 5, 1_000.0, 0.1)}


def test_estimates_of_wall_time_do_not_count_and_kv_comes_from_use_where_passes_lack_it() -> None:
    estimated = StepStats(passes=3, wall=1.0, decode_seqs=3, decode_seqs_sq=3, prefill_tokens=0, estimated=("wall",))
    plain = StepStats(passes=1, wall=0.02, decode_seqs=4, decode_seqs_sq=16, prefill_tokens=0)
    book = PassBook(1, 100_000)
    book.add(estimated)
    assert book.passes == 0
    book.add(plain)
    assert book.unequal == 1, "what it read is not known"
    book.usage = 0.2
    book.add(plain)
    (point,) = book.points()
    assert (point.seqs, point.context) == (4, 5_000.0)
    assert alike(StepStats(passes=1, wall=0.1)) == (None, 0.0, 0.0)


async def test_a_serving_engine_is_watched_at_no_cost(tmp_path: Path) -> None:
    settings = SimSettings(kv_blocks=512, timing=TimingSettings(prefill=(0.0, 0.02, 20.0), decode=(0.0, 40.0, 12.0)))
    async with simulated_servers(1, settings) as (server,), aiohttp.ClientSession() as http:

        async def use() -> None:
            for number in range(6):
                prompt = [3 + (number + place) % 250 for place in range(700)]
                body = {"model": "sim", "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
                async with http.post(f"{server.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200

        _, manifest = await asyncio.gather(use(), watch(server.url, 2.0, tmp_path / "seen"))
    profile = read_measured(tmp_path / "seen")
    assert profile.manifest.source == "production" and (tmp_path / "seen" / "report.html").exists()
    decode = [point for point in profile.points if point.kind == "decode"]
    assert decode and all(point.seqs == 1 for point in decode)
    for point in decode:
        assert point.mean == pytest.approx(0.012 + 0.04 * point.context / settings.capacity, rel=0.1)
    for point in profile.points:
        if point.kind == "prefill":
            assert point.mean == pytest.approx(0.020 + 2e-5 * point.tokens, rel=0.05)
    assert any("more than 1 sequences in flight were not seen" in text for text in manifest.left_out) or any(
        "KV use above" in text for text in manifest.left_out
    )


async def test_an_engine_that_nobody_uses_makes_no_profile(tmp_path: Path) -> None:
    async with simulated_servers() as (server,):
        with pytest.raises(EngineError, match="no pass that counts"):
            await watch(server.url, 0.1, tmp_path / "none")
    assert not (tmp_path / "none").exists()
