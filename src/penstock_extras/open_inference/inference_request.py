"""Inference request: the body of a completion for a ModelInferRequest."""

from typing import Any

import msgspec

from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.prompt.request_body import decode_object
from penstock.kernel.values import JsonObject
from penstock_extras.open_inference.inference_tensors import VERSION, fields_of_inputs

TEXT_INPUT, STREAMING = "text_input", ("streaming", "stream")
SAMPLING = "sampling_parameters"
"""An input that holds all sampling parameters as JSON, as Triton's vLLM backend has it."""
_OF_OTHERS = frozenset({"exclude_input_in_output", "return_finish_reason", "return_num_output_tokens"})
"""Inputs of Triton's backend that say what we do anyway: the prompt is not repeated, and the finish reason is there."""


def completion_body(question: Any, *, streams: bool) -> bytes:
    """Return the body of a completion.

    Args:
        streams: the call may have several answers.
    Raises:
        ClientError: 400, 404: an input is wrong or missing, or there is no such version of the model.
    """
    if question.model_version not in ("", VERSION):
        raise rejected(
            f"the model {quoted(question.model_name)} has version {VERSION}, not {quoted(question.model_version)}",
            "model_version",
            code="model_not_found",
            status=404,
        )
    fields = fields_of_inputs(question)
    prompt = fields.pop(TEXT_INPUT, None)
    if not isinstance(prompt, str):
        raise rejected(f"send the prompt as input {TEXT_INPUT} of datatype BYTES", TEXT_INPUT, code="missing_field")
    wants_stream = [fields.pop(name) for name in STREAMING if name in fields]
    if not all(isinstance(wish, bool) for wish in wants_stream):
        raise rejected(f"{STREAMING[0]} must be of datatype BOOL", STREAMING[0])
    stream = any(wants_stream)
    if stream and not streams:
        raise rejected("a streamed answer needs the call ModelStreamInfer", STREAMING[0])
    sampling = fields.pop(SAMPLING, None)
    fields = {
        name: _as_parameter(value) for name, value in fields.items() if name not in _OF_OTHERS and "triton_" not in name
    }
    body: JsonObject = {**({} if sampling is None else _sampling(sampling)), **fields}
    if stream and body.get("n", 1) != 1:
        raise rejected("a stream has one choice; leave n out, or stream nothing", "n")
    body |= {"model": question.model_name, "prompt": prompt, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


def _as_parameter(value: Any) -> Any:
    """Return a parameter as JSON has it: text that is a list or an object, such as of stop texts, is read as that."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value


def _sampling(text: Any) -> JsonObject:
    if not isinstance(text, str):
        raise rejected(f"{SAMPLING} must be a JSON object, of datatype BYTES", SAMPLING)
    # Triton's backend takes every value as text; as JSON they are what they say.
    return {name: _as_number(value) for name, value in decode_object(text.encode()).items()}


def _as_number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value
