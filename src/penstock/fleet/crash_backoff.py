"""Crash back-off: how long any process that crashed waits for its next start."""

RESTART_BACKOFF_MAX = 30.0
"""Longest wait in seconds before a crashed process is started again; one that ran longer waits like a first time."""


def crash_wait(last: float, ran: float, first: float) -> float:
    """Return the seconds to wait: twice the ``last`` wait, or the ``first`` after a start that held.

    Args:
        last: the wait after the crash before; 0 where there was none.
        ran: seconds for which the process worked.
        first: the shortest wait.
    """
    return first if not last or ran > RESTART_BACKOFF_MAX else min(RESTART_BACKOFF_MAX, 2 * last)
