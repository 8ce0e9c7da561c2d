"""The names that `penstock` itself exports, and the program of docs/guides/simulate.md that uses them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "simulate.md"


def test_every_exported_name_leads_to_what_is_called_so() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name).__name__ == name
    assert set(penstock.__all__) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="no attribute 'Fleet'"):
        _ = penstock.Fleet


def test_importing_penstock_loads_nothing_else() -> None:
    program = "import sys, penstock; print(*sorted(name for name in sys.modules if name.startswith('penstock')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["penstock"]


def test_the_program_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(import .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {})
    assert re.fullmatch(r"\d+ requests, mean TTFT \d+ ms\n", capsys.readouterr().out)
