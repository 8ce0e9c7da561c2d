"""status, top, explain and chat against a fake cluster: what they ask, print, and give a script."""

import json
import os
import pty
import subprocess
import sys
import termios

import pytest

from penstock.cli.shared.live_screen import requests_per_second
from penstock.cli.shared.output import WALL_KEYS, seconds_text, table, walled
from penstock.router.status_rows import StatusCounts
from tests.cli.conftest import worker
from tests.live.cluster import until


def test_status_shows_models_workers_and_counts(penstock, cluster):
    result = penstock("status", "--url", cluster.url)
    assert result.exit_code == 0
    for part in ("test at", "kv routing", "main-0", "main-1", "hit rate 50.0 %", "7 ok", "70 of 1,000", "No findings"):
        assert part in " ".join(result.output.split())
    assert cluster.asked == [("/admin/status", None)]


def test_an_engine_that_is_down_has_a_row_and_is_counted(penstock, cluster, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    replicas = [{"id": f"main-{n}", "state": "ready"} for n in range(2)]
    replicas.append({"id": "main-2", "state": "failed", "reason": "main-2 ended with status 1 at its start"})
    pool = {"model": "sim", "desired": 4, "replicas": replicas, "name": "main", "kind": "process", "revision": None}
    cluster.status["pools"] = [{**pool, "ready": 2}]
    text = " ".join(penstock("status", "--url", cluster.url).output.split())
    assert "sim 2 of 4" in text
    assert "main-2 failed (main-2 ended" in text


def test_a_pipe_gets_whole_lines(penstock, cluster):
    reason = "its streams have been silent for 12 s, where 40 ms between two tokens are usual; it is asked every second"
    cluster.status["workers"] = [worker("main-0", state="cordoned", why_not=reason)]
    assert f"cordoned ({reason})" in penstock("status", "--url", cluster.url).output


def test_a_long_reason_is_cut_in_its_cell_and_said_below(penstock, cluster, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "its streams have been silent for 12 s, where 40 ms between two tokens are usual; it is asked every second"
    cluster.status["workers"] = [worker("main-0", state="cordoned", why_not=reason), worker("main-1")]
    output = penstock("status", "--url", cluster.url).output
    assert not [line for line in output.splitlines() if len(line) > 80]
    assert f"main-0: cordoned ({reason})" in " ".join(output.split())


def test_what_is_unknown_is_a_dash_and_not_zero(penstock, cluster):
    cluster.status |= {"workers": [worker("main-0", kv_events=None)], "hit_rate": None}
    result = penstock("status", "--url", cluster.url)
    assert result.exit_code == 0
    assert "hit rate -" in " ".join(result.output.split())


def test_findings_come_with_their_next_step(penstock, cluster):
    cluster.status["findings"] = [{"level": "warning", "text": "no events", "hint": "switch them on"}]
    assert "warning: no events (switch them on)" in penstock("status", "--url", cluster.url).output


def test_adapters_that_are_wanted_on_some_workers_are_shown_with_what_is_there(penstock, cluster):
    text = " ".join(penstock("status", "--url", cluster.url).output.split())
    assert "sql of tiny: 2 workers wanted, 1 there (main-0); main-1 has no room for adapter sql" in text


def test_status_as_json_has_stable_keys_and_measured_times_under_wall(penstock, cluster):
    result = penstock("status", "--json", "--url", cluster.url)
    found = json.loads(result.output)
    assert result.output == json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    assert list(found) == ["wall_uptime_s" if key == "uptime" else key for key in cluster.status]
    assert found["wall_uptime_s"] == 61.0
    assert found["workers"][0]["wall_since_s"] == 12.5
    assert found["loop"]["wall_longest_s"] == 0.01
    assert not WALL_KEYS.keys() & found["workers"][0].keys()


def test_status_shows_the_shares_of_names_and_what_became_of_copies(penstock, cluster):
    text = " ".join(penstock("status", "--wide", "--url", cluster.url).output.split())
    assert "chat: sim 95.0 % (1,900 requests), new 5.0 % (100 requests)" in text
    assert "copies of 10.0 % to new: 3 same, 1 different, 2 skipped; 250 ms on average, against 500 ms" in text


def test_status_lists_the_newest_programs_with_their_sub_agents(penstock, cluster, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    program = {
        "model": "sim",
        "failed": 1,
        "prompt_tokens": 12_000,
        "counted_tokens": 10_000,
        "cached_tokens": 8_000,
        "output_tokens": 900,
        "sessions": ["a", "b"],
        "workers": {"main-1": 3, "main-0": 1},
        "last": 1.0,
    }
    cluster.status["programs"] = [{"name": f"build-{n}", "requests": 4 + n, **program} for n in range(7)]
    lines = penstock("status", "--url", cluster.url).output.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("PROGRAM"))
    row = " ".join(lines[at + 1].split())
    assert row == "build-0 2 4 1 12,000 900 80.0 % main-1 (3), main-0 (1)"
    assert [line.split()[0] for line in lines[at + 1 : at + 6]] == [f"build-{n}" for n in range(5)]
    assert lines[at + 6] == "2 more: penstock status --wide."
    wide = penstock("status", "--wide", "--url", cluster.url).output
    assert "build-6" in wide and "more:" not in wide


def test_the_admin_key_is_sent_and_a_wrong_one_is_told(penstock, cluster):
    cluster.key = "secret"
    result = penstock("status", "--url", cluster.url)
    assert result.exit_code == 1
    assert "refused the key" in result.output
    assert "PENSTOCK_ADMIN_KEY" in result.output
    assert penstock("status", "--url", cluster.url, "--admin-key", "secret").exit_code == 0
    assert penstock("status", env={"PENSTOCK_URL": cluster.url, "PENSTOCK_ADMIN_KEY": "secret"}).exit_code == 0


def test_another_server_at_the_url_is_told_as_such(penstock, cluster):
    result = penstock("status", "--url", f"{cluster.url}/other")
    assert result.exit_code == 1
    assert "does not answer as a Penstock cluster does" in result.output


def test_the_url_may_end_in_v1(penstock, cluster):
    assert penstock("status", "--url", f"{cluster.url}/v1/").exit_code == 0


def test_explain_shows_the_candidates_with_the_chosen_one_first(penstock, cluster):
    result = penstock("explain", "r-1", "--url", cluster.url)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    rows = [line for line in lines if "main-0" in line or "main-1" in line or "main-2" in line]
    assert "went to main-1 by kv: it holds 1 of 4 blocks" in rows[0]
    assert rows[1].startswith("*")
    assert "main-1" in rows[1]
    assert "main-0" in rows[2]
    assert "excluded: main-2 breaker is open" in rows[3]
    assert "first token after 250 ms" in result.output
    assert "its prompt went to the engine as it was: it asks for several answers" in result.output.splitlines()
    assert penstock("explain", "request", "r-1", "--url", cluster.url).output == result.output


def test_explain_as_json_has_measured_times_under_wall(penstock, cluster):
    found = json.loads(penstock("explain", "r-1", "--json", "--url", cluster.url).output)
    assert list(found) == ["request", "decisions"]
    assert found["request"]["wall_first_ns"] == 4_250_000_000
    assert found["decisions"][0]["wall_at_ns"] == 5_000_000_000
    assert found["decisions"][0]["candidates"][1]["overlap_blocks"] == 1


def test_an_unknown_request_is_told_with_the_servers_hint(penstock, cluster):
    result = penstock("explain", "a/b c", "--url", cluster.url)
    assert result.exit_code == 1
    assert "no request x is known (the newest 4096 are kept)" in result.output
    assert cluster.asked[-1][0] == "/admin/explain/a%2Fb%20c"


def test_explain_without_an_id_lists_the_newest(penstock, cluster):
    result = penstock("explain", "--limit", "3", "--url", cluster.url)
    assert "r-1" in result.output
    assert "main-1" in result.output
    assert cluster.asked[-1][0] == "/admin/requests?limit=3"


def test_explain_fits_80_columns_and_names_what_it_leaves_out(penstock, cluster, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["r-1"], []):
        output = penstock("explain", *words, "--url", cluster.url).output
        assert not [line for line in output.splitlines() if len(line) > 80], output
    output = penstock("explain", "r-1", "--url", cluster.url).output
    heading = next(line for line in output.splitlines() if "COST" in line)
    assert "OVERLAP BLOCKS" in heading and "TRANSFER" not in heading, "what tells the candidates apart stays"
    assert "--wide shows also: " in output and "transfer" in output
    assert "TRANSFER" in penstock("explain", "r-1", "--wide", "--url", cluster.url).output


def test_colours_are_for_terminals_that_want_them(penstock, cluster):
    cluster.status["findings"] = [{"level": "warning", "text": "no events", "hint": "switch them on"}]
    assert "\x1b" not in penstock("status", "--url", cluster.url).output
    assert "\x1b[33mwarning" in on_terminal("status", "--url", cluster.url)
    assert "\x1b[33m" not in on_terminal("status", "--url", cluster.url, NO_COLOR="1")


def on_terminal(*words, **env):
    """Return what a command writes to a terminal."""
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "penstock", *words]
    process = subprocess.Popen(command, stdout=terminal, env={**os.environ, **env})
    os.close(terminal)
    written = b""
    try:
        while data := os.read(main, 1 << 16):
            written += data
    except OSError:
        pass  # the other end is closed: it has ended
    finally:
        os.close(main)
    assert process.wait(20) == 0
    return written.decode()


def test_top_draws_the_status_and_ends_after_its_looks(penstock, cluster, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = penstock("top", "--looks", "2", "--every", "0.1", "--url", cluster.url)
    assert result.exit_code == 0
    assert "main-0" in result.output
    assert len(cluster.asked) == 2
    assert "; 0.0 requests end per second" in " ".join(result.output.split()) and "hit; " not in result.output


def crowded(status):
    """A cluster of long names and large numbers, in which much has gone wrong."""
    name = "meta-llama-Llama-3.1-70B-Instruct-FP8-dynamic"
    big = {"requests": 1_234_567, "failures": 4321, "restarts": 12, "active_requests": 256, "kv_blocks": 16_384}
    crash = {"name": f"{name}-0", "kind": "engine", "count": 12, "reason": "was killed by SIGKILL", "at": 0.0}
    status["models"] = [{**status["models"][0], "name": name, "tokenizer": "/models/" + name, "inflight": 1024}]
    status["workers"] = [
        worker(f"{name}-{n}", **big, active_blocks=16_000, why_not="breaker is open", breaker="open", state="ready")
        for n in range(3)
    ]
    status["crashes"] = [{**crash, "name": f"{name}-{n}"} for n in range(7)]
    text = f"{name}-0 was killed by SIGKILL at 12:00:00 UTC, for the 12th time; it was started again"
    status["findings"] = [{"level": "warning", "text": text, "hint": f"see logs/{name}-0.log in the run folder"}]


@pytest.mark.parametrize("words", [["status"], ["top", "--looks", "1"]])
def test_status_and_top_fit_80_columns(penstock, cluster, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    crowded(cluster.status)
    result = penstock(*words, "--url", cluster.url)
    assert result.exit_code == 0, result.output
    too_long = [line for line in result.output.splitlines() if len(line) > 80]
    assert not too_long
    said = " ".join(result.output.split())
    for part in (
        "TTFT p50 250 ms",
        "ITL p50 5.1 ms",
        "RESTARTS",
        "12 times",
        "it was killed by SIGKILL",
        "2 processes",
    ):
        assert part in said, part


def test_a_cordoned_worker_is_called_so_once(penstock, cluster):
    cluster.status["workers"] = [worker("main-0", state="cordoned", why_not="is cordoned: 2 canaries brought no token")]
    result = penstock("status", "--url", cluster.url)
    assert "cordoned (2 canaries brought no token)" in " ".join(result.output.split())


def test_a_wide_status_has_every_column(penstock, cluster, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    crowded(cluster.status)
    result = penstock("status", "--wide", "--url", cluster.url)
    for part in ("TOKENIZER", "URL", "KV EVENTS", "meta-llama-Llama-3.1-70B-Instruct-FP8-dynamic-2"):
        assert part in result.output


@pytest.mark.parametrize("watching", [["top", "--every", "60"], ["status", "--watch"]])
def test_q_leaves_top_and_the_terminal_is_as_it_was(cluster, watching):
    main, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    words = [sys.executable, "-m", "penstock", *watching, "--url", cluster.url]
    process = subprocess.Popen(words, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        until(lambda: termios.tcgetattr(terminal) != before, 20)  # it hears single keys by now
        os.write(main, b"xq")
        assert process.wait(20) == 0, process.stdout.read()
        assert termios.tcgetattr(terminal) == before
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(main)
        os.close(terminal)


def test_requests_per_second_is_unknown_after_a_restart():
    before, after = StatusCounts(ok=5), StatusCounts(ok=9, failed=1)
    assert requests_per_second(before, after, 2.0) == 2.5
    assert requests_per_second(after, before, 2.0) is None


def test_chat_prints_the_answer_and_where_it_came_from(penstock, cluster):
    result = penstock("chat", "Good", "day", "--url", cluster.url, "--system", "Be brief.")
    assert result.exit_code == 0
    assert result.stdout.startswith("Hello")
    assert "main-1; 5 prompt tokens (3 cached), 2 new" in result.stderr
    assert "penstock explain r-1" in result.stderr
    path, body = cluster.asked[-1]
    assert path == "/v1/chat/completions"
    assert body["model"] == "sim"
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Good day"}]


def test_chat_as_json(penstock, cluster):
    found = json.loads(penstock("chat", "Hi", "--json", "--url", cluster.url).stdout)
    keys = ["model", "text", "finish_reason", "usage", "request_id", "worker", "wall_ttft_s", "wall_took_s"]
    assert list(found) == keys
    assert (found["text"], found["worker"], found["finish_reason"]) == ("Hello", "main-1", "stop")


def test_chat_reads_standard_input(penstock, cluster):
    penstock("chat", "-", "--url", cluster.url, input="from a pipe")
    assert cluster.asked[-1][1]["messages"][-1]["content"] == "from a pipe"


def test_a_conversation_keeps_its_turns_until_reset(penstock, cluster):
    result = penstock("chat", "--url", cluster.url, input="one\n\ntwo\n/what\n/reset\nthree\n/quit\nfour\n")
    assert result.exit_code == 0
    sent = [body["messages"] for path, body in cluster.asked if path.startswith("/v1/chat")]
    assert [[m["content"] for m in messages] for messages in sent] == [
        ["one"],
        ["one", "Hello", "two"],
        ["three"],
    ]


def test_a_failed_turn_does_not_end_the_conversation(penstock, cluster):
    cluster.chat_error = (503, {"error": {"message": "the queue is full"}})
    result = penstock("chat", "--url", cluster.url, "--model", "sim", input="one\ntwo\n")
    assert result.exit_code == 0
    assert result.output.count("the queue is full") == 2


def test_an_error_of_the_server_is_its_sentence(penstock, cluster):
    cluster.chat_error = (404, {"error": {"message": "no model nope; known: sim"}})
    result = penstock("chat", "Hi", "--model", "nope", "--url", cluster.url)
    assert result.exit_code == 1
    assert "no model nope; known: sim" in result.output


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.25, "250 ms"), (5.0, "5.0 s"), (600.0, "10 min"), (7200.0, "2.0 h")]
)
def test_lengths_of_time_read_well(seconds, text):
    assert seconds_text(seconds) == text


def test_a_table_aligns_numbers_to_the_right():
    assert table(("A", "N"), [["x", 5], ["long", 1000]]) == "A         N\nx         5\nlong  1,000"
    assert table(("A",), []) == "A"


def test_only_numbers_are_renamed_to_wall():
    assert walled({"first": 3, "closed": "closed", "last": None, "at": True}) == {
        "wall_first_ns": 3,
        "closed": "closed",
        "wall_last_ns": None,
        "wall_at_ns": True,
    }
