"""logs and events: the files of a run folder, their last lines, and what is added while they are followed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.events import changes_of, line_of
from penstock.cli.main import main
from penstock.cli.shared.followed_file import last_lines
from penstock.runtime.records.change_log import FILE, Change, change_of
from penstock.runtime.records.run_folder import RunFolder


def ask(*words: str, status: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "penstock", *words], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def change(second: int, key: str, new: object, by: str = "supervisor", old: object = None) -> Change:
    return Change(time=f"2026-01-01T00:00:{second:02d}.000Z", key=key, old=old, new=new, by=by)


def run_with(root: Path, *changes: Change) -> Path:
    folder = RunFolder.create(root, "up")
    writer = folder.writer(FILE)
    for each in changes:
        writer.write(each)
    writer.flush()
    return folder.path


def test_the_last_lines_of_a_log_are_shown_and_an_unknown_name_is_told(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    (run / "logs" / "main-0.log").write_text("".join(f"line {n}\n" for n in range(100)))
    assert ask("logs", "main-0", "--run", str(run), "-n", "2").split("\n")[:2] == ["line 98", "line 99"]
    assert "did you mean main-0?" in ask("logs", "main0", "--run", str(run), status=2)


def test_a_followed_file_may_be_cut_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\nthr")
    lines = last_lines(path, 1, follow=True)
    assert next(lines) == "two"
    with path.open("a") as file:
        file.write("ee\n")
    assert next(lines) == "three", "a line that was being written is not lost"
    path.write_text("new\n")
    assert next(lines) == "new"
    path.replace(tmp_path / "a.1.log")
    path.write_text("of another file, which is longer\n")
    assert next(lines) == "of another file, which is longer"
    assert list(last_lines(tmp_path / "absent.log", 5, follow=False)) == []


def test_events_are_in_words_with_their_times_over_the_runs_of_a_cluster(tmp_path: Path) -> None:
    earlier = [change(1, "start demo-8000", "2 engines"), change(2, "crash main-0", "was killed by SIGKILL")]
    run_with(tmp_path, *earlier)
    run_with(tmp_path, change(3, "start other-8000", "9 engines"))
    mine = [
        change(4, "start demo-8000", "2 engines"),
        change(5, "scale main", 3, "local", 2),
        change(6, "scale main", 4, "planner", 3),
        change(7, "router.queue.wait_max", None, "ops", 5.0),
        change(8, "drain main-1", True, "ops", False),
        change(9, "drained main-1", "after 2.0 s, 1 request finished"),
        change(10, "drain main-1", False, "ops", True),
    ]
    run = run_with(tmp_path, *mine)
    run_with(tmp_path, change(20, "start demo-8000", "1 engine"))
    with (run / FILE).open("a") as file:
        file.write('{"time": "2026-')
    assert changes_of(run) == [*earlier, *mine], "neither another cluster, nor a later run, nor half a line"
    assert ask("events", "--run", str(run), "-n", "8").splitlines() == [
        "2026-01-01 00:00:02Z main-0 was killed by SIGKILL",
        "2026-01-01 00:00:04Z cluster demo-8000 starts: 2 engines",
        "2026-01-01 00:00:05Z pool main: 2 -> 3 replicas, by an operator",
        "2026-01-01 00:00:06Z pool main: 3 -> 4 replicas, by planner",
        "2026-01-01 00:00:07Z router.queue.wait_max: 5.0 -> unset, by ops",
        "2026-01-01 00:00:08Z main-1 is to be drained, by ops",
        "2026-01-01 00:00:09Z main-1 is drained after 2.0 s, 1 request finished",
        "2026-01-01 00:00:10Z main-1 is let in again, by ops",
    ]
    assert json.loads(ask("events", "--run", str(run), "-n", "1", "--json"))[0]["key"] == "drain main-1"
    assert line_of(change_of("stop demo-8000", None, None, "supervisor")).endswith("cluster demo-8000 stops")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell_is_that_of_the_parser(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_PENSTOCK_COMPLETE={shell}_complete" in capsys.readouterr().out
