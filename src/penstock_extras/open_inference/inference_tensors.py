"""Tensors of the Open Inference Protocol: a request's inputs as fields, and an answer's texts as outputs."""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.frontend.http.error_responses import quoted, rejected
from penstock.kernel.values import JsonObject

TEXT_OUTPUT, FINISH_REASON = "text_output", "finish_reason"
OUTPUTS = (TEXT_OUTPUT, FINISH_REASON)
VERSION = "1"
"""The version of every model: engines are replaced under one name, so there is no other."""
_CONTENTS = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
}
"""Datatype -> where its values stand in typed contents, and how each is packed in raw ones."""


def fields_of_inputs(question: Any) -> JsonObject:
    """Return what a ModelInferRequest asks: name -> value, inputs over parameters.

    Raises:
        ClientError: 400: an input is not one value of a known type.
    """
    fields: JsonObject = {}
    for name, parameter in question.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            fields[name] = getattr(parameter, kind)
    raw = list(question.raw_input_contents)
    if raw and len(raw) != len(question.inputs):
        raise rejected(f"raw_input_contents has {len(raw)} parts for {len(question.inputs)} inputs", "inputs")
    for place, tensor in enumerate(question.inputs):
        values = _raw_values(tensor, raw[place]) if raw else _typed_values(tensor)
        size = 1
        for length in tensor.shape:
            size *= length
        if size != 1 or len(values) != 1:
            text = f"input {quoted(tensor.name)} has shape {list(tensor.shape)} and {len(values)} values"
            raise rejected(f"{text}; send one value, and a request for each prompt", tensor.name)
        fields[tensor.name] = values[0]
    return fields


def outputs_wanted(question: Any) -> Sequence[str]:
    """Return the outputs that a request names, or all.

    Raises:
        ClientError: 400: there is no such output.
    """
    names = [output.name for output in question.outputs]
    for name in names:
        if name not in OUTPUTS:
            raise rejected(f"there is no output {quoted(name)}; there are {' and '.join(OUTPUTS)}", "outputs")
    return names or OUTPUTS


def fill_outputs(answer: Any, wanted: Sequence[str], texts: Sequence[str], finishes: Sequence[str], raw: bool) -> None:
    """Put texts and finish reasons, one for each choice, into a ModelInferResponse.

    Args:
        raw: as raw bytes, which is how the client sent its inputs.
    """
    values = {TEXT_OUTPUT: texts, FINISH_REASON: finishes}
    for name in wanted:
        encoded = [text.encode() for text in values[name]]
        tensor = answer.outputs.add(name=name, datatype="BYTES", shape=[len(encoded)])
        if raw:
            answer.raw_output_contents.append(b"".join(struct.pack("<I", len(part)) + part for part in encoded))
        else:
            tensor.contents.bytes_contents.extend(encoded)


def _typed_values(tensor: Any) -> list[Any]:
    if tensor.datatype == "BYTES":
        return [_decode_text(tensor.name, value) for value in tensor.contents.bytes_contents]
    return list(getattr(tensor.contents, _contents_of_datatype(tensor)[0]))


def _raw_values(tensor: Any, data: bytes) -> list[Any]:
    if tensor.datatype == "BYTES":
        return [_decode_text(tensor.name, value) for value in _strings(tensor.name, data)]
    code = _contents_of_datatype(tensor)[1]
    if len(data) % struct.calcsize(code):
        raise rejected(
            f"input {quoted(tensor.name)} has {len(data)} bytes, which are no {tensor.datatype}", tensor.name
        )
    return [value for (value,) in struct.iter_unpack(f"<{code}", data)]


def _strings(name: str, data: bytes) -> Iterator[bytes]:
    """Yield the strings of raw contents: each behind its length in 4 bytes, little endian."""
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data) or at + 4 > len(data):
            raise rejected(f"input {quoted(name)} ends within a string", name)
        yield data[at + 4 : end]
        at = end


def _decode_text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise rejected(f"input {quoted(name)} is not valid UTF-8 (byte {error.start})", name) from None


def _contents_of_datatype(tensor: Any) -> tuple[str, str]:
    known = _CONTENTS.get(tensor.datatype)
    if known is None:
        listed = ", ".join(("BYTES", *_CONTENTS))
        raise rejected(
            f"input {quoted(tensor.name)} has datatype {quoted(tensor.datatype)}; known: {listed}", tensor.name
        )
    return known
