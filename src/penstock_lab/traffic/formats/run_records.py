"""Reads a run's ``requests.jsonl`` as a trace, and writes a trace as one.

Its rows are `RequestRecord`s: live, bench and simulated runs all leave them. ``blocks`` are the chained hashes of the
prompt's full blocks; what follows them is not shared. A request that was not answered is kept where its
planned output length is known, and counted as unanswered where it is not.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import msgspec

from penstock.kernel.hashing import chain
from penstock.kernel.request_record import RequestRecord
from penstock_lab.traffic.formats.time_units import TimeUnit
from penstock_lab.traffic.formats.timed_rows import TimedRow, TimedRows
from penstock_lab.traffic.formats.trace_rows import Lines, RowProblem, numbered, object_of, tokens_of
from penstock_lab.traffic.traffic_request import TRACE_BLOCK, TrafficRequest

MODEL = "trace"
"""The model of records that were written from a trace, which names none."""

_decode = msgspec.json.Decoder(RequestRecord).decode


class RunRecordsTrace(TimedRows):
    """Iterate over the requests of a run, in order of arrival; ``at`` counts from the start of the run.

    Args:
        lines: of ``requests.jsonl``.
        block_size: tokens per block of the model; where None it is what each row's length and number of blocks allow
            among the powers of two, of which there is never more than one.
        name, skip_bad: see `Rows`.
    """

    format = "records"
    unit: TimeUnit | None = "s"
    from_first = False
    window: ClassVar[int | None] = None

    def __init__(
        self, lines: Lines, *, block_size: int | None = None, name: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(lines, name=name, skip_bad=skip_bad)
        self._block_size = block_size

    @staticmethod
    def recognises(line: str | bytes) -> bool:
        """Tell whether a line of a file looks like a row of this format."""
        try:
            return {"id", "arrival", "model", "outcome"} <= object_of(line).keys()
        except RowProblem:
            return False

    def _arrival(self, item: Any) -> TimedRow | None:
        try:
            record = _decode(item)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$.")
            raise RowProblem(path.rstrip("`") or "(whole row)", item, problem) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RowProblem("(whole row)", item, f"not JSON ({error})") from error
        if not 0.0 <= record.arrival < math.inf:
            raise RowProblem("arrival", record.arrival, "seconds from 0 on are needed")
        wanted = record.osl if record.osl_requested is None else record.osl_requested
        if tokens_of("osl", wanted, least=0) == 0:
            self.unanswered += 1
            return None
        isl = tokens_of("isl", record.isl)
        blocks = record.block_names
        request = TrafficRequest(
            at=0.0,
            isl=isl,
            osl=wanted,
            hash_ids=blocks,
            block_size=_block_size(isl, blocks, self._block_size),
            session=record.session,
            program=record.program,
            kind=record.service_class,
        )
        end = None if record.e2e is None else record.arrival + record.e2e
        return TimedRow(at=record.arrival, end=end, request=request)


def record_lines(requests: Iterable[TrafficRequest]) -> Iterator[bytes]:
    """Yield a record for each request, as one that was planned and not sent.

    Hash ids, numbered anew (see `numbered`), become chained ones; a last block that is not full has none. Think times
    are not kept: a record has the moments at which turns came and ended.

    Raises:
        ValueError: a prompt is not given by hash ids.
    """
    for number, request in enumerate(numbered(requests)):
        full = request.hash_ids[: request.isl // request.block_size]
        record = RequestRecord(
            id=f"trace-{number}",
            arrival=request.at,
            model=MODEL,
            outcome="unsent",
            service_class=request.kind,
            isl=request.isl,
            osl_requested=request.osl,
            blocks=list(chain(full)) if full else None,
            session=request.session,
            program=request.program,
            turn=None if request.session is None else request.turn,
        )
        yield msgspec.json.encode(record) + b"\n"


def _block_size(isl: int, blocks: list[int], given: int | None) -> int:
    count = len(blocks)
    if not count:
        return given or TRACE_BLOCK
    if given is not None:
        if isl // given != count:
            raise RowProblem("blocks", count, f"{isl} tokens have {isl // given} full blocks of {given}")
        return given
    size = 1 << max(0, (isl // count).bit_length() - 1)
    if isl // size != count:
        raise RowProblem("blocks", count, f"no power of two cuts {isl} tokens so; say the trace's block size")
    return size
