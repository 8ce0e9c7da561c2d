"""docs/concepts/transfer.md: its programs run, and its tables are those of the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_kv.transfer.backends.memcpy_backend import MemcpyBackend
from penstock_kv.transfer.backends.nixl_backend import NixlBackend
from penstock_kv.transfer.backends.nixl_file_backend import NixlFileBackend
from penstock_kv.transfer.backends.shm_backend import ShmBackend
from penstock_kv.transfer.backends.tcp_backend import TcpBackend
from penstock_kv.transfer.transfer_backend import TransferBackend
from penstock_kv.transfer.transfer_status import STATE_CHANGES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "concepts" / "transfer.md").read_text()
BACKENDS: list[type[TransferBackend]] = [MemcpyBackend, ShmBackend, NixlBackend, TcpBackend, NixlFileBackend]


PROGRAMS = list(zip(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S), ("request-7",), strict=True))


@pytest.mark.parametrize(("program", "output"), PROGRAMS, ids=["agents"])
def test_the_programs_of_the_page_run(program: str, output: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout


def test_the_table_of_states_is_that_of_the_code() -> None:
    rows = [f"| {each.before} | {each.trigger} | {each.after} | {each.check} |" for each in STATE_CHANGES]
    assert "\n".join(rows) in PAGE, "the table is:\n" + "\n".join(rows)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_capabilities_of_the_page_are_those_of_the_code(backend: type[TransferBackend]) -> None:
    able = backend.capabilities
    kinds = ", ".join(f"{here} {there}" for here, there in sorted(able.kinds))
    row = f"| {backend.name} | {able.reach} | {kinds} | {'yes' if able.notifications else 'no'} | {able.rank} |"
    assert row in PAGE, row
