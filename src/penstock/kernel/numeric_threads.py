"""Limits numeric libraries to one thread: our matrices are small, and threads that wait spin on a core.

On a busy machine with two cores an ARIMA fit was measured to take 40 times as long with a thread for each core.
"""

from collections.abc import Mapping

ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment for numpy and what builds on it, which read it when imported. A user's own value goes before."""
