"""Batch input: reads and checks the requests of a batch's input file."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock_extras.batches.batch_answers import LineError

FILE_MAX = 200 * 1024 * 1024
"""Most bytes of a file, as OpenAI's own limit."""
REQUESTS_MAX = 50_000
"""Most requests of a batch, as OpenAI's own limit."""
ERRORS_MAX = 20
"""Most errors that a failed batch shows."""


class InputLine(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class LinePlace(NamedTuple):
    """Where a request stands in its file."""

    custom_id: str
    start: int
    length: int


class _BodyFields(msgspec.Struct):
    stream: bool | None = None


_lines = msgspec.json.Decoder(InputLine)
_bodies = msgspec.json.Decoder(_BodyFields)


def read_places(path: Path, endpoint: str, line_max: int) -> tuple[list[LinePlace], list[LineError]]:
    """Return where each request of a file stands, and what is wrong with the file."""
    places: list[LinePlace] = []
    errors: list[LineError] = []
    custom_ids: set[str] = set()
    start = 0
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            begin, start = start, start + len(raw)
            if raw.isspace():
                continue
            line, error = _read_line(raw, number, endpoint, line_max)
            if line is not None and line.custom_id in custom_ids:
                text = f"the custom_id {line.custom_id[:100]!r} is there twice"
                error = LineError(code="duplicate_custom_id", message=text, line=number, param="custom_id")
            if error is not None:
                errors.append(error)
            elif line is not None:
                custom_ids.add(line.custom_id)
                places.append(LinePlace(line.custom_id, begin, len(raw)))
            if len(errors) >= ERRORS_MAX:
                break
            if len(places) > REQUESTS_MAX:
                text = f"a batch has at most {REQUESTS_MAX} requests"
                errors.append(LineError(code="too_many_requests", message=text, line=number))
                break
    if not places and not errors:
        errors.append(LineError(code="empty_file", message="the input file has no request"))
    return places, errors


def read_request(path: Path, place: LinePlace) -> InputLine:
    """Return one request."""
    with path.open("rb") as file:
        file.seek(place.start)
        return _lines.decode(file.read(place.length))


def _read_line(raw: bytes, number: int, endpoint: str, line_max: int) -> tuple[InputLine | None, LineError | None]:
    if len(raw) > line_max:
        text = f"the line has {len(raw)} bytes; frontend.limits.body_max is {line_max}"
        return None, LineError(code="line_too_large", message=text, line=number)
    try:
        line = _lines.decode(raw)
        streamed = _bodies.decode(line.body).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the line is not a request with custom_id, method, url and body: {error}"
        return None, LineError(code="invalid_json_line", message=text, line=number)
    if line.method != "POST" or line.url != endpoint:
        text = f"the line asks for {line.method[:10]} {line.url[:100]}, but the batch is for POST {endpoint}"
        return line, LineError(code="mismatched_endpoint", message=text, line=number, param="url")
    if not 0 < len(line.custom_id) <= 512:
        text = "custom_id must have 1 to 512 characters"
        return line, LineError(code="invalid_custom_id", message=text, line=number, param="custom_id")
    if streamed:
        text = "a request of a batch can't be streamed"
        return line, LineError(code="invalid_request", message=text, line=number, param="body.stream")
    return line, None
