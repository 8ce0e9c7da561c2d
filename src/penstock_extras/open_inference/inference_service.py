"""Inference service: answers the calls of the Open Inference Protocol, each as a completion on the way of all."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

import penstock
from penstock.frontend.http.error_responses import ErrorResponse, problem_of, quoted, rejected
from penstock.frontend.http.request_gate import identified, log_line, serve
from penstock.frontend.openai import completions
from penstock.frontend.openai.models import health_of
from penstock.frontend.service import Service
from penstock.kernel.errors import PenstockError
from penstock_extras.open_inference.inference_exchange import InferenceExchange, InferenceFailure, InferencePiece
from penstock_extras.open_inference.inference_request import completion_body
from penstock_extras.open_inference.inference_tensors import OUTPUTS, VERSION, fill_outputs, outputs_wanted
from penstock_extras.plugins.protobuf_messages import INFERENCE, handler_of, message, need_grpc, text_metadata

NAME = "GRPCInferenceService"
LABEL = "infer"
"""Endpoint label of metrics and records."""
STREAM_REQUESTS_MAX = 64
"""Requests of one stream that are answered at the same time; the next is read when one of them ends."""
TIMEOUT = "x-penstock-timeout"
STATUS_ERRORS = "triton_grpc_error"
"""Metadata by which a client of a stream wants errors as its status, which ends it, and not as messages within it."""
FINAL = "triton_final_response"
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "FAILED_PRECONDITION",
    412: "FAILED_PRECONDITION",
    413: "RESOURCE_EXHAUSTED",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class InferenceService:
    """The calls of one frontend process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._complete = partial(completions.complete, "completions", service, label=LABEL)
        self._grpc = need_grpc()

    def handler(self) -> Any:
        """Return the generic handler that a gRPC server takes."""
        calls = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        return handler_of(NAME, calls, duplex={"ModelStreamInfer": self._stream}, package=INFERENCE)

    async def _live(self, question: Any, context: Any) -> Any:
        return _message("ServerLiveResponse", live=True)

    async def _ready(self, question: Any, context: Any) -> Any:
        return _message("ServerReadyResponse", ready=health_of(self._service).status in ("ok", "degraded"))

    async def _metadata(self, question: Any, context: Any) -> Any:
        version = penstock.__version__
        return _message("ServerMetadataResponse", name="penstock", version=version, extensions=["model_stream_infer"])

    async def _model_ready(self, question: Any, context: Any) -> Any:
        model = await self._known(question, context)
        return _message("ModelReadyResponse", ready=self._service.cluster.ready(model) > 0)

    async def _model_metadata(self, question: Any, context: Any) -> Any:
        await self._known(question, context)
        tensor = partial(_message, "ModelMetadataResponse.TensorMetadata")
        return _message(
            "ModelMetadataResponse",
            name=question.name,
            versions=[VERSION],
            platform="penstock",
            inputs=[
                tensor(name="text_input", datatype="BYTES", shape=[1]),
                *(
                    tensor(name=name, datatype=datatype, shape=[1])
                    for name, datatype in (("streaming", "BOOL"), ("max_tokens", "INT32"), ("temperature", "FP32"))
                ),
            ],
            outputs=[tensor(name=name, datatype="BYTES", shape=[-1]) for name in OUTPUTS],
        )

    async def _known(self, question: Any, context: Any) -> str:
        """Return the model that a question is about; end the call where its key or the model is unknown."""
        gate, started = self._service.gate, time.monotonic()
        headers, remote = text_metadata(context), _remote(context)
        name, status = remote, 200
        try:
            name = identified(gate, headers, remote)
            if question.version not in ("", VERSION):
                raise rejected(f"models have version {VERSION}, not {quoted(question.version)}", "version", status=404)
            resolved = self._service.catalog.resolve(question.name, name)
            self._service.check_model(name, resolved)
            return resolved.model
        except PenstockError as error:
            failure = _inference_failure(problem_of(error), str(error))
            status = failure.status
            await self._abort(context, failure)
            raise
        finally:
            log_line("POST", _path("ModelMetadata"), gate.request_id(headers), status, started, name, {})

    async def _infer(self, question: Any, context: Any) -> Any:
        exchange = self._exchange("ModelInfer", question, context, streams=False)
        await serve(self._service.gate, exchange, self._complete)
        if exchange.failure is not None:
            await self._abort(context, exchange.failure)
        answer = self._answer(question, exchange, exchange.choices)
        _put_counts(answer, exchange)
        return answer

    async def _stream(self, questions: Any, context: Any) -> None:
        room, lock = asyncio.Semaphore(STREAM_REQUESTS_MAX), asyncio.Lock()
        strict = text_metadata(context).get(STATUS_ERRORS) == "true"
        aborted = self._grpc.aio.AbortError

        try:
            async with asyncio.TaskGroup() as group:
                async for question in questions:
                    await room.acquire()
                    task = group.create_task(self._one_of_stream(question, context, lock, strict=strict))
                    task.add_done_callback(lambda _: room.release())
        except* aborted:
            pass  # the status has been sent, and it ends the call

    async def _one_of_stream(self, question: Any, context: Any, lock: asyncio.Lock, *, strict: bool) -> None:
        """Answer one request of a stream; ``lock``: one message at a time goes out."""
        if question is None:
            async with lock:
                await self._abort(context, InferenceFailure(400, f"these bytes are no {INFERENCE}.ModelInferRequest"))
            return
        exchange = self._exchange("ModelStreamInfer", question, context, streams=True)
        serving = asyncio.create_task(serve(self._service.gate, exchange, self._complete))
        serving.add_done_callback(lambda _: exchange.over())

        async def write(answer: Any) -> None:
            async with lock:
                await context.write(answer)

        try:
            streamed = False
            async for piece in exchange.pieces():
                streamed = True
                await write(
                    _message("ModelStreamInferResponse", infer_response=self._answer(question, exchange, [piece]))
                )
            await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        if exchange.failure is not None:
            if strict:
                async with lock:
                    await self._abort(context, exchange.failure)
            failed = _message("ModelStreamInferResponse", error_message=exchange.failure.message)
            failed.infer_response.id, failed.infer_response.model_name = question.id, question.model_name
            return await write(failed)
        answer = self._answer(question, exchange, None if streamed else exchange.choices)
        _put_counts(answer, exchange)
        answer.parameters[FINAL].bool_param = True
        await write(_message("ModelStreamInferResponse", infer_response=answer))

    def _exchange(self, method: str, question: Any, context: Any, *, streams: bool) -> InferenceExchange:
        headers = text_metadata(context)
        left = context.time_remaining()
        if left is not None and TIMEOUT not in headers:
            headers[TIMEOUT] = str(max(0.001, min(left, 1e6)))
        if question.id and "x-request-id" not in headers:
            headers["x-request-id"] = question.id

        def body() -> bytes:
            outputs_wanted(question)
            return completion_body(question, streams=streams)

        id = self._service.gate.request_id(headers)
        return InferenceExchange(id, _path(method), headers, _remote(context), body)

    def _answer(self, question: Any, exchange: InferenceExchange, choices: Sequence[InferencePiece] | None) -> Any:
        answer = _message(
            "ModelInferResponse", model_name=question.model_name, model_version=VERSION, id=question.id or exchange.id
        )
        if choices is not None:
            texts, finishes = [choice.text for choice in choices], [choice.finish for choice in choices]
            fill_outputs(answer, outputs_wanted(question), texts, finishes, bool(question.raw_input_contents))
        return answer

    async def _abort(self, context: Any, failure: InferenceFailure) -> None:
        """End a call with a status, which raises."""
        code = getattr(self._grpc.StatusCode, _CODES.get(failure.status, "INTERNAL"))
        trailers = () if failure.retry_after is None else (("retry-after", failure.retry_after),)
        await context.abort(code, failure.message, trailers)


def _message(name: str, /, **fields: Any) -> Any:
    return message(name, INFERENCE)(**fields)


def _put_counts(answer: Any, exchange: InferenceExchange) -> None:
    for name, count in exchange.counts.items():
        answer.parameters[name].int64_param = count


def _inference_failure(error: ErrorResponse, text: str) -> InferenceFailure:
    return InferenceFailure(error.status, text, error.headers.get("retry-after"))


def _path(method: str) -> str:
    return f"/{INFERENCE}.{NAME}/{method}"


def _remote(context: Any) -> str | None:
    """Return the client's address, of a peer such as ``ipv4:127.0.0.1:50000`` or ``ipv6:%5B::1%5D:50000``."""
    kind, _, rest = unquote(context.peer()).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else None
