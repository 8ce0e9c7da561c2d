"""Messages of planner.proto, external_scaler.proto and open_inference.proto, from their compiled descriptions.

planner.binpb is what protoc makes of planner.proto; a test makes it anew and compares. After a change, in this folder:

    python -m grpc_tools.protoc -I. --include_imports --descriptor_set_out=planner.binpb planner.proto
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from penstock.kernel.errors import ConfigError

PACKAGE = "penstock.planner.v1"
PROTOCOL = "1.0"
"""Version of the protocol; a plugin of another major version is refused."""
KEDA = "externalscaler"
"""Package of KEDA's external scalers."""
COMPILED = "planner.binpb"
COMPILED_KEDA = "external_scaler.binpb"
INFERENCE = "inference"
"""Package of the Open Inference Protocol."""
COMPILED_INFERENCE = "open_inference.binpb"


def need_grpc() -> Any:
    """Return the module ``grpc``.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        import google.protobuf  # noqa: F401 - imported here, where the error can say what to install
        import grpc
    except ImportError as error:
        raise ConfigError(
            f"planner plugins in other processes, KEDA and frontend.grpc_port need gRPC; {error.name} is not installed",
            hint="pip install 'penstock[plugins]'",
        ) from error
    return grpc


@cache
def _descriptor_pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    # A pool of its own: another copy of these names in the process, such as a user's generated code, does no harm.
    pool = descriptor_pool.DescriptorPool()
    for compiled in (COMPILED, COMPILED_KEDA, COMPILED_INFERENCE):
        for file in descriptor_pb2.FileDescriptorSet.FromString((files(__package__) / compiled).read_bytes()).file:
            pool.Add(file)
    return pool


@cache
def message(name: str, package: str = PACKAGE) -> Any:
    """Return the class of a message, such as ``Question``."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_descriptor_pool().FindMessageTypeByName(f"{package}.{name}"))


@cache
def service(name: str, package: str = PACKAGE) -> dict[str, tuple[str, Any, Any]]:
    """Return a service's methods: name -> path of the call, class of the request, class of the answer."""
    described = _descriptor_pool().FindServiceByName(f"{package}.{name}")
    return {
        method.name: (
            f"/{package}.{name}/{method.name}",
            message(method.input_type.name, package),
            message(method.output_type.name, package),
        )
        for method in described.methods
    }


async def call(
    channel: Any, name: str, method: str, question: Any, *, timeout: float, metadata: tuple[tuple[str, str], ...]
) -> Any:
    """Return a service's answer to one call over a channel; ``timeout`` in seconds."""
    path, kind, reply = service(name)[method]
    send = channel.unary_unary(path, request_serializer=kind.SerializeToString, response_deserializer=reply.FromString)
    return await send(question, timeout=timeout, metadata=metadata)


Method = Callable[[Any, Any], Awaitable[Any]]
"""Answers one call: ``(question, context)``, as grpc.aio gives them."""
Stream = Callable[[Any, Any], AsyncIterator[Any]]
"""Answers one call as often as there is something new."""
Duplex = Callable[[Any, Any], Awaitable[None]]
"""Answers a stream of questions by writing to its context: ``(questions, context)``."""


def handler_of(
    name: str,
    does: Mapping[str, Method],
    *,
    streams: Mapping[str, Stream] | None = None,
    duplex: Mapping[str, Duplex] | None = None,
    package: str = PACKAGE,
) -> Any:
    """Return the generic handler of a service, which a server takes.

    Args:
        does: method -> the function that answers it.
        streams: method with a stream of answers -> the generator of them.
        duplex: method with streams both ways -> the function that answers it; a question that can't be read is None.
    """
    grpc = need_grpc()
    methods = {}
    for method, (_, kind, reply) in service(name, package).items():
        readers = {"request_deserializer": _reading(kind), "response_serializer": reply.SerializeToString}
        if streams is not None and method in streams:
            methods[method] = grpc.unary_stream_rpc_method_handler(streams[method], **readers)
        elif duplex is not None and method in duplex:
            methods[method] = grpc.stream_stream_rpc_method_handler(duplex[method], **readers)
        else:
            methods[method] = grpc.unary_unary_rpc_method_handler(
                _readable(does[method], kind.DESCRIPTOR.full_name), **readers
            )
    return grpc.method_handlers_generic_handler(f"{package}.{name}", methods)


def _reading(kind: Any) -> Callable[[bytes], Any]:
    from google.protobuf.message import DecodeError

    def read(data: bytes) -> Any:
        # gRPC would log a traceback for each, and any client that can connect could fill the log.
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return read


def _readable(method: Method, name: str) -> Method:
    async def answer(question: Any, context: Any) -> Any:
        if question is None:
            await context.abort(need_grpc().StatusCode.INVALID_ARGUMENT, f"these bytes are no {name}")
        return await method(question, context)

    return answer


def text_metadata(context: Any) -> dict[str, str]:
    """Return a call's metadata without binary values, as headers are."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
