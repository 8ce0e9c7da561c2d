"""Is each kind of engine recognised by what it says, asked in its own way, and understood when it refuses?

vLLM's answers are those of a real 0.32 server, and SGLang's of a real 0.5.23 and of older ones, shortened. TensorRT-LLM
and `llama-server` can't run where this is developed: their answers are written after their sources and documentation.
"""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.adapters.engines.describe import describe, lacking, ready
from penstock.adapters.engines.dialects.dialect import samples
from penstock.adapters.engines.dialects.dialect_registry import DIALECTS, dialect_of
from penstock.adapters.engines.dialects.vllm import reachable
from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import EngineError
from penstock.kernel.values import WorkerCard, WorkerId
from tests.adapters.answering import answering, health_now

VLLM_METRICS = (
    'vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",engine="0",'
    'num_gpu_blocks="200",num_gpu_blocks_override="200",prefix_caching_hash_algo="sha256"} 1.0\n'
)
SOURCE = {"endpoint": "tcp://127.0.0.1:40971", "replay_endpoint": "tcp://127.0.0.1:35371", "topic": "kv@a"}
SGLANG_INFO: dict[str, Any] = {
    "model_path": "org/model",
    "tokenizer_path": "org/model",
    "page_size": 16,
    "context_length": None,
    "max_req_input_len": 8186,
    "max_running_requests": 48,
    "chunked_prefill_size": 4096,
    "max_total_num_tokens": 160_000,
    "dp_size": 1,
    "enable_dp_attention": False,
    "kv_events_config": '{"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:5557"}',
    "internal_states": [{}],
    "version": "0.5.3",
}
LLAMA_PROPS = {
    "default_generation_settings": {"id": 0, "n_ctx": 4096, "params": {}},
    "total_slots": 4,
    "model_path": "/models/m.gguf",
    "chat_template": "...",
    "build_info": "b6700-0123abc",
}


async def seen(routes: dict[str, Any], **more: Any) -> WorkerCard:
    async with answering(routes) as url, aiohttp.ClientSession() as http:
        return await describe(http, url, worker=WorkerId("w"), epoch=1, **more)


def listing(owner: str, **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": owner, **more}]}


def sglang(**changes: Any) -> dict[str, Any]:
    return {"/v1/models": listing("sglang", max_model_len=8192), "/server_info": {**SGLANG_INFO, **changes}}


async def test_vllm(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    models = listing("vllm", max_model_len=2048, root=str(tmp_path), parent=None)
    routes = {
        "/v1/models": models,
        "/metrics": VLLM_METRICS,
        "/version": {"version": "0.32.0"},
        "/kv_event_sources": {"0": SOURCE},
    }
    card = await seen(routes)
    assert (card.engine, card.block_size, card.kv_blocks, card.max_model_len) == ("vllm", 32, 200, 2048)
    assert (card.events, card.replay, card.topic) == (
        ("tcp://127.0.0.1:40971",),
        ("tcp://127.0.0.1:35371",),
        "kv@a",
    )
    assert card.hash_scheme == "vllm sha256"
    assert card.tokenizer == str(tmp_path)
    assert card.labels == {"version": "0.32.0"}
    models["data"][0]["root"] = "org/model"
    assert (await seen(routes)).tokenizer is None


async def test_an_engine_that_asks_for_the_clusters_secret_says_so() -> None:
    routes = {"/v1/models": listing("vllm"), "/metrics": VLLM_METRICS}
    assert (await seen({**routes, "/kv_event_sources": {"0": SOURCE}})).events_security is None
    card = await seen({**routes, "/kv_event_sources": {"0": {**SOURCE, "security": "curve"}}})
    assert card.events_security == "curve"


async def test_vllm_that_hashes_with_a_random_seed_has_names_of_its_own() -> None:
    metrics = VLLM_METRICS.replace('"sha256"', '"xxhash"')
    card = await seen({"/v1/models": listing("vllm"), "/metrics": metrics})
    assert (card.engine, card.hash_scheme) == ("vllm", None)


async def test_vllm_without_metrics_is_known_by_its_listing() -> None:
    card = await seen({"/v1/models": listing("vllm", max_model_len=2048)})
    assert (card.engine, card.block_size, card.max_model_len) == ("vllm", None, 2048)


async def test_sglang() -> None:
    card = await seen(sglang())
    assert (card.engine, card.block_size, card.kv_blocks) == ("sglang", 16, 10_000)
    assert (card.max_num_seqs, card.max_num_batched_tokens, card.max_model_len) == (48, 4096, 8192)
    assert (card.events, card.topic, card.ranks) == (("tcp://127.0.0.1:5557",), "kv-events", 1)
    assert card.labels == {"version": "0.5.3"}


async def test_a_prefill_server_of_sglang_tells_its_role_and_where_the_other_side_meets_it() -> None:
    pair = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9123}
    card = await seen(sglang(**pair))
    assert (card.role, card.fixed_role, card.handoff, card.bootstrap) == (
        "prefill",
        True,
        "bootstrap",
        "127.0.0.1:9123",
    )
    assert card.events != ()
    named = await seen(sglang(**pair), overrides={"role": "prefill", "engine": "sglang"})
    assert (named.role, named.handoff) == (card.role, card.handoff)
    with pytest.raises(EngineError, match=r"models.m.pools.d.role is decode, but http://\S+ was started as prefill"):
        await seen(sglang(**pair), overrides={"role": "decode"}, pool="models.m.pools.d")


async def test_a_decode_server_of_sglang_announces_no_blocks_unless_it_keeps_some() -> None:
    card = await seen(sglang(disaggregation_mode="decode", disaggregation_bootstrap_port=9123))
    assert (card.role, card.fixed_role, card.handoff, card.bootstrap) == ("decode", True, "bootstrap", None)
    assert card.events == ()
    keeps = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}
    assert (await seen(sglang(**keeps))).events != ()


