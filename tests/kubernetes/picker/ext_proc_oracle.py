"""Our coding of ext_proc's messages against the compiled ones of xds-protos; `test_ext_proc_messages` runs this.

It runs in a process of its own: xds-protos has files of the package opentelemetry that may not be beside the real one.
"""

from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from penstock_kubernetes.picker import ext_proc_messages as wire

NAMES = st.text("abcdefghijklmnopqrstuvwxyz-:", min_size=1, max_size=200)
VALUES = st.binary(max_size=300)


def answer(data: bytes) -> Any:
    message = pb.ProcessingResponse()
    message.ParseFromString(data)
    return message


def header_of(pair) -> tuple[str, str]:
    return pair.header.key, pair.header.raw_value.decode()


@given(st.dictionaries(NAMES, VALUES, max_size=8), st.booleans(), st.booleans())
def test_headers_are_read(headers: dict[str, bytes], end: bool, raw: bool) -> None:
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = end
    for name, value in headers.items():
        one = message.request_headers.headers.headers.add(key=name)
        if raw:
            one.raw_value = value
        else:
            one.value = value.hex()
    got = wire.read_message(message.SerializeToString())
    read = wire.read_headers(got.part)
    assert got.kind == wire.REQUEST_HEADERS and read.end_of_stream == end
    assert read.headers == {name: value.decode("latin-1") if raw else value.hex() for name, value in headers.items()}


@given(st.binary(max_size=70_000), st.booleans())
def test_bodies_are_read_and_echoed_unchanged(body: bytes, end: bool) -> None:
    message = pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=end))
    got = wire.read_message(message.SerializeToString())
    assert got.kind == wire.RESPONSE_BODY and wire.read_body(got.part) == (body, end)
    streamed = answer(wire.echo(got.kind, got.part)).response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (body, end)


@given(st.binary(max_size=200_000), st.booleans())
def test_a_body_goes_back_in_chunks_with_one_end(body: bytes, last: bool) -> None:
    parts = [answer(one) for one in wire.body_chunks(wire.REQUEST_BODY, body, last=last)]
    pieces = [part.request_body.response.body_mutation.streamed_response for part in parts]
    assert b"".join(piece.body for piece in pieces) == body
    assert max(len(piece.body) for piece in pieces) <= 62_000
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [last]


def test_metadata_and_modes_are_read() -> None:
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders())
    hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hint["x-gateway-destination-endpoint-subset"] = ["10.0.0.1:80", "10.0.0.2:80"]
    hint["deep"] = {"a": [1.5, True, None, {"b": "c"}]}
    message.metadata_context.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] = "10.0.0.1:80"
    message.protocol_config.request_body_mode = 4
    got = wire.read_message(message.SerializeToString())
    read = lambda space, key: wire.read_metadata(got.metadata, space, key)  # noqa: E731
    assert read("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset") == ["10.0.0.1:80", "10.0.0.2:80"]
    assert read("envoy.lb.subset_hint", "deep") == {"a": [1.5, True, None, {"b": "c"}]}
    assert read("envoy.lb", "x-gateway-destination-endpoint-served") == "10.0.0.1:80"
    assert read("envoy.lb", "absent") is None and read("absent", "absent") is None
    assert got.modes == (wire.DUPLEX, wire.NONE)


def test_answers_mean_what_they_should() -> None:
    choice = answer(
        wire.headers_answer(wire.REQUEST_HEADERS, {"a": "x" * 300, "b": "2"}, reroute=True)
        + wire.lb_metadata("x-gateway-destination-endpoint", "1.2.3.4:5")
    )
    common = choice.request_headers.response
    assert common.clear_route_cache
    assert [header_of(one) for one in common.header_mutation.set_headers] == [("a", "x" * 300), ("b", "2")]
    overwrite = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    assert {one.append_action for one in common.header_mutation.set_headers} == {overwrite}
    assert choice.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "1.2.3.4:5"
    buffered = answer(wire.body_answer(wire.REQUEST_BODY, {"a": "1"}, b"new")).request_body.response
    assert buffered.body_mutation.body == b"new" and buffered.clear_route_cache
    assert not answer(wire.body_answer(wire.REQUEST_BODY, {}, None)).request_body.response.HasField("body_mutation")
    refused = answer(wire.immediate_answer(503, {"retry-after": "1"}, b"{}")).immediate_response
    assert (refused.status.code, refused.body) == (503, b"{}")
    assert [header_of(one) for one in refused.headers.set_headers] == [("retry-after", "1")]
    for kind in range(wire.REQUEST_HEADERS, wire.RESPONSE_TRAILERS + 1):
        number = pb.ProcessingResponse.DESCRIPTOR.fields_by_number[kind - 1]
        assert answer(wire.empty_answer(kind)).WhichOneof("response") == number.name


@given(st.binary(max_size=200))
def test_garbage_is_an_error_and_nothing_else(data: bytes) -> None:
    try:
        got = wire.read_message(data)
        wire.read_headers(got.part)
        wire.read_body(got.part)
        wire.read_metadata(got.metadata, "envoy.lb", "x")
    except wire.BadMessage:
        pass
