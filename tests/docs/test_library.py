"""The names that `penstock` and `penstock_lab` export, and the program of docs/guides/simulate.md that uses them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
import penstock_lab

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "simulate.md"


def test_every_exported_name_leads_to_what_is_called_so() -> None:
    for package in (penstock, penstock_lab):
        for name in package.__all__:
            assert getattr(package, name).__name__ == name
        assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'Fleet'"):
        _ = penstock.Fleet


def test_importing_penstock_loads_nothing_else() -> None:
    names = "sorted(name for name in sys.modules if name.startswith('penstock'))"
    program = f"import sys, penstock, penstock_lab; print(*{names})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["penstock", "penstock_lab"]


def test_the_program_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(import .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {})
    assert re.fullmatch(r"\d+ requests, mean TTFT \d+ ms\n", capsys.readouterr().out)