async def test_a_plain_sglang_is_taken_for_no_side_of_a_pair() -> None:
    card = await seen(sglang(disaggregation_mode="null", disaggregation_bootstrap_port=8998))
    assert (card.role, card.fixed_role, card.handoff, card.bootstrap) == ("aggregated", True, None, None)
    with pytest.raises(EngineError, match="was started as aggregated"):
        await seen(sglang(disaggregation_mode="null"), overrides={"role": "prefill"})


async def test_an_older_sglang_tells_the_same_elsewhere() -> None:
    card = await seen({"/v1/models": listing("sglang"), "/get_server_info": SGLANG_INFO})
    assert (card.engine, card.block_size) == ("sglang", 16)


RANKS_OF_SGLANG: list[dict[str, Any]] = [
    {"dp_size": 2, "enable_dp_attention": False},  # as 0.5.3 has it
    {"dp_size": 2, "enable_dp_attention": True},
    # As 0.5.23 has it: told --dp-size 2, then --dp-size 2 --enable-dp-attention (or --attn-dp-size 2).
    {"dp_size": 2, "attn_dp_size": 1, "internal_states": [{"effective_max_running_requests_per_dp": 48}] * 2},
    {"dp_size": 1, "attn_dp_size": 2, "internal_states": [{"effective_max_running_requests_per_dp": 24}] * 2},
]


@pytest.mark.parametrize("info", RANKS_OF_SGLANG)
async def test_ranks_of_sglang_have_ports_in_a_row_and_seats_of_their_own(info: dict[str, Any]) -> None:
    events = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"})
    card = await seen(sglang(**info, kv_events_config=events))
    assert (card.ranks, card.max_num_seqs) == (2, 24 if info.get("attn_dp_size") == 2 else 48)
    assert card.events == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    assert card.replay == ("tcp://127.0.0.1:6557", "tcp://127.0.0.1:6558")


