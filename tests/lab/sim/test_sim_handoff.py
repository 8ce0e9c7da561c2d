"""Do two simulated engines hand KV over as real ones do? Two servers in one process, over real HTTP on loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from penstock_lab.engine.settings import SimSettings, TransferSettings
from penstock_lab.sim.sim_server import RunningServer
from tests.lab.sim.test_sim_server import FAST, SLOW, chunks, post, serving, until

PROMPT = [5 + i % 90 for i in range(200)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
WANTED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
SIZE = len(PROMPT) * FAST.transfer.kv_bytes_per_token


@dataclass
class Pair:
    """A server that prefills and one that decodes, each with a client."""

    p: aiohttp.ClientSession
    d: aiohttp.ClientSession
    prefill: RunningServer
    decode: RunningServer

    async def prefilled(self, **more: Any) -> dict[str, Any]:
        """Let the one make the KV; returns what the other is to be told."""
        body = {**BODY, "max_tokens": 1, "kv_transfer_params": WANTED, **more}
        status, answer = await post(self.p, "/v1/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] == 1
        found: dict[str, Any] = answer["kv_transfer_params"]
        return found

    def held(self) -> int:
        return self.prefill.live.engine.blocks_retained

    async def let_go(self) -> None:
        await until(lambda: self.held() == 0)


@asynccontextmanager
async def pair(prefill: SimSettings = FAST, decode: SimSettings = FAST, roles: bool = False) -> AsyncIterator[Pair]:
    named = [{"role": role} if roles else {} for role in ("prefill", "decode")]
    async with serving(prefill, **named[0]) as (p, one), serving(decode, **named[1]) as (d, two):
        yield Pair(p, d, one, two)


async def whole(**more: Any) -> list[int]:
    """Return the tokens of the same request served by one engine."""
    async with serving() as (http, _):
        _, answer = await post(http, "/v1/completions", {**BODY, **more})
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens


async def metric(http: aiohttp.ClientSession, name: str) -> float:
    async with http.get("/metrics") as answer:
        page = await answer.text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"vllm:{name}")]
    return float(line.rpartition(" ")[2])


def slow_link(bandwidth: float, **more: Any) -> SimSettings:
    return msgspec.structs.replace(FAST, transfer=TransferSettings(bandwidth=bandwidth, **more))


async def test_kv_is_pulled_and_the_text_is_that_of_one_engine() -> None:
    async with pair() as two:
        told = await two.prefilled()
        assert told["do_remote_prefill"] and not told["do_remote_decode"]
        assert (told["remote_num_tokens"], told["tp_size"], told["transfer_mode"]) == (200, 1, "pull")
        assert len(told["remote_block_ids"][0]) == 13 == two.held()
        assert await metric(two.p, "kv_cache_usage_perc") == 13 / 512
        status, answer = await post(two.d, "/v1/completions", {**BODY, "kv_transfer_params": told})
        assert status == 200 and answer["choices"][0]["token_ids"] == await whole()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await two.let_go()
        assert await metric(two.p, "kv_cache_usage_perc") == 0.0
        assert await metric(two.d, "nixl_bytes_transferred_sum") == SIZE
        assert await metric(two.d, "nixl_xfer_time_seconds_count") == 1
        assert await metric(two.d, "external_prefix_cache_queries_total") == 200
        assert await metric(two.d, "external_prefix_cache_hits_total") == 200
        for source, tokens in (("local_compute", 0), ("local_cache_hit", 0), ("external_kv_transfer", 200)):
            by = f'prompt_tokens_by_source_total{{engine="0",model_name="sim",source="{source}"}}'
            assert await metric(two.d, by) == tokens
        assert await metric(two.d, "nixl_num_failed_transfers_total") == 0


async def test_a_stream_of_the_second_leg_is_the_same_text() -> None:
    async with pair() as two:
        told = await two.prefilled()
        parts = await chunks(two.d, "/v1/completions", {**BODY, "kv_transfer_params": told})
        assert [token for part in parts for token in part["choices"][0]["token_ids"]] == await whole()
        await two.let_go()


async def test_kv_takes_its_bytes_by_the_bandwidth_of_the_slower_side() -> None:
    for settings in ((slow_link(SIZE / 0.2), FAST), (FAST, slow_link(SIZE / 0.2))):
        async with pair(*settings) as two:
            told = await two.prefilled()
            await post(two.d, "/v1/completions", {**BODY, "kv_transfer_params": told})
            assert await metric(two.d, "nixl_xfer_time_seconds_sum") >= 0.19


async def test_only_what_is_missing_is_pulled_where_that_is_wanted() -> None:
    decode = msgspec.structs.replace(FAST, transfer=TransferSettings(pull="missing"))
    async with pair(decode=decode) as two:
        await post(two.d, "/v1/completions", {**BODY, "prompt": PROMPT[:160], "max_tokens": 1})
        told = await two.prefilled()
        _, answer = await post(two.d, "/v1/completions", {**BODY, "kv_transfer_params": told})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
        assert answer["choices"][0]["token_ids"] == await whole()
        assert await metric(two.d, "nixl_bytes_transferred_sum") == 40 * FAST.transfer.kv_bytes_per_token
        await two.let_go()


async def test_an_answer_that_stops_with_its_first_token_holds_nothing() -> None:
    async with pair() as two:
        first = (await whole())[0]
        body = {**BODY, "kv_transfer_params": WANTED, "stop_token_ids": [first]}
        _, answer = await post(two.p, "/v1/completions", body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "kv_transfer_params" not in answer and two.held() == 0


async def test_both_legs_of_a_push_run_at_once_and_meet_by_the_request_s_id() -> None:
    slow = msgspec.structs.replace(SLOW, timing=msgspec.structs.replace(SLOW.timing, prefill=(0.0, 0.02, 200.0)))
    async with pair(prefill=slow) as two:
        address = {"remote_host": "127.0.0.1", "remote_port": two.prefill.live.exchange.port}
        decode = {"do_remote_prefill": True, "remote_engine_id": "p", **address, "tp_size": 1}
        later = asyncio.create_task(
            post(two.d, "/v1/completions", {**BODY, "kv_transfer_params": decode}, **{"x-request-id": "both"})
        )
        await until(lambda: two.decode.live.engine.pulling == 1)
        assert await metric(two.d, "num_requests_running") == 0
        assert await metric(two.d, "num_requests_waiting{") == 1
        await post(two.p, "/v1/completions", {**BODY, "kv_transfer_params": WANTED}, **{"x-request-id": "both"})
        status, answer = await later
        assert status == 200 and answer["choices"][0]["token_ids"] == await whole()
        await two.let_go()
        assert await metric(two.d, "nixl_num_failed_transfers_total") == 0


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_both_legs_of_a_bootstrap_carry_one_room_whoever_comes_first(first: str) -> None:
    async with pair(roles=True) as two:
        port = two.prefill.live.exchange.port
        body = {**BODY, "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 2**62 + 7}

        async def prefill() -> Any:
            return await post(two.p, "/v1/completions", body)

        async def decode() -> Any:
            return await post(two.d, "/v1/completions", body)

        if first == "prefill":
            status, made = await prefill()
            status, answer = await decode()
        else:
            later = asyncio.create_task(decode())
            await until(lambda: two.decode.live.engine.pulling == 1)
            _, made = await prefill()
            status, answer = await later
        assert made["usage"]["completion_tokens"] == 1 and "kv_transfer_params" not in made
        assert status == 200 and answer["choices"][0]["token_ids"] == await whole()
        await two.let_go()
        assert await metric(two.d, "external_prefix_cache_hits_total") == 200


async def test_bootstrap_fields_mean_nothing_to_an_engine_without_a_role() -> None:
    async with pair() as two:
        body = {**BODY, "bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
        _, answer = await post(two.p, "/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 24 and two.held() == 0


@pytest.mark.parametrize("how", ["unknown", "refused", "expired"])
async def test_kv_that_can_not_be_had_is_computed_and_counted(how: str) -> None:
    prefill = slow_link(64e9, hold_timeout=0.05) if how == "expired" else FAST
    async with pair(prefill=prefill) as two:
        told = await two.prefilled()
        if how == "unknown":
            told["remote_request_id"] = "nobody"
        elif how == "refused":
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                told["remote_port"] = taken.getsockname()[1]
        else:
            await two.let_go()
            assert await metric(two.p, "nixl_num_kv_expired_reqs_total") == 1
        status, answer = await post(two.d, "/v1/completions", {**BODY, "kv_transfer_params": told})
        assert status == 200 and answer["choices"][0]["token_ids"] == await whole()
        assert await metric(two.d, "nixl_num_failed_transfers_total") == 1
        assert two.decode.live.engine.counters(two.decode.live.now()).pulls_failed == 1
        assert two.held() == (0 if how == "expired" else 13)


async def test_kv_that_expires_on_its_way_is_computed() -> None:
    async with pair(prefill=slow_link(SIZE / 0.4, hold_timeout=0.15)) as two:
        told = await two.prefilled()
        status, answer = await post(two.d, "/v1/completions", {**BODY, "kv_transfer_params": told})
        assert status == 200 and answer["choices"][0]["token_ids"] == await whole()
        assert await metric(two.d, "nixl_num_failed_transfers_total") == 1


async def test_a_second_leg_that_is_aborted_lets_the_first_one_s_blocks_go() -> None:
    async with pair(prefill=slow_link(SIZE / 60.0)) as two:
        told = await two.prefilled()
        later = asyncio.create_task(post(two.d, "/v1/completions", {**BODY, "kv_transfer_params": told}))
        await until(lambda: len(two.prefill.live.exchange._wire._links) == 1)
        later.cancel()
        await two.let_go()
        await until(lambda: len(two.prefill.live.exchange._wire._links) == 0)
        assert two.decode.live.engine.kv_usage == 0.0 and two.decode.live.load == 0


async def test_a_second_leg_that_is_aborted_in_line_lets_the_first_one_s_blocks_go() -> None:
    tight = msgspec.structs.replace(SLOW, kv_blocks=16)
    async with pair(decode=tight) as two:
        told = await two.prefilled()
        long = {"prompt": [7] * 100, "max_tokens": 100, "ignore_eos": True}
        other = asyncio.create_task(post(two.d, "/v1/completions", long))
        await until(lambda: two.decode.live.engine.running == 1)
        later = asyncio.create_task(post(two.d, "/v1/completions", {**BODY, "kv_transfer_params": told}))
        await until(lambda: two.decode.live.engine.waiting == 1)
        later.cancel()
        await two.let_go()
        other.cancel()


async def test_a_push_whose_second_leg_went_away_holds_nothing() -> None:
    async with pair() as two:
        address = {"remote_host": "127.0.0.1", "remote_port": two.prefill.live.exchange.port}
        body = {**BODY, "kv_transfer_params": {"do_remote_prefill": True, **address}}
        later = asyncio.create_task(post(two.d, "/v1/completions", body, **{"x-request-id": "gone"}))
        await until(lambda: two.decode.live.engine.pulling == 1 and bool(two.prefill.live.exchange._offers))
        later.cancel()
        await until(lambda: any(offer.unwanted for offer in two.prefill.live.exchange._offers.values()))
        await post(two.p, "/v1/completions", {**BODY, "kv_transfer_params": WANTED}, **{"x-request-id": "gone"})
        assert two.held() == 0


async def test_a_client_that_goes_away_during_a_prefill_leaves_nothing_behind() -> None:
    slow = msgspec.structs.replace(SLOW, timing=msgspec.structs.replace(SLOW.timing, prefill=(0.0, 0.02, 30_000.0)))
    async with pair(prefill=slow) as two:
        body = {**BODY, "kv_transfer_params": WANTED}
        leg = asyncio.create_task(post(two.p, "/v1/completions", body, **{"x-request-id": "x"}))
        await until(lambda: two.prefill.live.engine.running == 1)
        address = {"remote_host": "127.0.0.1", "remote_port": two.prefill.live.exchange.port}
        body = {**BODY, "kv_transfer_params": {"do_remote_prefill": True, **address}}
        other = asyncio.create_task(post(two.d, "/v1/completions", body, **{"x-request-id": "x"}))
        await until(lambda: two.decode.live.engine.pulling == 1)
        leg.cancel()
        status, answer = await other  # it need not wait until its patience is over
        assert status == 200 and answer["choices"][0]["token_ids"] == await whole()
        assert two.held() == 0 and two.prefill.live.engine.kv_usage == 0.0


async def test_who_dies_while_it_takes_kv_leaves_the_link_free_and_the_blocks_held() -> None:
    async with pair(prefill=slow_link(SIZE / 60.0)) as two:
        told = await two.prefilled()
        taker = asyncio.create_task(post(two.p, "/kv_pull", {"request_id": told["remote_request_id"], "tokens": 200}))
        links = two.prefill.live.exchange._wire._links
        await until(lambda: len(links) == 1)
        taker.cancel()
        await until(lambda: len(links) == 0)
        assert two.held() == 13


async def test_many_at_once_share_the_link_and_leave_nothing() -> None:
    async with pair(prefill=slow_link(SIZE / 0.02)) as two:

        async def one(seed: int) -> list[int]:
            told = await two.prefilled(seed=seed)
            _, answer = await post(two.d, "/v1/completions", {**BODY, "seed": seed, "kv_transfer_params": told})
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens

        found = await asyncio.gather(*(one(seed) for seed in range(8)))
        assert found[3] == await whole(seed=3) and len({tuple(tokens) for tokens in found}) == 8
        await two.let_go()
        assert two.decode.live.engine.kv_usage == 0.0
        assert await metric(two.d, "nixl_xfer_time_seconds_count") == 8
        assert await metric(two.d, "nixl_xfer_time_seconds_sum") >= 8 * 0.019


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": "yes"},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}},
        {"bootstrap_room": "here"},
        {"bootstrap_room": 5, "bootstrap_host": "127.0.0.1"},
    ],
)
async def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    async with pair(roles=True) as two:
        status, _ = await post(two.d, "/v1/completions", {**BODY, **fields})
        assert status == 400 and two.decode.live.load == 0


async def test_parameters_that_lead_nowhere_are_no_hand_off() -> None:
    async with pair() as two:
        status, answer = await post(
            two.d, "/v1/completions", {**BODY, "kv_transfer_params": {"do_remote_prefill": True}}
        )
        assert status == 200 and answer["choices"][0]["token_ids"] == await whole()


async def test_the_routes_between_engines_refuse_what_they_can_not_read() -> None:
    async with serving() as (http, _):
        assert (await post(http, "/kv_pull", {"request_id": "a", "tokens": 5}))[0] == 404
        assert (await post(http, "/kv_pull", {"request_id": 7, "tokens": 5}))[0] == 400
        assert (await post(http, "/kv_pull", {"request_id": "a", "tokens": -5}))[0] == 400
        assert (await post(http, "/kv_release", {"request_id": "a"}))[0] == 200
