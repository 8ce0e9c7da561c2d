"""Does the simulated engine speak vLLM's dialect? Over real HTTP on loopback, in the test's own event loop."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from penstock.adapters.engines.describe import describe, measured_speed
from penstock.adapters.engines.dialects.dialect import samples
from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber
from penstock.kernel.errors import ConfigError
from penstock.kernel.hashing import block_hashes
from penstock.kernel.tiers.load_worth import costs_in
from penstock.kernel.values import KvStored, StepStats, WorkerId
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.sim.sim_server import RunningServer, start
from penstock_lab.simulate.tiers.tier_plan import TierPlan
from tests.kv_batches import batches_of

FAST = SimSettings(block_size=16, kv_blocks=512, max_model_len=4096, timing=TimingSettings(speed_up=50.0))
SLOW = msgspec.structs.replace(FAST, timing=TimingSettings(prefill=(0.0, 0.02, 5.0), decode=(0.0, 0.0, 20.0)))


@asynccontextmanager
async def serving(
    settings: SimSettings = FAST, **options: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, RunningServer]]:
    server = await start(settings, **options)
    async with aiohttp.ClientSession(server.url) as http:
        try:
            yield http, server
        finally:
            await http.close()
            await server.stop()


async def post(http: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with http.post(path, json=body, headers=headers) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if text else None


async def chunks(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    async with http.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        lines = [line async for line in answer.content if line.strip()]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines[-1].strip() == b"data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def until(met: Any, limit: float = 10.0) -> None:
    async with asyncio.timeout(limit):
        while not met():
            await asyncio.sleep(0.005)


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], **more}


async def test_a_completion_has_the_tokens_asked_for_and_streams_to_the_same_text() -> None:
    async with serving() as (http, _):
        body = {"model": "sim", "prompt": "open the gate", "max_tokens": 24, "ignore_eos": True}
        status, whole = await post(http, "/v1/completions", body)
        assert status == 200
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 24
        assert choice["text"].isascii() and choice["text"].split()
        told = await chunks(http, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert "".join(c["choices"][0]["text"] for c in told if c["choices"]) == choice["text"]
        assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == 24
        assert [c["choices"][0]["finish_reason"] for c in told[:-1]] == [None] * (len(told) - 2) + ["length"]


async def test_a_chat_streams_to_the_same_text_and_its_next_turn_hits_the_cache() -> None:
    async with serving() as (http, _):
        body = chat("tell me about the river " * 10, max_tokens=40, ignore_eos=True)
        _, whole = await post(http, "/v1/chat/completions", body)
        said = whole["choices"][0]["message"]["content"]
        told = await chunks(http, "/v1/chat/completions", {**body, "stream_options": {"continuous_usage_stats": True}})
        assert told[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in told) == said
        assert told[-1]["usage"]["completion_tokens"] == 40
        turns = [*body["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
        _, second = await post(http, "/v1/chat/completions", {"messages": turns, "max_tokens": 4})
        first_tokens = whole["usage"]["prompt_tokens"] + 40
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (first_tokens - 1) // 16 * 16  # the generated blocks, too


async def test_a_chat_ends_by_itself_unless_told_to_ignore_the_end() -> None:
    async with serving() as (http, _):
        _, answer = await post(http, "/v1/chat/completions", chat())
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 64 <= answer["usage"]["completion_tokens"] <= 192
        _, again = await post(http, "/v1/chat/completions", chat())
        assert again["choices"][0]["message"] == answer["choices"][0]["message"]
        _, other = await post(http, "/v1/chat/completions", chat(seed=7))
        assert other["choices"][0]["message"] != answer["choices"][0]["message"]
        _, longer = await post(http, "/v1/chat/completions", chat(min_tokens=500, max_completion_tokens=600))
        assert 500 <= longer["usage"]["completion_tokens"] <= 600


async def test_prompts_of_all_kinds_several_answers_and_token_ids() -> None:
    async with serving() as (http, _):
        body = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 3, "return_token_ids": True, "echo": True}
        _, whole = await post(http, "/v1/completions", body)
        assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
        assert [c["prompt_token_ids"] for c in whole["choices"]] == [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
        assert whole["usage"]["prompt_tokens"] == 5 and whole["usage"]["completion_tokens"] == 12
        assert len({tuple(c["token_ids"]) for c in whole["choices"]}) == 4
        told = await chunks(http, "/v1/completions", body)
        for choice in whole["choices"]:
            mine = [c["choices"][0] for c in told if c["choices"][0]["index"] == choice["index"]]
            assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
            assert "".join(part["text"] for part in mine) == choice["text"]
        _, texts = await post(http, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2})
        assert len(texts["choices"]) == 2


async def test_a_stop_text_ends_the_answer_before_it() -> None:
    async with serving() as (http, _):
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        _, free = await post(http, "/v1/completions", body)
        text = free["choices"][0]["text"]
        word = text.split()[5]
        for stop in (word, [word, "never said"]):
            _, cut = await post(http, "/v1/completions", {**body, "stop": stop})
            choice = cut["choices"][0]
            assert choice["text"] == text[: text.index(word)]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
            told = await chunks(http, "/v1/completions", {**body, "stop": stop})
            assert "".join(c["choices"][0]["text"] for c in told) == choice["text"]


async def test_tools_and_formats_get_an_answer_of_their_shape() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 2}, "more": {"$ref": "#/d"}},
        "required": ["city", "days", "more"],
        "d": {"enum": ["x"]},
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    async with serving() as (http, _):
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            body = chat(tools=[tool], tool_choice=choice)
            _, whole = await post(http, "/v1/chat/completions", body)
            call = whole["choices"][0]["message"]["tool_calls"][0]
            assert whole["choices"][0]["finish_reason"] == "tool_calls"
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "water", "days": 2, "more": "x"}
            told = await chunks(http, "/v1/chat/completions", body)
            calls = [c["choices"][0]["delta"]["tool_calls"][0] for c in told[1:]]
            assert calls[0]["function"]["name"] == "weather"
            assert "".join(c["function"]["arguments"] for c in calls) == call["function"]["arguments"]
        _, plain = await post(http, "/v1/chat/completions", chat(tools=[tool], tool_choice="auto"))
        assert plain["choices"][0]["message"]["tool_calls"] == []
        wish = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        for wanted in ({"type": "json_object"}, wish):
            _, shaped = await post(http, "/v1/chat/completions", chat(response_format=wanted))
            json.loads(shaped["choices"][0]["message"]["content"])


async def test_logprobs_are_there_for_every_token() -> None:
    async with serving() as (http, _):
        _, text = await post(http, "/v1/completions", {"prompt": "x", "max_tokens": 5, "logprobs": 2})
        found = text["choices"][0]["logprobs"]
        assert {len(found[key]) for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs")} == {5}
        assert "".join(found["tokens"]) == text["choices"][0]["text"]
        assert all(value < 0 for value in found["token_logprobs"])
        body = chat(max_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=3)
        _, whole = await post(http, "/v1/chat/completions", body)
        content = whole["choices"][0]["logprobs"]["content"]
        assert len(content) == 5 and all(len(entry["top_logprobs"]) == 3 for entry in content)
        told = await chunks(http, "/v1/chat/completions", body)
        streamed = [e for c in told for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert streamed == content


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/v1/completions", {"prompt": [7] * 5000}, 400, "input_tokens"),
        ("/v1/completions", {"prompt": [7] * 10, "max_tokens": 5000}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n"),
        ("/v1/completions", {"prompt": "x", "stop": 5}, 400, "stop"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
            400,
            None,
        ),
        ("/v1/chat/completions", [], 400, None),
        ("/v1/nothing", {}, 404, None),
    ],
)
async def test_a_bad_request_is_refused_in_the_words_of_vllm(
    path: str, body: Any, status: int, param: str | None
) -> None:
    async with serving() as (http, server):
        got, answer = await post(http, path, body)
        assert got == status
        error = answer["error"]
        assert error["code"] == status and error["message"] and error["type"]
        if param is not None:
            assert error["param"] == param
        assert server.live.load == 0


async def test_a_body_that_is_no_json_is_a_400() -> None:
    async with serving() as (http, _):
        for raw in (b"{", b"\xff\xfe", b"", b'"text"', b'{"prompt": "\xff"}'):
            async with http.post("/v1/completions", data=raw) as answer:
                assert answer.status == 400, raw


async def test_an_answer_stops_when_its_client_goes_away() -> None:
    async with serving(SLOW) as (http, server):
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        answer = await http.post("/v1/completions", json=body)
        await answer.content.readline()
        assert server.live.engine.running == 1
        answer.close()
        await until(lambda: server.live.engine.running == 0)
        assert server.live.load == 0
        unary = asyncio.create_task(post(http, "/v1/completions", {**body, "stream": False}))
        await until(lambda: server.live.engine.running == 1)
        unary.cancel()
        await until(lambda: server.live.load == 0)
        assert server.live.engine.counters(server.live.now()).ended["abort"] == 2


async def test_a_client_that_leaves_while_it_is_written_to_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = web.StreamResponse.write

    async def closing(self: web.StreamResponse, data: bytes) -> None:
        assert self._req is not None and self._req.transport is not None
        self._req.transport.close()  # between the end of the connection and the word of it
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", closing)
    async with serving(SLOW) as (http, server):
        with pytest.raises(aiohttp.ClientError):
            await chunks(http, "/v1/completions", {"prompt": "x", "max_tokens": 4000, "ignore_eos": True})
        await until(lambda: server.live.load == 0)
    assert not caplog.records


async def test_what_it_says_of_itself_is_read_by_the_describer() -> None:
    async with serving(adapters=("tuned",), topic="kv@1") as (http, server):
        for path in ("/health", "/ping", "/version", "/load"):
            async with http.get(path) as answer:
                assert answer.status == 200
        async with aiohttp.ClientSession() as plain:
            card = await describe(plain, server.url, worker=WorkerId("w"), epoch=1, model="sim")
            speed = await measured_speed(plain, server.url)
        assert (card.block_size, card.kv_blocks, card.max_model_len) == (16, 512, 4096)
        assert card.adapters == ("tuned",) and card.engine == "sim" and card.topic == "kv@1"
        assert len(card.events) == len(card.replay) == 1
        assert speed is not None and speed["prefill_slope"] > 0 and speed["decode_base"] > 0
        status, tuned = await post(http, "/v1/completions", {"model": "tuned", "prompt": "x", "max_tokens": 2})
        assert status == 200 and tuned["model"] == "tuned"


async def test_the_caches_of_salts_and_adapters_are_apart() -> None:
    async with serving(adapters=("tuned",)) as (http, _):
        body = {"prompt": [5] * 100, "max_tokens": 1}

        async def cached(**more: Any) -> int:
            _, answer = await post(http, "/v1/completions", {**body, **more})
            found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert [await cached(), await cached()] == [0, 96]
        assert [await cached(cache_salt="a"), await cached(cache_salt="a")] == [0, 96]
        assert [await cached(model="tuned"), await cached(model="tuned")] == [0, 96]
        async with http.post("/reset_prefix_cache") as answer:
            assert answer.status == 200
        assert await cached() == 0


async def test_kv_events_name_blocks_as_the_router_does_and_can_be_replayed() -> None:
    async with serving() as (http, _):
        async with http.get("/kv_event_sources") as answer:
            source = (await answer.json())["0"]
        prompt = list(range(10, 90))
        want = block_hashes(prompt, 16)
        subscriber = KvSubscriber(source["endpoint"], source["replay_endpoint"], source["topic"], 0)
        batches = batches_of(subscriber)
        first = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.2)  # a PUB socket tells nobody when it has a subscriber
        await post(http, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        batch = await asyncio.wait_for(first, 10)
        (stored,) = batch.events
        assert isinstance(stored, KvStored)
        assert stored.hashes == want and stored.tokens == prompt and stored.parent is None
        again = await subscriber.replay(0, 5.0)
        assert again is not None and again[0].events == batch.events
        await batches.aclose()  # type: ignore[attr-defined]


async def test_lost_kv_messages_are_replayed_and_forgotten_ones_are_not() -> None:
    async with serving(faults=True) as (http, server):
        assert server.server.publisher is not None
        for kind in ("drop_events", "lose_events", "reorder_events"):
            status, _ = await post(http, "/fault", {"kind": kind, "count": 1})
            assert status == 200
            for turn in range(3):
                await post(
                    http, "/v1/completions", {"prompt": kind + " of many words" * 9 + str(turn), "max_tokens": 1}
                )
        kept = [int.from_bytes(number, "big") for number, _ in server.server.publisher._replay_buffer]
        count = server.server.publisher.next_sequence
        assert len(set(range(count)) - set(kept)) == 1  # only the one that was lost for good


async def test_metrics_are_prometheus_text_with_the_names_of_vllm() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async with serving() as (http, _):
        await post(http, "/v1/completions", {"prompt": [5] * 100, "max_tokens": 9, "ignore_eos": True})
        await post(http, "/v1/completions", {"prompt": [5] * 100, "max_tokens": 9, "ignore_eos": True})
        async with http.get("/metrics") as answer:
            page = await answer.text()
    values = {
        (sample.name, sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert values["vllm:prompt_tokens_total", ""] == 200
    assert values["vllm:prefix_cache_hits_total", ""] == 96
    assert values["vllm:generation_tokens_total", ""] == 18
    assert values["vllm:request_success_total", "length"] == 2
    assert values["vllm:time_to_first_token_seconds_count", ""] == 2
    assert values["vllm:inter_token_latency_seconds_count", ""] == 16
    assert values["vllm:kv_cache_usage_perc", ""] == 0
    assert all("model_name" in line and 'engine="0"' in line for line in page.splitlines() if line[:5] == "vllm:")


async def test_each_reader_of_step_stats_has_its_own_window() -> None:
    async with serving() as (http, _):

        async def read(reader: str) -> StepStats:
            async with http.get("/step_stats", params={"reader": reader}) as answer:
                return msgspec.json.decode(await answer.read(), type=StepStats)

        await read("one")
        await post(http, "/v1/completions", {"prompt": [5] * 100, "max_tokens": 9, "ignore_eos": True})
        one = await read("one")
        await post(http, "/v1/completions", {"prompt": [6] * 100, "max_tokens": 9, "ignore_eos": True})
        two, one_more = await read("two"), await read("one")
        assert (one.prefill_tokens, one.decode_seqs) == (100, 8)
        assert (one_more.prefill_tokens, one_more.decode_seqs) == (100, 8)
        assert two.prefill_tokens is not None and two.prefill_tokens >= 100


async def test_tokens_are_turned_into_text_and_back() -> None:
    async with serving() as (http, _):
        text = "The gate opens. Grüße 水"
        _, made = await post(http, "/tokenize", {"prompt": text})
        assert made["count"] == len(made["tokens"]) and made["max_model_len"] == 4096
        _, back = await post(http, "/detokenize", {"tokens": made["tokens"]})
        assert back["prompt"] == text
        _, as_chat = await post(http, "/tokenize", chat("hi"))
        _, answer = await post(http, "/v1/chat/completions", chat("hi", max_tokens=1))
        assert as_chat["count"] == answer["usage"]["prompt_tokens"]


async def test_embeddings_are_unit_vectors_fixed_by_their_input() -> None:
    async with serving() as (http, _):
        _, one = await post(http, "/v1/embeddings", {"input": ["river", "gate", "river"]})
        vectors = [np.array(entry["embedding"]) for entry in one["data"]]
        assert np.allclose([np.linalg.norm(v) for v in vectors], 1.0)
        assert np.array_equal(vectors[0], vectors[2]) and not np.array_equal(vectors[0], vectors[1])
        status, _ = await post(http, "/v1/embeddings", {"input": {}})
        assert status == 400


async def test_tokens_stream_at_the_pace_of_the_engine_and_several_at_once() -> None:
    async with serving(SLOW) as (http, server):
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
        told = await asyncio.gather(*(chunks(http, "/v1/completions", {**body, "seed": i}) for i in range(8)))
        assert all(len(each) > 10 for each in told)  # they came one by one, not in a lump
        spent = server.live.engine.take_stats(server.live.now())
        assert spent.passes < 8 * 20  # the eight shared their passes


async def test_it_drains_what_runs_and_refuses_what_is_new() -> None:
    async with serving(SLOW) as (http, server):
        running = asyncio.create_task(chunks(http, "/v1/completions", {"prompt": "x", "max_tokens": 15}))
        await until(lambda: server.live.engine.running == 1)
        stopping = asyncio.create_task(server.stop(grace=20.0))
        await until(lambda: server.server.draining)
        status, _ = await post(http, "/v1/completions", {"prompt": "y", "max_tokens": 1})
        assert status == 503
        assert (await running)[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        await stopping


async def test_faults_are_there_only_where_asked_for() -> None:
    async with serving() as (http, _):
        status, _ = await post(http, "/fault", {"kind": "none"})
        assert status == 404
    async with serving(faults=True) as (http, _):
        status, answer = await post(http, "/fault", {"kind": "gremlins"})
        assert status == 400 and "stall" in answer["error"]["message"]
        await post(http, "/fault", {"kind": "refuse", "status": 503, "count": 1})
        body = {"prompt": "x", "max_tokens": 9}
        assert [(await post(http, "/v1/completions", body))[0] for _ in range(2)] == [503, 200]
        await post(http, "/fault", {"kind": "error_rate", "rate": 1})
        assert (await post(http, "/v1/completions", body))[0] == 500
        await post(http, "/fault", {"kind": "none"})
        await post(http, "/fault", {"kind": "die_mid_stream", "tokens": 3})
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
            await chunks(http, "/v1/completions", body)
        await post(http, "/fault", {"kind": "stall", "seconds": 60})
        waiting = asyncio.create_task(post(http, "/v1/completions", body))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        await post(http, "/fault", {"kind": "stall", "seconds": 0.05})
        assert (await waiting)[0] == 200


async def test_a_timing_table_is_read_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "table.npz"
    np.savez(
        path,
        prefill_isl=[1.0, 1000.0],
        prefill_ttft_ms=[1.0, 5.0],
        decode_active_kv_tokens=[1.0, 10_000.0],
        decode_context_length=[1.0, 10_000.0],
        decode_itl=[[1.0, 1.0], [2.0, 2.0]],
    )
    timing = TimingSettings(kind="table", profile=str(path))
    async with serving(msgspec.structs.replace(FAST, timing=timing)) as (http, _):
        status, _ = await post(http, "/v1/completions", {"prompt": "x", "max_tokens": 9})
        assert status == 200
    timing = TimingSettings(kind="table", profile=str(tmp_path / "absent.npz"))
    with pytest.raises(ConfigError, match=r"absent\.npz"):
        await start(msgspec.structs.replace(FAST, timing=timing))


async def test_tiers_below_a_live_engine_give_back_what_it_evicted_and_announce_it() -> None:
    timing = TimingSettings(prefill=(0.0, 1.0, 1.0), decode=(0.0, 0.0, 1.0))  # slow enough for a load to pay
    few = msgspec.structs.replace(FAST, kv_blocks=40, timing=timing)
    async with serving(few, cache=TierPlan(host=1 << 30)) as (http, server):
        source = (await (await http.get("/kv_event_sources")).json())["0"]
        for prompt in (list(range(320)), list(range(1000, 1636)), list(range(320))):
            body = {"model": "sim", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            status, answer = await post(http, "/v1/completions", body)
            assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 304  # 19 of 20 blocks: the last is computed
        page = await (await http.get("/metrics")).text()
        assert 'penstock_sim_tier_tokens_loaded_total{engine="0",model_name="sim",tier="host"} 304.0' in page
        costs = costs_in(samples(page))
        assert costs is not None and costs.compute == pytest.approx(1e-3)
        assert costs.worth(304, 0) == 304
        assert 'vllm:external_prefix_cache_hits_total{engine="0",model_name="sim"} 304.0' in page
        subscriber = KvSubscriber(source["endpoint"], source["replay_endpoint"], source["topic"], 0)
        batches = await subscriber.replay(0, 5.0)
        stored = [event for batch in batches for event in batch.events if isinstance(event, KvStored)]
        in_host = {name for event in stored if event.tier == "host" for name in event.hashes}
        assert set(block_hashes(list(range(320)), 16)) <= in_host
        assert server.live.engine.tiers is not None


@pytest.mark.parametrize("hints", [{"pin": -1}, {"pin": "5m"}, {"priority": 1.5}, 7])
async def test_a_hint_for_tiers_that_is_no_number_is_refused(hints: Any) -> None:
    async with serving() as (http, _):
        body = {"model": "sim", "prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": {"penstock": hints}}
        status, answer = await post(http, "/v1/completions", body)
        assert status == 400 and "kv_transfer_params.penstock" in answer["error"]["message"]
        body["kv_transfer_params"] = {"penstock": {"pin": 5, "priority": 1}}
        assert (await post(http, "/v1/completions", body))[0] == 200