async def test_an_event_endpoint_without_a_star_is_bound_by_us() -> None:
    events = json.dumps({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"})
    assert (await seen(sglang(kv_events_config=events))).events == ("@tcp://127.0.0.1:5557",)


@pytest.mark.parametrize("config", [None, "", "{", "[]", '{"publisher": "null"}', "{}"])
async def test_sglang_without_events_announces_none(config: str | None) -> None:
    card = await seen(sglang(kv_events_config=config))
    assert (card.engine, card.events) == ("sglang", ())


async def test_tensorrt_llm_is_left_its_events() -> None:
    routes = {
        "/v1/models": listing("tensorrt_llm"),
        "/version": {"version": "1.2.0"},
        "/metrics": [{"iter": 1}],
        "/kv_cache_events": [{"event_id": 0}],
    }
    card = await seen(routes)
    assert (card.engine, card.events, card.labels) == ("trtllm", (), {"version": "1.2.0"})


async def test_llama_cpp() -> None:
    routes = {"/v1/models": listing("llamacpp", meta={"n_ctx_train": 131_072}), "/props": LLAMA_PROPS}
    card = await seen(routes)
    assert (card.engine, card.max_model_len, card.max_num_seqs, card.block_size) == ("llamacpp", 4096, 4, None)
    assert card.labels == {"version": "b6700-0123abc"}


async def test_a_server_that_loads_says_so() -> None:
    loading = (503, '{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}')
    with pytest.raises(EngineError, match="still loads"):
        await seen({"*": loading})


async def test_a_frontend_of_ours_is_no_simulated_engine() -> None:
    assert (await seen({"/v1/models": listing("penstock")})).engine == "openai"


async def test_an_operator_may_say_which_kind_it_is() -> None:
    card = await seen({"/v1/models": listing("me"), "/get_server_info": SGLANG_INFO}, overrides={"engine": "sglang"})
    assert (card.engine, card.block_size) == ("sglang", 16)
    unknown = await seen({"/v1/models": listing("me")}, overrides={"engine": "vllm", "events": ("tcp://h:1",)})
    assert (unknown.engine, unknown.events) == ("vllm", ("tcp://h:1",))


async def test_labels_of_both_are_kept() -> None:
    card = await seen(sglang(), overrides={"labels": {"rack": "7"}})
    assert card.labels == {"version": "0.5.3", "rack": "7"}


def test_an_address_is_turned_into_one_that_reaches_the_server() -> None:
    assert reachable("tcp://*:5557", "http://gpu1:8000") == "tcp://gpu1:5557"
    assert reachable("tcp://127.0.0.1:5557", "http://gpu1:8000") == "tcp://gpu1:5557"
    assert reachable("tcp://127.0.0.1:5557", "http://127.0.0.1:8000", 2) == "tcp://127.0.0.1:5559"
    assert reachable("tcp://10.0.0.7:5557", "http://gpu1:8000") == "tcp://10.0.0.7:5557"
    assert reachable("tcp://*:5557", "http://[fd00::1]:8000") == "tcp://[fd00::1]:5557"
    assert reachable("ipc:///tmp/kv", "http://gpu1:8000") == "ipc:///tmp/kv"


def test_what_vllm_says_while_it_ends_is_no_fault_of_the_request() -> None:
    vllm = dialect_of("vllm")
    draining = '{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError"}}'
    dead = '{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause."}}'
    assert vllm.refusal(500, draining) == "leaving"
    assert vllm.refusal(500, dead) == "leaving"
    assert vllm.refusal(500, '{"error":{"message":"something else"}}') == "fault"
    assert vllm.refusal(503, "") == vllm.refusal(429, "") == "busy"
    assert vllm.refusal(400, '{"error":{"message":"max_tokens"}}') == "client"
    assert vllm.refusal(499, '{"message":"client closed request"}') == vllm.refusal(401, "") == "fault"
    assert "abort" in vllm.gave_up
    assert dialect_of("openai").refusal(500, draining) == "fault"


def test_fields_travel_where_each_engine_looks_for_them() -> None:
    asked: dict[str, Any] = {"adapter": "tuned", "priority": 7, "salt": "tenant"}
    assert dialect_of("vllm").fields("m", **asked) == {"priority": -7, "cache_salt": "tenant"}
    assert dialect_of("sglang").fields("m", **asked) == {
        "model": "m",
        "lora_path": "tuned",
        "priority": 7,
        "cache_salt": "tenant",
    }
    assert dialect_of("openai").fields("m", **asked) == {}
    assert dialect_of("vllm").fields("m") == dialect_of("vllm").fields("m", priority=0) == {}
    assert dialect_of("sglang").fields("m") == {}
    assert dialect_of("sglang").fields("m", priority=0) == {"priority": 0}, "it serves one without a number last of all"


@pytest.mark.parametrize(
    ("info", "label"),
    [({}, "on"), ({"schedule_low_priority_values_first": True}, None), ({"enable_priority_scheduling": False}, None)],
)
async def test_an_sglang_says_whether_it_schedules_by_priority(info: dict[str, Any], label: str | None) -> None:
    server = sglang(**{"enable_priority_scheduling": True, **info})
    assert (await seen(server)).labels.get("priority") == label
    for pool in (PoolSettings(urls=("http://h",), priority=True), PoolSettings(urls=("http://h",), priority=False)):
        card = await seen(server, overrides=overrides_of(pool, "http://h"))
        assert card.labels["priority"] == ("on" if pool.priority else "off"), "the operator's word counts"


@pytest.mark.parametrize(
    ("info", "slots"),
    [
        ({"enable_lora": True, "max_loaded_loras": 4, "max_loras_per_batch": 2}, 4),
        ({"enable_lora": True, "max_loaded_loras": None, "max_loras_per_batch": 8}, 8),
        ({"enable_lora": None, "max_loras_per_batch": 8}, None),
    ],
)
async def test_an_sglang_says_how_many_adapters_it_holds(info: dict[str, Any], slots: int | None) -> None:
    assert (await seen(sglang(**info))).adapter_slots == slots


def test_a_llama_cpp_gets_no_request_id_for_its_python_server_refuses_one_that_is_no_uuid() -> None:
    assert dialect_of("vllm").headers("req-1") == {"x-request-id": "req-1"}
    assert dialect_of("llamacpp").headers("req-1") == {}


def test_a_kind_that_nobody_knows_is_taken_as_plain() -> None:
    assert dialect_of("other").name == "openai"
    assert all(dialect.name == name for name, dialect in DIALECTS.items())


def test_metrics_are_summed_over_their_labels() -> None:
    text = '# HELP a b\n# TYPE a counter\na{engine="0"} 1.5\na{engine="1"} 2\nb 7\nc{x="a b"} nonsense\nd +Inf\n'
    assert samples(text) == {"a": 3.5, "b": 7.0, "d": float("inf")}


async def test_readiness_needs_health_and_a_model() -> None:
    async with aiohttp.ClientSession() as http:
        assert await lacking(http, "http://127.0.0.1:9") == "nobody listens yet"
        routes: dict[str, Any] = {"/health": (503, "starting"), "/v1/models": listing("vllm")}
        async with answering(routes) as url:
            assert await lacking(http, url) == "/health answers 503"
            assert (await health_now(url, card=None)).lack == "/health answers 503"
            routes["/health"] = ""
            routes["/v1/models"] = {"data": []}
            assert await lacking(http, url) == "it lists no model"
            with pytest.raises(EngineError, match="it lists no model"):
                await ready(http, url, timeout=0.01)
            with pytest.raises(EngineError, match="it ended with status 1"):
                await ready(http, url, timeout=60.0, ended=lambda: "it ended with status 1")
            routes["/v1/models"] = listing("vllm")
            await ready(http, url, timeout=5.0)
            del routes["/health"]  # some servers have none
            assert await lacking(http, url) is None and (await health_now(url, card=None)).lack is None


async def test_the_health_of_a_known_kind_is_asked_where_it_costs_nothing() -> None:
    routes = {"/ready": "", "/health": (503, "it makes a token"), "/v1/models": listing("sglang")}
    async with answering(routes) as url:
        sglang = WorkerCard(id=WorkerId("w"), epoch=1, model="m", url=url, engine="sglang")
        assert (await health_now(url, card=sglang)).lack is None
        routes["/ready"] = (503, "paused")
        assert (await health_now(url, card=sglang)).lack == "/ready answers 503"
        del routes["/ready"]  # older ones have none
        assert (await health_now(url, card=sglang)).lack is None
