"""trace: what it says of a trace, what it writes, and how it names what is wrong."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock_lab.cli import trace as cli_trace
from penstock_lab.traffic.formats.trace_format import Format, Written, reader
from penstock_lab.traffic.traffic_request import TrafficRequest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:00:{second:02}.500000+00:00,{100 + second},{second % 3}\n" for second in range(60)
)


def rows(count: int = 10, **changes: Any) -> str:
    lines = (
        {"timestamp": 3000 * (n // 2), "input_length": 1024, "output_length": 5, "hash_ids": [0, n + 1], **changes}
        for n in range(count)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(path: str) -> list[TrafficRequest]:
    return list(reader(None, Path(path).read_bytes().splitlines()))


def archive(path: Path, members: dict[str, str]) -> Path:
    with tarfile.open(path, "w:xz") as file:
        for name, text in members.items():
            info = tarfile.TarInfo(f"data/m/{name}")
            info.size = len(text)
            file.addfile(info, io.BytesIO(text.encode()))
    return path


MEMBERS = {
    "chunk-10-dataset.json": json.dumps({"0": {"input_tokens": "{7: 1.0}", "output_tokens": "{3: 1.0}"}}),
    "chunk-10-trace.csv": "0,2.0,1,Gamma,1,1\n600,4.0,1,Gamma,1,1\n",
    "chunk-9-trace.csv": "0,0,0,,0,0\n600,1.0,2,Weibull,0.6,1\n",
    "LICENSE": "free",
}


def test_the_choices_are_the_formats() -> None:
    assert get_args(Format) == cli_trace.FORMATS
    assert get_args(Written) == cli_trace.WRITTEN


def test_info_says_what_is_in_a_trace(penstock, tmp_path):
    (tmp_path / "t.jsonl").write_text(rows(10, session_id="s", kind="chat", delay=500))
    result = penstock("trace", "info", "t.jsonl")
    assert result.exit_code == 0
    assert (
        "t.jsonl: mooncake, 10 rows, 10 requests over 12.0 s: 0.75 per second, 1.00 in the busiest 2.0 s."
        in result.output
    )
    assert "prompt tokens  1,024.00" in result.output
    assert (
        "would hit 45.0 % of the prompt tokens.\n1 session with 10.00 turns on average.\nKinds: chat 10."
        in result.output
    )
    assert "FROM" in result.output


def test_info_as_json(penstock, tmp_path):
    (tmp_path / "t.csv").write_text(AZURE)
    found = json.loads(penstock("trace", "info", "t.csv", "--json").output)
    assert (found["format"], found["rows"], found["requests"], found["unanswered"]) == ("azure", 60, 40, 20)
    assert (found["skipped"], found["errors"], found["bound"]) == (0, [], None)
    assert found["span_s"] == 58.0
    assert found["isl"]["max"] == 159.0
    assert sum(window["requests"] for window in found["windows"]) == 40


def test_info_counts_what_it_leaves_out(penstock, tmp_path):
    (tmp_path / "t.csv").write_text(AZURE + "soon,1,1\n2024-05-10 00:01:00,many,1\n")
    result = penstock("trace", "info", "t.csv")
    assert result.exit_code == 2
    assert "penstock: t.csv line 62, field TIMESTAMP: a moment such as" in result.output
    result = penstock("trace", "info", "t.csv", "--skip-bad")
    assert result.exit_code == 0
    assert "Left out: 20 requests without an answer" in result.output
    assert "Left out: 2 bad rows, such as:\n  t.csv line 62, field TIMESTAMP" in result.output
    assert "says nothing of shared prefixes" in result.output
    found = json.loads(penstock("trace", "info", "t.csv", "--skip-bad", "--json").output)
    assert found["skipped"] == 2
    assert len(found["errors"]) == 2


def test_a_file_without_requests_has_little_to_say(penstock, tmp_path):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    result = penstock("trace", "info", "t.csv")
    assert (result.exit_code, result.output) == (0, "t.csv: azure, 0 rows, 0 requests.\n")


def test_a_format_can_be_said_and_else_is_looked_for(penstock, tmp_path):
    (tmp_path / "t.txt").write_text("hello\n")
    result = penstock("trace", "info", "t.txt")
    assert result.exit_code == 2
    assert "t.txt looks like none of the formats mooncake, azure, burstgpt, dynamo, records" in result.output
    result = penstock("trace", "info", "t.txt", "--format", "mooncake")
    assert result.exit_code == 2
    assert "t.txt line 1, field (whole row): not JSON" in result.output


def test_packed_traces_are_unpacked_and_a_cut_one_is_named(penstock, tmp_path):
    packed = gzip.compress(rows(500).encode(), mtime=0)
    (tmp_path / "t.jsonl.gz").write_bytes(packed)
    assert "500 requests" in penstock("trace", "info", "t.jsonl.gz").output
    (tmp_path / "t.jsonl.gz").write_bytes(packed[:-50])
    result = penstock("trace", "info", "t.jsonl.gz")
    assert result.exit_code == 2
    assert "t.jsonl.gz can't be unpacked: " in result.output
    (tmp_path / "t.jsonl.gz").write_bytes(b"plain")
    assert "t.jsonl.gz can't be read: " in penstock("trace", "info", "t.jsonl.gz").output


def test_convert_to_mooncake_and_back_from_records(penstock, tmp_path):
    (tmp_path / "t.csv").write_text(AZURE)
    result = penstock("trace", "convert", "t.csv", "t.jsonl")
    assert result.exit_code == 0
    assert "Left out: 20 requests without an answer" in result.output
    assert "Wrote 40 requests over 58.0 s, 0.67 per second to t.jsonl (mooncake)." in result.output
    found = read("t.jsonl")
    assert [(each.isl, each.osl) for each in found] == [(100 + n, n % 3) for n in range(60) if n % 3]
    assert [each.hash_ids for each in found] == [[n] for n in range(40)]
    assert penstock("trace", "convert", "t.jsonl", "r.jsonl", "--to", "records").exit_code == 0
    assert penstock("trace", "convert", "r.jsonl", "again.jsonl").exit_code == 0
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "t.jsonl").read_text()


def test_slice_takes_a_part_whose_times_count_from_its_start(penstock, tmp_path):
    (tmp_path / "t.jsonl").write_text(rows(10))
    result = penstock("trace", "slice", "t.jsonl", "p.jsonl", "--start", "3s", "--end", "9", "--spread-ties")
    assert result.exit_code == 0
    assert [each.at for each in read("p.jsonl")] == [0.0, 1.5, 3.0, 3.0]
    assert penstock("trace", "slice", "t.jsonl", "p.jsonl", "--count", "3").exit_code == 0
    assert [each.at for each in read("p.jsonl")] == [0.0, 0.0, 3.0]
    result = penstock("trace", "slice", "t.jsonl", "p.jsonl", "--start", "1h")
    assert result.exit_code == 2
    assert "no request is left to write to p.jsonl" in result.output
    assert len(read("p.jsonl")) == 3  # what was there stays


def test_scale_by_a_factor_or_to_a_rate(penstock, tmp_path):
    (tmp_path / "t.jsonl").write_text(rows(10, session_id="s", delay=1000))
    assert penstock("trace", "scale", "t.jsonl", "f.jsonl", "--rate-factor", "4").exit_code == 0
    found = read("f.jsonl")
    assert (found[0].think, found[-1].at, found[-1].think) == (None, 3.0, 0.25)
    result = penstock("trace", "scale", "t.jsonl", "f.jsonl", "--target-rate", "90/min")
    assert "9.0" not in result.output
    assert read("f.jsonl")[-1].at == 6.0  # 9 gaps at 1.5 per second
    for flags in ([], ["--rate-factor", "2", "--target-rate", "3"], ["--target-rate", "0"], ["--rate-factor", "0"]):
        result = penstock("trace", "scale", "t.jsonl", "x.jsonl", *flags)
        assert result.exit_code == 2
    assert not (tmp_path / "x.jsonl").exists()
    (tmp_path / "once.jsonl").write_text(rows(2))
    result = penstock("trace", "scale", "once.jsonl", "x.jsonl", "--target-rate", "3")
    assert "all its requests come at once" in result.output


def test_a_trace_can_be_written_over_itself(penstock, tmp_path):
    (tmp_path / "t.jsonl").write_text(rows(10))
    assert penstock("trace", "scale", "t.jsonl", "t.jsonl", "--rate-factor", "2").exit_code == 0
    assert [each.at for each in read("t.jsonl")][-1] == 6.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl"]


def test_a_bad_row_in_the_middle_leaves_nothing_half_written(penstock, tmp_path):
    (tmp_path / "t.jsonl").write_text(rows(3000) + "{\n" + rows(1))
    (tmp_path / "o.jsonl").write_text("precious")
    for words in (
        ["convert"],
        ["slice", "--end", "5s"],
        ["scale", "--rate-factor", "2"],
        ["scale", "--target-rate", "2"],
    ):
        result = penstock("trace", words[0], "t.jsonl", "o.jsonl", *words[1:])
        assert result.exit_code == 2
        assert "t.jsonl line 3001, field (whole row): not JSON" in result.output
    assert (tmp_path / "o.jsonl").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.jsonl", "t.jsonl"]


def test_rows_out_of_order_are_sliced_by_their_times(penstock, tmp_path):
    text = rows(10).splitlines()
    (tmp_path / "t.jsonl").write_text("\n".join(text[::-1]))
    assert penstock("trace", "slice", "t.jsonl", "p.jsonl", "--start", "3s", "--count", "3").exit_code == 0
    assert [each.at for each in read("p.jsonl")] == [0.0, 0.0, 3.0]
    found = json.loads(penstock("trace", "info", "t.jsonl", "--json").output)
    assert found["bound"] == 0.45
    assert penstock("trace", "scale", "t.jsonl", "p.jsonl", "--target-rate", "1.5").exit_code == 0
    assert [read("p.jsonl")[0].at, read("p.jsonl")[-1].at] == [0.0, 6.0]


def test_a_place_that_can_not_be_written_is_named(penstock, tmp_path):
    (tmp_path / "t.jsonl").write_text(rows(2))
    result = penstock("trace", "convert", "t.jsonl", "no/where.jsonl")
    assert result.exit_code == 2
    assert "no/where.jsonl can't be written: No such file or directory" in result.output


@pytest.mark.parametrize("packed", [True, False])
def test_an_archive_of_rates_is_told_and_drawn_from(penstock, tmp_path, packed):
    if packed:
        archive(tmp_path / "m", MEMBERS)
    else:
        (tmp_path / "m" / "deep").mkdir(parents=True)
        for name, text in MEMBERS.items():
            (tmp_path / "m" / "deep" / name).write_text(text)
    found = json.loads(penstock("trace", "info", "m", "--json").output)
    assert (found["format"], found["clients"], found["clients_with_lengths"]) == ("servegen", 2, 1)
    assert (found["span_s"], found["expected_requests"], found["peak_per_s"]) == (1200.0, 4200.0, 5.0)
    assert "2 clients (1 with lengths) over 20 min: about 4,200 requests" in penstock("trace", "info", "m").output
    assert "say with --end" in penstock("trace", "convert", "m", "o.jsonl").output
    flags = ("--start", "10m", "--end", "20m", "--seed", "3")
    assert penstock("trace", "convert", "m", "o.jsonl", *flags).exit_code == 0
    drawn = read("o.jsonl")
    assert len(drawn) == pytest.approx(3000, abs=400)
    assert {(each.isl, each.osl) for each in drawn} == {(7, 3)}
    assert {each.kind for each in drawn} == {"chunk-9", "chunk-10"}
    first = (tmp_path / "o.jsonl").read_bytes()
    assert penstock("trace", "convert", "m", "o.jsonl", *flags).exit_code == 0
    assert (tmp_path / "o.jsonl").read_bytes() == first
    assert penstock("trace", "convert", "m", "o.jsonl", *flags[:4], "--target-rate", "50").exit_code == 0
    assert len(read("o.jsonl")) == pytest.approx(30_000, rel=0.1)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"README.md": ""}, "m.tar has no chunk-N-trace.csv"),
        ({"chunk-1-dataset.json": "{}"}, "m.tar: chunk-1-trace.csv is not there"),
        ({"chunk-1-trace.csv": "0,1,1,Gamma,1\n"}, "m.tar: chunk-1-trace.csv line 1, field (whole row)"),
        ({**MEMBERS, "chunk-9-dataset.json": "[]"}, "m.tar: chunk-9-dataset.json: Expected `object`"),
    ],
)
def test_what_is_wrong_with_an_archive_is_named(penstock, tmp_path, members, said):
    archive(tmp_path / "m.tar", members)
    result = penstock("trace", "info", "m.tar")
    assert result.exit_code == 2
    assert said in result.output


def test_bad_rows_of_an_archive_can_be_skipped(penstock, tmp_path):
    archive(tmp_path / "m.tar", {**MEMBERS, "chunk-9-trace.csv": "x\n0,1,1,Gamma,1,1\n"})
    result = penstock("trace", "info", "m.tar", "--skip-bad")
    assert result.exit_code == 0
    assert "Left out: 1 bad row, such as:" in result.output
    result = penstock("trace", "convert", "m.tar", "o.jsonl", "--end", "1m", "--skip-bad")
    assert result.exit_code == 0
    assert "chunk-9-trace.csv line 1" in result.output
    result = penstock("trace", "convert", "m.tar", "o.jsonl", "--start", "1h", "--end", "2h", "--skip-bad")
    assert "has no request between second 3600 and 7200" in result.output


def test_what_is_an_archives_alone_is_refused_for_a_trace(penstock, tmp_path):
    (tmp_path / "t.jsonl").write_text(rows(2))
    result = penstock("trace", "convert", "t.jsonl", "o.jsonl", "--end", "1m")
    assert result.exit_code == 2
    assert "are of archives" in result.output


@pytest.mark.slow
def test_the_public_archive_is_read_whole(penstock, traces):
    found = json.loads(penstock("trace", "info", str(traces / "servegen" / "m-large.tar.xz"), "--json").output)
    assert (found["clients"], found["clients_with_lengths"], found["span_s"]) == (162, 12, 14 * 86_400.0)
    assert found["requests_per_s"] == pytest.approx(195.8, abs=0.1)


CHATS = [
    {
        "id": f"c{number}",
        "conversations": [{"from": "human", "value": "why " * 50}, {"from": "gpt", "value": "so " * 40}],
    }
    for number in range(30)
]


def test_a_trace_without_times_gets_them_by_a_rate_and_never_by_itself(penstock, tmp_path):
    (tmp_path / "chats.json").write_text(json.dumps(CHATS, indent=2))
    result = penstock("trace", "info", "chats.json")
    assert result.output.startswith("chats.json: sharegpt, 30 rows, 30 requests.\nIt says no times:")
    assert "Note: lengths are estimated from the text, 4 letters to the token." in result.output
    for words in (["convert", "chats.json", "o.jsonl"], ["slice", "chats.json", "o.jsonl"]):
        result = penstock("trace", *words)
        assert result.exit_code == 2 and "has no times" in result.output and "--target-rate" in result.output
        assert not (tmp_path / "o.jsonl").exists()
    result = penstock("trace", "convert", "chats.json", "o.jsonl", "--target-rate", "2", "--seed", "3")
    assert result.exit_code == 0 and "Note: lengths are estimated" in result.output
    found = read("o.jsonl")
    assert 29 / found[-1].at == pytest.approx(2.0, rel=0.5) and {each.isl for each in found} == {50}
    assert {each.session for each in found} == {chat["id"] for chat in CHATS}


def test_a_unit_that_was_concluded_is_said_and_one_that_can_not_be_is_asked_for(penstock, tmp_path):
    head = "timestamp,prompt_tokens,completion_tokens\n"
    (tmp_path / "s.csv").write_text(head + "".join(f"{n * 0.37:.2f},900,50\n" for n in range(40)))
    result = penstock("trace", "info", "s.csv")
    assert "Note: times are read as seconds, since in milliseconds they are 2,703 requests/s" in result.output
    (tmp_path / "open.csv").write_text(head + "".join(f"{n * 370},900,50\n" for n in range(40)))
    result = penstock("trace", "info", "open.csv")
    assert result.exit_code == 2 and "--trace-time-unit s or ms" in result.output
    result = penstock("trace", "convert", "open.csv", "o.jsonl", "--trace-time-unit", "ms")
    assert "over 14.4 s, 2.70 per second" in result.output
    assert "40 requests over 14.4 s" in penstock("trace", "info", "o.jsonl").output


def test_columns_are_named_by_a_flag_which_is_checked(penstock, tmp_path):
    (tmp_path / "t.csv").write_text("when_ms,in,out\n5,10,3\n1005,20,4\n")
    columns = "at=when_ms,prompt=in,answer=out"
    assert "csv, 2 rows, 2 requests over 1.0 s" in penstock("trace", "info", "t.csv", "--trace-columns", columns).output
    result = penstock("trace", "info", "t.csv", "--trace-columns", "when=when_ms")
    assert result.exit_code == 2 and "'when=when_ms' names no column (WHAT=NAME, of at, end, lasted" in result.output
