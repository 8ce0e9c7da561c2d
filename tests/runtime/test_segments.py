"""Segments of records: several processes begin them at once, readers go across them, nothing is lost between two."""

import json
import multiprocessing
from collections import Counter
from pathlib import Path

import pytest

from penstock.kernel.request_record import RequestRecord
from penstock.runtime.records import segments
from penstock.runtime.records.run_folder import Cap, LineWriter
from penstock_lab.report.run.recording import Recording
from penstock_lab.report.run.run_files import newest_ends, recorded_explanation
from penstock_lab.report.run.run_page import write_report
from penstock_lab.report.traffic_options import opened as opened_trace

WRITERS, LINES = 4, 3000


def write(path: str, who: int) -> None:
    writer = LineWriter(Path(path), cap=Cap(4096, 10_000))
    for number in range(LINES):
        writer.write([who, number])
        if number % 7 == who:
            writer.flush()
    writer.flush()


def test_several_processes_lose_no_line_while_segments_begin(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(str(path), who)) for who in range(WRITERS)]
    for process in writers:
        process.start()
    most: Counter[int] = Counter()
    while any(process.is_alive() for process in writers):
        # A reader sees of each writer all lines up to some moment, or it has missed a segment.
        looked: Counter[int] = Counter(json.loads(line)[0] for line in segments.lines(path))
        assert all(looked[who] >= most[who] for who in range(WRITERS))
        most = looked
    for process in writers:
        process.join()
        assert process.exitcode == 0
    read = [json.loads(line) for line in segments.lines(path)]
    assert sorted(read) == [[who, number] for who in range(WRITERS) for number in range(LINES)]
    assert len(segments.numbers(path)) > 10
    backwards = [json.loads(line) for line in segments.newest(path, WRITERS * LINES)]
    assert backwards == read[::-1]
    assert [json.loads(line) for line in segments.newest(path, 9, mark=b"[2,")] == [r for r in read[::-1] if r[0] == 2][
        :9
    ]


def test_a_reader_misses_no_segment_that_begins_while_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    (tmp_path / "requests.2.jsonl").write_text("2\n")
    path.write_text("3\n")
    read = []
    for file in segments.opened(path):
        read += file.read().split()
        if read == [b"2"]:
            segments.rotate(path, 1, 9)
            path.write_text("4\n")
    assert read == [b"2", b"3", b"4"]
    back = []
    for file in segments.opened_newest(path):
        back += file.read().split()
        if back == [b"4"]:
            segments.rotate(path, 1, 9)
            path.write_text("5\n")
    assert back == [b"4", b"3", b"2"]


@pytest.mark.parametrize("length", [3, segments.TAIL - 1, segments.TAIL, 3 * segments.TAIL])
def test_lines_longer_than_what_is_read_at_a_time_are_whole(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.jsonl"
    lines = [bytes([65 + n]) * (length + n) for n in range(5)]
    path.write_bytes(b"\n".join(lines) + b"\nhalf")
    assert segments.newest(path, 9) == lines[::-1]
    assert segments.newest(path, 9, mark=b"BB") == [lines[1]]


def record(number: int) -> bytes:
    found = RequestRecord(
        id=f"r-{number}",
        arrival=float(number),
        model="m",
        outcome="ok",
        isl=10,
        osl=4,
        osl_requested=4,
        ttft=0.1,
        e2e=0.5,
    )
    return (
        json.dumps(
            {name: getattr(found, name) for name in ("id", "arrival", "model", "outcome", "isl", "osl")}
            | {"osl_requested": 4, "ttft": 0.1, "e2e": 0.5}
        ).encode()
        + b"\n"
    )


def test_every_reader_goes_across_segments_and_says_where_some_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    for part, first in (("requests.3.jsonl", 0), ("requests.4.jsonl", 10), ("requests.jsonl", 20)):
        (tmp_path / part).write_bytes(b"".join(record(number) for number in range(first, first + 10)))
    ids = [f"r-{number}" for number in range(30)]
    assert [entry.id for entry in newest_ends(tmp_path, 25)] == ids[::-1][:25]
    assert recorded_explanation(tmp_path, "r-3").request.id == "r-3"
    recording = Recording(tmp_path)
    assert [entry.id for entry in recording.requests(12, 15.0)] == ids[:15][::-1][:12]
    assert sum(recording.whole_run().columns["arrived"]) == 30
    assert any("oldest 2 segments of requests.jsonl are deleted" in note for note in recording.notes)
    (tmp_path / "requests.3.jsonl").unlink()  # a live cluster goes on, and the page still has what it read
    assert recording.requests(1, 0.6)[0].id == "r-0"
    with opened_trace(tmp_path / "requests.jsonl", None, block_size=None, skip_bad=False) as trace:
        assert len(list(trace)) == 20
    assert "oldest 3 segments" in write_report(tmp_path).read_text()
    assert (tmp_path / "report-ttft.csv").exists()
