"""Is each field that we send to TensorRT-LLM, or read of it, one of its own, of the type that it has there?

Nothing of it runs without a GPU, so its published types stand for it: the names and JSON types below were read in
NVIDIA/TensorRT-LLM, ``tensorrt_llm/serve/openai_protocol.py`` at 0076e9390e1e, ``openai_server.py`` at 00057725d9a6 and
``openai_disagg_service.py`` at 00bb903d965f (of 2026). Its requests take no field beside these.
"""

import itertools
from typing import Any

import pytest

from penstock.adapters.engines.dialects.dialect import overflows
from penstock.adapters.engines.dialects.dialect_registry import DIALECTS, dialect_of
from penstock.adapters.engines.dialects.engine_failure import failure_in
from penstock.adapters.engines.dialects.kv_transfer_protocol import HANDOVERS, one_token
from penstock.adapters.engines.probe import _body
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import Handoff
from tests.adapters.test_dialects import seen

TRTLLM = dialect_of("trtllm")
WHOLE, NUMBER, TEXT, FLAG, LIST, OBJECT = int, (int, float), str, bool, list, dict
SHARED: dict[str, Any] = {
    **dict.fromkeys(("model", "user", "suffix"), TEXT),
    **dict.fromkeys(("seed", "n", "best_of", "top_k", "min_tokens", "truncate_prompt_tokens", "max_tokens"), WHOLE),
    **dict.fromkeys(("prompt_ignore_length", "thinking_token_budget"), WHOLE),
    **dict.fromkeys(("temperature", "top_p", "top_p_min", "min_p", "repetition_penalty", "length_penalty"), NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "priority"), NUMBER),
    **dict.fromkeys(("stream", "echo", "use_beam_search", "ignore_eos", "skip_special_tokens"), FLAG),
    **dict.fromkeys(("add_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"), FLAG),
    **dict.fromkeys(("logit_bias", "stream_options", "response_format", "disaggregated_params"), OBJECT),
    **dict.fromkeys(("lora_request", "conversation_params"), OBJECT),
    "early_stopping": (FLAG, TEXT),
    "stop": (TEXT, LIST),
    "stop_token_ids": LIST,
}
COMPLETION: dict[str, Any] = {
    **SHARED,
    "prompt": (TEXT, LIST),
    "logprobs": WHOLE,
    **dict.fromkeys(("detokenize", "return_context_logits"), FLAG),
}
CHAT: dict[str, Any] = {
    **SHARED,
    **dict.fromkeys(("messages", "tools", "documents", "prompt_token_ids", "injected_chat_template_kwargs"), LIST),
    **dict.fromkeys(("chat_template", "cache_salt", "prompt_token_ids_b64", "reasoning_effort"), TEXT),
    **dict.fromkeys(("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "thinking"), OBJECT),
    **dict.fromkeys(("logprobs", "parallel_tool_calls", "add_generation_prompt"), FLAG),
    **dict.fromkeys(("top_logprobs", "max_completion_tokens"), WHOLE),
    "tool_choice": (TEXT, OBJECT),
    "agent_hierarchy": (LIST, OBJECT),
}
ONE_FIELD = ("max_tokens", "max_completion_tokens")
"""Two names of one field of a chat: given both, the second is one too many."""
DISAGGREGATED = {
    **dict.fromkeys(("request_type", "encoded_opaque_state", "ctx_info_endpoint"), TEXT),
    **dict.fromkeys(("first_gen_tokens", "first_gen_log_probs", "first_gen_logits", "draft_tokens"), LIST),
    **dict.fromkeys(("ctx_request_id", "disagg_request_id", "ctx_dp_rank", "schedule_style"), WHOLE),
    **dict.fromkeys(("return_prompt_token_ids_b64", "resolved_thinking"), FLAG),
    "ctx_usage": OBJECT,
}
REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
FINISH_REASONS = {"stop", "length", "timeout", "cancelled", "not_finished", "tool_calls"}
MODEL = {"id": TEXT, "object": TEXT, "created": WHOLE, "owned_by": TEXT}
ERROR = {"object": TEXT, "message": TEXT, "type": TEXT, "param": TEXT, "code": WHOLE}

MADE = {
    "request_type": "context_only",
    "first_gen_tokens": [7],
    "ctx_request_id": 2049,
    "encoded_opaque_state": "AAE=",
    "draft_tokens": None,
}
CARD = WorkerCard(
    id=WorkerId("w"), epoch=1, model="m", url="http://w", engine="trtllm", fixed_role=True, role="prefill"
)
HANDOFF = Handoff(protocol="completed", key=1, source=CARD)
HANDOVER = HANDOVERS["completed", "trtllm"]
BODIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"model": "m", "messages": [], "max_completion_tokens": 9, "logprobs": True, "min_tokens": 2}),
    (CHAT, {"model": "m", "messages": [], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETION, {"model": "m", "prompt": "a", "max_tokens": 9, "logprobs": 2, "stream": True}),
]


