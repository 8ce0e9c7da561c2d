"""Do clients of the Open Inference Protocol get texts over gRPC, streamed or whole, and errors as its statuses?"""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, SecuritySettings
from penstock_extras.open_inference.inference_listener import InferenceListener
from penstock_extras.plugins.protobuf_messages import INFERENCE, message, service
from tests.frontend.stand import ENGINE, Engine, Stand, eventually, stand
from tests.frontend.test_overflow_clients import client

grpc = pytest.importorskip("grpc")
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


async def continues(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer a text completion of three tokens as vLLM does; one that is asked to hang stops after the first."""
    engine: Engine = request[ENGINE]
    words = [f"{engine.name}:", "two ", "three"]
    if not body["stream"]:
        choices = [{"index": n, "text": "".join(words), "finish_reason": "length"} for n in range(body.get("n", 1))]
        return web.json_response({"id": "a", "choices": choices, "usage": USAGE})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number, word in enumerate(words):
        choice = {"index": 0, "text": word, "finish_reason": "length" if number == 2 else None}
        await response.write(b"data: " + json.dumps({"id": "a", "choices": [choice]}).encode() + b"\n\n")
        if "hang" in body["prompt"]:
            await asyncio.Event().wait()
    await response.write(b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


@asynccontextmanager
async def served(count: int = 1, **options: Any) -> AsyncIterator[tuple[Stand, Any]]:
    async with stand(count, **options) as s:
        for engine in s.engines:
            engine.reply = continues
        listener = InferenceListener(s.service)
        await listener.start(0)
        try:
            async with grpc.aio.insecure_channel(listener.address) as channel:
                yield s, channel
        finally:
            await listener.close()


def asked(text: str | None = "Tell me", *, model: str = "m", id: str = "", raw: bool = False, **inputs: Any) -> Any:
    question = message("ModelInferRequest", INFERENCE)(model_name=model, id=id)
    kinds = {
        bool: ("BOOL", "bool_contents", "?"),
        int: ("INT32", "int_contents", "i"),
        float: ("FP32", "fp32_contents", "f"),
    }
    for name, value in ({} if text is None else {"text_input": text} | inputs).items():
        if isinstance(value, str):
            tensor = question.inputs.add(name=name, datatype="BYTES", shape=[1])
            if raw:
                question.raw_input_contents.append(struct.pack("<I", len(value.encode())) + value.encode())
            else:
                tensor.contents.bytes_contents.append(value.encode())
            continue
        datatype, field, code = kinds[type(value)]
        tensor = question.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        if raw:
            question.raw_input_contents.append(struct.pack(f"<{code}", value))
        else:
            getattr(tensor.contents, field).append(value)
    return question


async def call(channel: Any, method: str, question: Any = None, **options: Any) -> Any:
    path, kind, reply = service("GRPCInferenceService", INFERENCE)[method]
    send = channel.unary_unary(path, request_serializer=kind.SerializeToString, response_deserializer=reply.FromString)
    return await send(kind() if question is None else question, timeout=10, **options)


def stream(channel: Any, questions: list[Any], **options: Any) -> Any:
    path, kind, reply = service("GRPCInferenceService", INFERENCE)["ModelStreamInfer"]
    send = channel.stream_stream(
        path, request_serializer=kind.SerializeToString, response_deserializer=reply.FromString
    )
    return send(iter(questions), timeout=10, **options)


def outputs(answer: Any) -> dict[str, list[str]]:
    return {tensor.name: [part.decode() for part in tensor.contents.bytes_contents] for tensor in answer.outputs}


@pytest.mark.parametrize("raw", [False, True])
async def test_a_text_is_continued_on_the_way_of_all_requests(raw: bool) -> None:
    async with served() as (s, channel):
        question = asked(id="mine-1", raw=raw, max_tokens=3, temperature=0.5)
        question.parameters["seed"].int64_param = 7
        question.parameters["stop"].string_param = '["a", "b"]'
        answer = await call(channel, "ModelInfer", question)
        if raw:
            text, finish = answer.raw_output_contents
            assert (text[:4], text[4:], finish[4:]) == (struct.pack("<I", 12), b"e0:two three", b"length")
        else:
            assert outputs(answer) == {"text_output": ["e0:two three"], "finish_reason": ["length"]}
        assert answer.parameters["completion_tokens"].int64_param == 3
        assert (answer.id, answer.model_name, s.engines[0].paths) == ("mine-1", "m", ["/v1/completions"])
        sent = json.loads(s.engines[0].bodies[0])
        assert (sent["prompt"], sent["max_tokens"], sent["seed"]) == ("Tell me", 3, 7)
        assert (sent["temperature"], sent["stop"]) == (0.5, ["a", "b"])
        (record,) = s.records
        assert (record.id, record.outcome, record.osl) == ("mine-1", "ok", 3)
        assert s.service.history.explain("mine-1") is not None
        metrics = await (await s.http.get("/metrics")).text()
        assert 'endpoint="infer"' in metrics


async def test_several_choices_and_only_the_outputs_that_are_wanted() -> None:
    async with served() as (_, channel):
        question = asked(n=2)
        question.outputs.add(name="text_output")
        assert outputs(await call(channel, "ModelInfer", question)) == {"text_output": ["e0:two three"] * 2}


async def test_a_stream_has_pieces_and_an_end() -> None:
    async with served() as (s, channel):
        got = [answer async for answer in stream(channel, [asked(id="a", streaming=True)])]
        assert not any(answer.error_message for answer in got)
        texts = [outputs(answer.infer_response).get("text_output", []) for answer in got]
        assert texts == [["e0:"], ["two "], ["three"], []]
        last = got[-1].infer_response
        assert last.parameters["triton_final_response"].bool_param and last.parameters["prompt_tokens"].int64_param == 7
        assert outputs(got[-2].infer_response)["finish_reason"] == ["length"]
        (whole,) = [answer async for answer in stream(channel, [asked(id="b")])]
        assert outputs(whole.infer_response)["text_output"] == ["e0:two three"]
        assert {record.outcome for record in s.records} == {"ok"}


async def test_requests_of_one_stream_do_not_wait_for_each_other() -> None:
    async with served(2) as (s, channel):
        got = stream(channel, [asked("hang", id="slow", streaming=True), asked(id="fast", streaming=True)])
        async for answer in got:
            if answer.infer_response.id == "fast" and answer.infer_response.parameters:
                break
        got.cancel()
        await eventually(lambda: any(engine.hung_up.is_set() for engine in s.engines))
        await eventually(lambda: sorted(record.outcome for record in s.records) == ["cancelled", "ok"])


async def test_a_cancelled_call_cancels_the_engines_request() -> None:
    async with served() as (s, channel):
        hung = asyncio.Event()

        async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            hung.set()
            await asyncio.Event().wait()
            raise AssertionError

        s.engines[0].reply = never
        waiting = asyncio.ensure_future(call(channel, "ModelInfer", asked()))
        await hung.wait()
        waiting.cancel()
        await eventually(s.engines[0].hung_up.is_set)
        await eventually(lambda: s.records and s.records[0].outcome == "cancelled")


async def test_calls_that_end_while_it_closes_do_not_end_the_process() -> None:
    async with stand() as s:
        s.engines[0].reply = continues
        for _ in range(60):
            listener = InferenceListener(s.service)
            await listener.start(0)
            async with grpc.aio.insecure_channel(listener.address) as channel:
                got = stream(channel, [asked("hang", streaming=True)])
                await eventually(lambda: s.service.gate.inflight)
                got.cancel()
            await listener.close()


@pytest.mark.parametrize(
    ("question", "code", "words"),
    [
        (asked(model="x"), "NOT_FOUND", "'x' does not exist; known models: m"),
        (asked(None), "INVALID_ARGUMENT", "text_input of datatype BYTES"),
        (asked(streaming=True), "INVALID_ARGUMENT", "needs the call ModelStreamInfer"),
        (asked(max_tokens="many"), "INVALID_ARGUMENT", "max_tokens"),
        (asked(sampling_parameters="[1]"), "INVALID_ARGUMENT", "JSON object"),
    ],
)
async def test_an_error_has_its_status(question: Any, code: str, words: str) -> None:
    async with served() as (s, channel):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "ModelInfer", question)
        assert failed.value.code() is grpc.StatusCode[code] and words in failed.value.details()
        assert s.engines[0].bodies == []


def broken_inputs() -> list[Any]:
    wide, odd, short, known = asked(), asked(), asked(raw=True), asked()
    wide.inputs[0].shape[:] = [2]
    odd.inputs[0].datatype = "COMPLEX"
    short.raw_input_contents[0] = short.raw_input_contents[0][:-1]
    known.outputs.add(name="logits")
    version = asked()
    version.model_version = "2"
    return [wide, odd, short, known, version]


async def test_inputs_that_can_not_be_read_are_refused_by_name() -> None:
    async with served() as (s, channel):
        for question, words in zip(
            broken_inputs(),
            [
                "shape [2] and 1 values",
                "known: BYTES",
                "ends within a string",
                "text_output and finish_reason",
                "not '2'",
            ],
            strict=True,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(channel, "ModelInfer", question)
            assert words in failed.value.details()
        path = service("GRPCInferenceService", INFERENCE)["ModelInfer"][0]
        with pytest.raises(grpc.aio.AioRpcError, match="these bytes are no inference"):
            await channel.unary_unary(path)(b"\xff\xff")
        assert s.engines[0].bodies == []


async def test_an_error_within_a_stream_ends_only_its_request_unless_the_client_wants_its_status() -> None:
    async with served() as (_, channel):
        questions = [asked(model="x", id="bad"), asked(id="good")]
        got = [answer async for answer in stream(channel, questions)]
        (failed,) = [answer for answer in got if answer.error_message]
        assert "does not exist" in failed.error_message and failed.infer_response.id == "bad"
        assert [answer.infer_response.id for answer in got if not answer.error_message] == ["good"]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            _ = [answer async for answer in stream(channel, questions[:1], metadata=(("triton_grpc_error", "true"),))]
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_keys_limits_and_deadlines_are_those_of_every_request() -> None:
    security = SecuritySettings(api_keys=("secret",), pins=True)
    frontend = FrontendSettings(security=security, limits=LimitSettings(rate=0.001, burst=2))
    async with served(frontend=frontend) as (_, channel):
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            for method, question in (
                ("ModelInfer", asked()),
                ("ModelReady", message("ModelReadyRequest", INFERENCE)(name="m")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call(channel, method, question, metadata=metadata)
                assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        key = (("authorization", "Bearer secret"),)
        await call(channel, "ModelInfer", asked(), metadata=key)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "ModelInfer", asked(), metadata=(*key, ("x-penstock-worker", "elsewhere")))
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "pinned worker" in failed.value.details()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "ModelInfer", asked(), metadata=key)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(failed.value.trailing_metadata())["retry-after"]) > 100


async def test_it_says_what_it_is() -> None:
    async with served() as (_, channel):
        assert (await call(channel, "ServerLive")).live and (await call(channel, "ServerReady")).ready
        assert (await call(channel, "ServerMetadata")).name == "penstock"
        of_model = message("ModelMetadataRequest", INFERENCE)(name="m")
        described = await call(channel, "ModelMetadata", of_model)
        assert [(tensor.name, tensor.datatype) for tensor in described.outputs] == [
            ("text_output", "BYTES"),
            ("finish_reason", "BYTES"),
        ]
        assert described.inputs[0].name == "text_input"
        assert (await call(channel, "ModelReady", message("ModelReadyRequest", INFERENCE)(name="m"))).ready
        with pytest.raises(grpc.aio.AioRpcError, match="does not exist"):
            await call(channel, "ModelReady", message("ModelReadyRequest", INFERENCE)(name="x"))


def triton_inputs(triton: Any, text: bytes, *, streaming: bool) -> list[Any]:
    """Return a text as Triton's client wants it."""
    numpy = client("numpy")
    made = []
    values = {"text_input": (text, "BYTES", object), "streaming": (streaming, "BOOL", bool)}
    for name, (value, datatype, kind) in values.items():
        made.append(triton.InferInput(name, [1], datatype))
        made[-1].set_data_from_numpy(numpy.array([value], dtype=kind))
    return made


@pytest.mark.slow
async def test_tritons_client_gets_texts_and_streams() -> None:
    triton = client("tritonclient.grpc.aio")
    async with served() as (s, _):
        listener = InferenceListener(s.service)
        await listener.start(0)
        async with triton.InferenceServerClient(listener.address) as server:
            assert await server.is_server_live() and await server.is_model_ready("m")
            result = await server.infer(
                "m", triton_inputs(triton, b"Tell me", streaming=False), request_id="1", parameters={"max_tokens": 3}
            )
            assert result.as_numpy("text_output").tolist() == [b"e0:two three"]

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {
                    "model_name": "m",
                    "inputs": triton_inputs(triton, b"Tell me", streaming=True),
                    "request_id": "2",
                }

            texts = []
            async for got, error in server.stream_infer(requests()):
                assert error is None
                texts += [] if got.as_numpy("text_output") is None else got.as_numpy("text_output").tolist()
            assert texts == [b"e0:", b"two ", b"three"]
        await listener.close()
