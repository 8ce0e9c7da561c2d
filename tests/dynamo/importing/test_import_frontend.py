"""Tests of the translation of Dynamo's frontend and router options."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.config.reading.load import load
from penstock_dynamo.importing.dynamo_options import import_options
from penstock_dynamo.importing.option_table import ALIASES, FRONTEND, NEGATABLE

COMMAND = """\
python -m dynamo.frontend --http-port 8080 --router-mode kv --kv-overlap-score-weight 2.5 --router-temperature 0.5 \\
  --no-kv-events --router-queue-policy wspt --router-queue-threshold 4 --migration-limit 2 --event-plane zmq \\
  --router-session-affinity-ttl-secs 300 --trust-remote-code --discovery-backend file --router-foo 3
"""
LIST_OPTIONS = """\
import argparse, json
from dynamo.frontend.frontend_args import FrontendArgGroup
parser = argparse.ArgumentParser()
FrontendArgGroup().add_arguments(parser)
found = {o: a.nargs == 0 for a in parser._actions for o in a.option_strings if o.startswith("--")}
print(json.dumps(found))
"""


def test_a_command_line_becomes_settings_that_load(tmp_path: Path) -> None:
    found = import_options(COMMAND)
    assert found.generation == "frontend"
    file = tmp_path / "cluster.yaml"
    file.write_text(found.yaml())
    settings = load(str(file)).settings
    assert (settings.frontend.port, settings.router.mode, settings.router.migration.limit) == (8080, "kv", 2)
    cost, queue = settings.router.cost, settings.router.queue
    assert (cost.prefill_scale, cost.overlap_credit, cost.temperature) == (2.5, 1.0, 0.5)
    assert (queue.policy, queue.threshold, settings.router.index.kind) == ("wspt", 4.0, "approximate")
    assert (settings.router.affinity.mode, settings.router.affinity.ttl) == ("hard", 300.0)
    assert not settings.planner.enabled, "nothing was said of a planner"
    assert {one.option: one.why for one in found.left} == {
        "--trust-remote-code": "no code of a model is run here",
        "--router-foo": "there is no such option of frontend; did you mean router_mode?",
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--kv-overlap-score-weight 0", {"cost": {"overlap_credit": 0.0}, "mode": "round_robin"}),
        ("--load-aware", {"mode": "kv", "index": {"kind": "none"}, "cost": {"overlap_credit": 0.0}}),
        ("--router-kv-events --router-mode direct", {"index": {"kind": "auto"}, "mode": "direct"}),
        ("--no-router-track-active-blocks --router-mode kv", {"cost": {"decode_scale": 0.0}, "mode": "kv"}),
        (
            "--router-mode kv --router-conditional-disagg --router-conditional-disagg-config "
            """'{"eff_isl_threshold": 512, "decode_busy_threshold": 0.5}'""",
            {"mode": "kv", "handoff": {"conditional": "thresholds", "new_tokens_max": 512}},
        ),
        ("--router-mode kv --router-kv-overlap-score-credit-decay 0", {"mode": "kv"}),
        ("--http-port 1", {"mode": "round_robin"}),
        ("--router-mode kv --no-durable-kv-events --router-snapshot-threshold 9", {"mode": "kv"}),
    ],
)
def test_what_is_said_and_what_is_implied(words: str, expected: dict[str, object]) -> None:
    assert import_options(f"python -m dynamo.frontend {words}").settings["router"] == expected


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--router-kv-overlap-score-credit-decay 0.5", "it is fixed at 0 here"),
        ("--router-kv-overlap-score-credit-decay 0", "as here"),
        (
            """--router-conditional-disagg-config '{"eff_isl_ratio_threshold": 0.5}'""",
            "eff_isl_ratio_threshold is fixed at 0.7 here; router.handoff.new_tokens_max is the threshold here",
        ),
    ],
)
def test_a_value_that_is_a_constant_here_is_left_out(words: str, why: str) -> None:
    (one,) = import_options(f"frontend --router-mode kv {words}").left
    assert one.why == why


@pytest.mark.parametrize("flag", ["--durable-kv-events", "--router-durable-kv-events"])
def test_durable_events_are_jetstream(flag: str) -> None:
    found = import_options(f"python -m dynamo.frontend {flag} --router-snapshot-threshold 1000000 --event-plane nats")
    assert found.settings["discovery"] == {"kv_events": "jetstream", "plane": "nats"}
    (threshold,) = found.left
    assert threshold.option == "--router-snapshot-threshold" and "2,000 batches" in threshold.why


def test_a_number_that_our_setting_does_not_take_is_named() -> None:
    (one,) = import_options("frontend --router-mode kv --router-temperature -1").left
    assert one.option == "--router-temperature" and "router.cost.temperature" in one.why


def test_the_command_names_every_option(tmp_path: Path) -> None:
    (tmp_path / "frontend.txt").write_text(COMMAND)
    done = CliRunner().invoke(cli, ["config", "import", str(tmp_path / "frontend.txt"), "--json"])
    told = json.loads(done.stdout)
    assert told["settings"]["router"]["cost"]["temperature"] == 0.5
    assert len(told["options"]) == 13


def test_names_are_consistent() -> None:
    assert set(ALIASES.values()) <= set(FRONTEND)
    assert {ALIASES.get(name, name) for name in NEGATABLE} <= set(FRONTEND)


def test_every_option_of_the_peer_has_a_row() -> None:
    python = Path(os.environ.get("PEERS", "/nonexistent"), "planner", "bin", "python")
    if not python.exists():
        pytest.skip("dynamo: there is no $PEERS/planner/bin/python")
    done = subprocess.run([python, "-c", LIST_OPTIONS], capture_output=True, text=True, check=True)
    for option, switch in json.loads(done.stdout.splitlines()[-1]).items():
        name = option.removeprefix("--").replace("-", "_")
        if name in ("help", "version"):
            continue
        plain = name.removeprefix("no_") if switch else name
        assert ALIASES.get(plain, plain) in FRONTEND, option
        assert (plain in NEGATABLE) == switch, option