def fits(body: dict[str, Any], schema: dict[str, Any]) -> None:
    unknown = body.keys() - schema.keys()
    assert not unknown, f"it refuses {unknown}"
    for name, value in body.items():
        kinds = schema[name] if isinstance(schema[name], tuple) else (schema[name],)
        assert value is None or (type(value) in kinds), (name, value)
    assert not all(name in body for name in ONE_FIELD), "two names of one field"
    assert body.get("stream") or not body.get("stream_options"), "it refuses stream options of a whole answer"
    if "disaggregated_params" in body:
        fits(body["disaggregated_params"], DISAGGREGATED)
        assert body["disaggregated_params"]["request_type"] in REQUEST_TYPES


@pytest.mark.parametrize(("schema", "body"), BODIES)
def test_each_field_that_we_add_is_one_of_its_own(schema: dict[str, Any], body: dict[str, Any]) -> None:
    chat = schema is CHAT
    for adapter, priority, salt in itertools.product((None, "poet"), (0, 3), (None, "s")):
        fits(body | TRTLLM.fields("m", adapter=adapter, priority=priority, salt=salt, chat=chat), schema)
    assert ("cache_salt" in TRTLLM.fields("m", salt="s", chat=chat)) is chat
    assert TRTLLM.special_tokens_field in schema
    for field in (TRTLLM.rank_field, TRTLLM.lora_field, TRTLLM.priority_field):
        assert field is None or field in schema
    assert all(name in schema for name, _ in TRTLLM.continue_fields)
    fits(_body(CARD), COMPLETION)


@pytest.mark.parametrize(("schema", "body"), BODIES)
def test_both_legs_of_a_hand_off_are_requests_of_its_own(schema: dict[str, Any], body: dict[str, Any]) -> None:
    made = HANDOVER.prefill(body, HANDOFF, CARD)
    fits(made, schema)
    asked = {name: value for name, value in body.items() if name != "stream_options"}
    assert made == asked | {"stream": False, "disaggregated_params": {"request_type": "context_only"}}
    fits(body | HANDOVER.decode(dict(MADE), HANDOFF), schema)
    assert HANDOVER.decode(dict(MADE), HANDOFF) == {
        "disaggregated_params": {**MADE, "request_type": "generation_only"}
    }, "the first token and the opaque state go on as they came"
    fits(one_token(made) | HANDOVER.decode(dict(MADE), HANDOFF), schema)  # fetches what nobody wants any more


@pytest.mark.parametrize("reason", sorted(FINISH_REASONS - {"tool_calls"}))
def test_a_first_token_that_is_the_last_leaves_nothing_to_fetch(reason: str) -> None:
    answer = {"choices": [{"index": 0, "finish_reason": reason, "disaggregated_params": MADE}]}
    assert HANDOVER.decode_params(answer) == (MADE if reason in ("length", "not_finished") else None)
    assert HANDOVER.decode_params({"choices": [{"index": 0, "finish_reason": reason}]}) is None


def test_what_it_gives_up_is_not_taken_for_whole() -> None:
    assert FINISH_REASONS & TRTLLM.gave_up == {"timeout", "cancelled"}


def test_its_errors_are_read_in_both_shapes() -> None:
    error = {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    fits(error, ERROR)
    failure = failure_in(error)
    assert failure is not None and (failure.message, failure.status) == ("too long", 400)
    invalid = failure_in({"error": "1 validation error for ChatCompletionRequest"})
    assert invalid is not None and invalid.message.startswith("1 validation error")
    assert overflows("The sum of prompt length (9), query length (0) should not exceed max_num_tokens (8)")


async def test_it_is_known_by_its_list_alone_and_its_statistics_are_left_to_others() -> None:
    """``/metrics`` tells each iteration to the first who asks: whoever describes it must not."""
    entry = {"id": "m", "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
    fits(entry, MODEL)
    assert next(iter(DIALECTS)) == "sim" and list(DIALECTS).index("trtllm") < list(DIALECTS).index("vllm")
    asked: list[str] = []

    class Routes(dict[str, Any]):
        def get(self, path: str, default: Any = None) -> Any:
            asked.append(path)
            return super().get(path, default)

    routes = Routes({"/v1/models": {"data": [entry]}, "/version": {"version": "1.3"}, "/metrics": [{"iter": 1}]})
    card = await seen(routes)
    assert (card.engine, card.labels) == ("trtllm", {"version": "1.3"})
    assert asked and not {"/metrics", "/kv_cache_events", "/perf_metrics"} & set(asked)
