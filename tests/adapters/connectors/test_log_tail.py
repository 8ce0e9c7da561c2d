"""Does the end of an engine's log that is shown have the cause of its end?"""

from pathlib import Path

from penstock.adapters.connectors.shim_client import tail

CORE = "(EngineCore pid=7) ERROR 11-28 16:38:18 [core.py:1750] "
LOG = f"""INFO starting
{CORE}Traceback (most recent call last):
{CORE}  File "x.py", line 1, in f
{CORE}penstock.kernel.errors.ConfigError: m has 2 groups of attention layers (leave the cache out)
(APIServer pid=3) Traceback (most recent call last):
(APIServer pid=3)   File "y.py", line 1, in g
(APIServer pid=3)     raise RuntimeError("Engine core initialization failed. "
(APIServer pid=3)                        "See root cause above.")
(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""


def test_a_cause_that_stands_above_the_last_lines_is_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    assert (
        ": penstock.kernel.errors.ConfigError: m has 2 groups of attention layers (leave the cache out) [...] "
        in tail(tmp_path / "log")
    )


def test_other_logs_show_their_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("1\n2\nValueError: earlier\n4\n5\n6\n7\n")
    assert tail(tmp_path / "log").endswith("log: 4 | 5 | 6 | 7")
    (tmp_path / "log").write_text("See root cause above.")
    assert tail(tmp_path / "log").endswith("log: See root cause above.")
    assert tail(tmp_path / "none").endswith("none: nothing")
