"""Settings changes of operators in a run: one line of ``changes.jsonl`` in the run folder for each change."""

import time
from typing import Any

FILE = "changes.jsonl"


def line_of(key: str, old: Any, new: Any, by: str) -> dict[str, Any]:
    """Return one line.

    Args:
        key: a knob, or the requested action, such as ``scale main``.
        by: name of the admin key, ``local`` for a caller of this machine without one, or ``SIGHUP``.
    """
    now = time.time()
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    return {"time": text, "key": key, "old": old, "new": new, "by": by}
