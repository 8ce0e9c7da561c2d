"""The state file: laid out as the field's local connector has it, whole or not at all, one owner at a time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.adapters.connectors.state_file import (
    STALE_AFTER,
    Resources,
    StateEntry,
    StateFile,
    left_behind,
    namespace_of,
    passing_namespace,
    state_folder,
    sweep,
)
from penstock.kernel.errors import ConfigError


def entry(number: int) -> StateEntry:
    resources = Resources(gpus=(number,), port=9000 + number)
    return StateEntry(command=["serve", str(number)], lease=f"lease-{number}", pid=100 + number, resources=resources)


def read(folder: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((folder / "dynamo.json").read_text())
    return found


def test_entries_come_and_go_as_the_field_says(tmp_path):
    state = StateFile.open(tmp_path, "dynamo")
    state.put("VllmWorker", 0, entry(0))
    assert list(read(tmp_path)) == ["dynamo_VllmWorker"]
    state.put("VllmWorker", 1, entry(1))
    state.put("VllmWorker", 2, entry(2))
    assert list(read(tmp_path)) == ["dynamo_VllmWorker", "dynamo_VllmWorker_1", "dynamo_VllmWorker_2"]
    assert read(tmp_path)["dynamo_VllmWorker_1"] == {
        "command": ["serve", "1"],
        "lease": "lease-1",
        "pid": 101,
        "resources": {"gpus": [1], "port": 9001},
    }
    state.remove("VllmWorker", 1)
    state.remove("VllmWorker", 2)
    assert list(read(tmp_path)) == ["dynamo_VllmWorker"]
    state.remove("VllmWorker", 0)
    assert read(tmp_path) == {"dynamo_VllmWorker": {"command": ["serve", "0"]}}, "it knows how to start another"
    state.close()
    assert not list(tmp_path.iterdir()), "nothing is left after a clean end"


def test_how_many_were_wanted_stays_with_the_unsuffixed_entry(tmp_path):
    state = StateFile.open(tmp_path, "dynamo")
    state.record_replicas("w", 3, 2)
    state.put("w", 0, entry(0))
    state.remove("w", 0)
    found = state.entries["dynamo_w"]
    assert (found.replicas, found.configured, found.command) == (3, 2, ["serve", "0"])
    state.close()


OWNER = """
import sys, time
from pathlib import Path
from penstock.adapters.connectors.state_file import StateEntry, StateFile
state = StateFile.open(Path(sys.argv[1]), "dynamo")
state.own(Path("/runs/theirs"))
state.put("w", 0, StateEntry(command=["theirs"], lease="x"))
print("mine", flush=True)
time.sleep(600)
"""


def test_a_live_owner_keeps_it_and_a_killed_one_leaves_it(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == "mine\n"
    with pytest.raises(
        ConfigError, match=rf"process {owner.pid} with the run folder /runs/theirs.*supervise\.namespace"
    ):
        StateFile.open(tmp_path, "dynamo")
    with pytest.raises(ConfigError, match=rf"process {owner.pid} "):
        left_behind(tmp_path, "dynamo")
    assert read(tmp_path)["dynamo_w"]["command"] == ["theirs"], "who was refused changed nothing"
    owner.kill()
    owner.wait()
    assert left_behind(tmp_path, "dynamo")
    state = StateFile.open(tmp_path, "dynamo")
    assert state.before["run"] == "/runs/theirs"
    assert state.entries["dynamo_w"].lease == "x"
    state.close()
    assert left_behind(tmp_path, "dynamo"), "who could not start leaves the engines to the next one"
    state = StateFile.open(tmp_path, "dynamo")
    state.entries.clear()
    state.close()
    assert not left_behind(tmp_path, "dynamo")


def test_namespaces_do_not_touch_each_other(tmp_path):
    one, two = StateFile.open(tmp_path, "dynamo"), StateFile.open(tmp_path, "other")
    one.put("w", 0, entry(0))
    two.put("w", 0, entry(1))
    two.close()
    assert read(tmp_path)["dynamo_w"]["lease"] == "lease-0"
    one.close()


def test_a_reader_sees_a_whole_file_and_a_full_disk_stops_nothing(tmp_path):
    state = StateFile.open(tmp_path, "dynamo")
    state.put("w", 0, entry(0))
    (tmp_path / "dynamo.draft").mkdir()  # nothing can be written in its place
    state.put("w", 1, entry(1))
    assert state.failing and list(read(tmp_path)) == ["dynamo_w"]
    (tmp_path / "dynamo.draft").rmdir()
    state.put("w", 2, entry(2))
    assert not state.failing and list(read(tmp_path)) == ["dynamo_w", "dynamo_w_1", "dynamo_w_2"]
    state.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"dynamo_w": {"command": 3}}', '{"dynamo_w": 1}'])
def test_a_file_that_makes_no_sense_is_as_none(tmp_path, text):
    (tmp_path / "dynamo.json").write_text(text)
    state = StateFile.open(tmp_path, "dynamo")
    assert state.entries == {}
    state.close()


def test_only_this_user_reads_it(tmp_path):
    state = StateFile.open(tmp_path / "state", "dynamo")
    state.put("w", 0, entry(0))
    assert state.path.stat().st_mode & 0o077 == 0
    state.close()


def test_a_folder_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="PENSTOCK_STATE_DIR"):
        StateFile.open(tmp_path / "file" / "state", "dynamo")


def test_where_state_files_stand():
    assert state_folder({"HOME": "/home/u"}) == (Path("/home/u/.local/state/penstock"), False)
    assert state_folder({"HOME": "/home/u", "XDG_STATE_HOME": "/s"}) == (Path("/s/penstock"), False)
    assert state_folder({"HOME": "/h", "DYN_LOCAL_STATE_DIR": "/d"}) == (Path("/d"), True)
    assert state_folder({"PENSTOCK_STATE_DIR": "/p", "DYN_LOCAL_STATE_DIR": "/d"}) == (Path("/p"), True)


def test_what_killed_clusters_on_ports_of_the_systems_choice_left_is_removed_in_time(tmp_path):
    old, young, named = passing_namespace("c", "0" * 8), passing_namespace("c", "1" * 8), namespace_of("c", 8000)
    held = StateFile.open(tmp_path, passing_namespace("c", "2" * 8))
    held.write()
    for name in (old, young, named):
        (tmp_path / f"{name}.json").write_text("{}")
        (tmp_path / f"{name}.lock").write_text("")
    past = time.time() - STALE_AFTER - 1
    for name in (old, named, held.namespace):
        os.utime(tmp_path / f"{name}.lock", (past, past))
    sweep(tmp_path)
    left = {path.stem for path in tmp_path.iterdir()}
    assert left == {young, named, held.namespace}
    held.close()


def test_a_name_of_a_cluster_is_made_fit_for_a_file():
    assert namespace_of("my cluster/1", 8000) == "my-cluster-1-8000"
    assert namespace_of("///", 80) == "penstock-80"
