"""The command line as a whole: every help works, is quick, and no error of a user is a traceback."""

import os
import subprocess
import sys
import time

import click
import pytest

from penstock import __version__
from penstock.cli.main import COMMANDS, GROUPS, HIDDEN, cli
from penstock.kernel import simulation
from penstock.kernel.numeric_threads import ONE_THREAD
from tests.conftest import REQUIRED


def every_command() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}

    def walk(group: click.Group, prefix: tuple[str, ...], names: list[str]) -> None:
        for name in names:
            command = group.get_command(click.Context(group), name)
            assert command is not None
            found[" ".join((*prefix, name))] = command
            if isinstance(command, click.Group):
                walk(command, (*prefix, name), command.list_commands(click.Context(command)))

    walk(cli, (), [*COMMANDS, *HIDDEN])
    return found


ALL = every_command()
HELPLESS = ("engine sim", "frontend")
"""Pass --help on to another program."""


def test_every_command_has_help_with_an_example(penstock):
    faults = []
    for name in [name for name in ALL if name not in HELPLESS]:
        result = penstock(*name.split(), "--help")
        _, usage, rest = result.output.partition("Usage: penstock")
        if result.exit_code != 0 or not usage:
            faults.append(f"{name} ends with {result.exit_code}: {result.output[-200:]}")
        elif not ALL[name].hidden and "engine" not in name:
            below = rest.partition("\n")[2]
            if f"penstock {name.split()[0]}" not in below or "Example" not in result.output:
                faults.append(f"{name} shows no example")
    assert not faults, "\n".join(faults)


def test_the_lines_of_the_help_are_those_of_the_commands():
    for name, (_, line) in COMMANDS.items():
        assert ALL[name].short_help == line


def test_the_help_has_every_command_under_one_heading_and_fits_80_columns(penstock):
    named = [name for names in GROUPS.values() for name in names]
    assert sorted(named) == sorted(COMMANDS)
    shown = penstock("--help").output
    assert all(f"{heading}:" in shown for heading in GROUPS)
    assert max(map(len, shown.splitlines())) <= 80


def test_every_option_has_a_help():
    for name, command in ALL.items():
        for param in command.params:
            if isinstance(param, click.Option):
                assert param.help, f"{name} {param.name}"


def test_commands_that_a_script_reads_have_json():
    for name in ("status", "explain", "chat", "bench", "doctor", "config check", "config show"):
        assert any("--json" in param.opts for param in ALL[name].params), name


ASKING = ["adapter", "audit", "cache", "chat", "drain", "explain", "flip", "restart", "scale", "set", "status", "top"]
"""Commands that only ask a cluster: aiohttp alone was more than half of the time of `penstock status`."""


@pytest.mark.parametrize(
    ("lines", "heavy"),
    [
        ([["--help"]], {"msgspec", "numpy", "aiohttp", "yaml", "rich", "zmq", "asyncio"}),
        ([[name, "--help"] for name in ASKING], {"numpy", "aiohttp", "jinja2", "tokenizers"}),
    ],
    ids=["help", "asking"],
)
def test_what_does_not_need_them_imports_no_heavy_libraries(lines, heavy):
    code = (
        f"import sys; from penstock.cli.main import main; status = max(main(line) for line in {lines}); "
        f"found = {heavy} & set(sys.modules); assert not found, found; sys.exit(status)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(("own", "threads"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3")])
def test_a_command_that_computes_has_one_thread_per_process_unless_told_otherwise(own, threads):
    code = (
        "import os, sys; from penstock.cli.main import main; main(['study', 'disaggregation', '--help']); "
        "assert 'numpy' not in sys.modules; sys.exit(os.environ['OPENBLAS_NUM_THREADS'])"
    )
    env = {name: value for name, value in os.environ.items() if name not in ONE_THREAD} | own
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert found.stderr.strip() == threads


def test_the_version_says_whether_the_hot_modules_are_compiled(penstock):
    build = "compiled" if simulation.__file__.endswith(".so") else "pure Python"
    assert penstock("--version").output.startswith(f"penstock {__version__} ({build}, ")
    assert ("compiled" in REQUIRED) == (build == "compiled")  # a suite that is to run compiled does


def test_help_and_version_of_the_module(penstock):
    started = time.monotonic()
    found = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.split()[0]) == (0, "penstock")
    assert time.monotonic() - started < 20  # hangs are found; the time itself is measured in docs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["staus"], "did you mean 'status'?"),
        (["zzzz"], "'penstock --help' lists them"),
        (["status", "--jsn"], "--json"),
        (["up", "--hlep"], "--help"),
        (["up", "--router.mode"], "requires a value"),
        (["up", "a", "b"], "unexpected extra argument"),
        (["explain", "a", "b"], "give one request id"),
        (["status", "--url", "not a url"], "is not a URL"),
        (["status", "--url", "ftp://x"], "is not a URL"),
        (["bench"], "give either --trace FILE or --workload"),
        (["bench", "--workload", "chat", "--duration", "5x"], "has the unknown unit 'x'"),
        (["chat", "--json"], "give the text as an argument"),
        (["join", "--run", "runs/x"], "--run needs --model"),
        (["attach"], "with --selector"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_status_2(penstock, cluster, arguments, said):
    env = {} if "--url" in arguments else {"PENSTOCK_URL": cluster.url}
    result = penstock(*arguments, env=env)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["top"], ["explain", "x"], ["explain"], ["chat", "Hello"], ["join"]],
    ids=lambda a: a[0],
)
def test_nobody_there_is_one_sentence_with_a_next_step(penstock, arguments):
    result = penstock(*arguments, env={"PENSTOCK_URL": "http://127.0.0.1:9"})
    assert result.exit_code == 1
    assert "no cluster answers at http://127.0.0.1:9" in result.output
    assert "'penstock up' starts one" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_reader_that_leaves_is_no_error():
    code = f"{sys.executable} -m penstock config init --all | head -1"
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.startswith("# A Penstock cluster")
    assert found.stderr == ""
