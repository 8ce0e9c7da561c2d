"""Encoder timing: how long an image, a video or a sound takes to become embeddings, or to come from where they are.

By arithmetic, not measured: a vision encoder of 675 million parameters (Qwen2-VL's) takes 2 operations per parameter
and patch, and four patches become a token: 5.4 GFLOP, which is 14 us at 40 % of an H100's 989 TFLOP/s.
"""

from penstock.kernel.machine import SECOND
from penstock_lab.engine.settings import EncoderSettings

EMBEDDING_BYTES = 8192
"""Of one token: 4,096 numbers of 2 bytes, as wide as the layers of a model of 8 billion parameters."""
FETCH_BANDWIDTH = 5e9
"""Bytes per second at which an engine reads embeddings from the store of encode workers: a fast disk's rate."""
FETCH_LATENCY = 0.001
"""Seconds that reading one image's embeddings takes besides."""


def encode_time(settings: EncoderSettings, tokens: int) -> float:
    """Return the nanoseconds of encoding what becomes so many tokens."""
    return (settings.overhead + tokens / settings.tokens_per_second) * SECOND


def fetch_time(tokens: int) -> float:
    """Return the nanoseconds of reading so many embeddings from the store that encode workers write."""
    return (FETCH_LATENCY + tokens * EMBEDDING_BYTES / FETCH_BANDWIDTH) * SECOND
