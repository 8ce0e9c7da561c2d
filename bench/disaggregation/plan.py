"""What is measured? Hardware, traffic, layouts, service levels and loads, all fixed before the first run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from penstock.kernel.values import Role

WORKERS = 8
"""Each of one GPU, or of as many as the model is split over: the same number in every layout."""
BLOCK = 64
GPU = "h100"
MAX_LEN = 131_072
"""Longer requests are left out, as the model's own limit would."""
SEEDS = (1, 2, 3)
SECONDS, LEAST, MOST = 20.0, 300, 1_200
"""Of arrivals in each run; but so many requests at least, which at the lowest loads take minutes, and at most."""
GIVEN_UP = 0.2
"""A layout that keeps less than this share in SLO by the loosest pair is not run under heavier load."""
HELD = 0.9
"""Share in SLO up to which a load counts as held."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on so many GPUs; ``config`` is what its config.json says, as far as time depends on it."""

    name: str
    tensor_parallel_size: int
    config: Mapping[str, Any]


_LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMALL = Model(
    "Llama-3.1-8B",
    1,
    {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
)
LARGE = Model(
    "Llama-3.1-70B",
    4,
    {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
)


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of traffic on one model.

    Args:
        trace: name of a file in the traces' folder; None where the requests are our own.
        rates: requests per second of the eight workers, from light to more than any layout can do.
        ttft, itl: service levels in seconds, each from tight to loose; every pair is judged.
    """

    name: str
    model: Model
    rates: Sequence[float]
    ttft: Sequence[float]
    itl: Sequence[float]
    trace: str | None = None

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Every TTFT with every ITL; the last is the loosest."""
        return list(product(self.ttft, self.itl))

    def count(self, rate: float) -> int:
        """Return how many requests a run at this load has."""
        return max(LEAST, min(MOST, round(rate * SECONDS)))


ITL = (0.008, 0.010, 0.015, 0.030)
WORKS = (
    Work("long prompts", SMALL, (8, 12, 16, 24), (0.5, 1.0, 3.0), ITL),
    Work("long answers", SMALL, (40, 80, 120, 160), (0.1, 0.3, 1.0), ITL),
    Work("agent", SMALL, (20, 30, 40, 60), (0.3, 1.0, 3.0), ITL),
    Work("conversation", SMALL, (2, 4, 6, 8), (1.0, 3.0, 10.0), ITL, trace="mooncake_conversation_first6000.jsonl"),
    Work("synthetic", SMALL, (4, 6, 8, 12), (1.0, 3.0, 10.0), ITL, trace="mooncake_synthetic_trace.jsonl"),
    Work("azure", SMALL, (40, 80, 120, 160), (0.15, 0.5, 2.0), ITL, trace="azure_llm_2023_conv.csv"),
    Work("long prompts, 70B", LARGE, (4, 6, 8, 12), (1.0, 2.0, 6.0), (0.016, 0.020, 0.030, 0.060)),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the workers are divided: role -> how many. ``chunk``: most tokens of one pass of the aggregated ones."""

    workers: Mapping[Role, int]
    chunk: int = 8192
    conditional: str = "off"
    slo: tuple[float, float] | None = None
    """TTFT and ITL that the router weighs, in seconds; None leaves its rule to tokens."""
    link: float = 1.0
    """The network's rate, as a multiple of the GPU's data sheet."""
    whole: bool = False
    """Prompts are not split over passes, as in engines from before chunked prefill."""

    @property
    def family(self) -> str:
        if "prefill" not in self.workers:
            return "aggregated"
        return "mix" if "aggregated" in self.workers else "split"

    @property
    def name(self) -> str:
        if self.family == "aggregated":
            return "whole prompts" if self.whole else f"chunk {self.chunk}"
        letters = {"prefill": "P", "decode": "D", "aggregated": "A"}
        return "".join(f"{count}{letters[role]}" for role, count in self.workers.items())


WHOLE = 16_384
"""Tokens of one pass where prompts are not split. With 8,192, the length at which prompts of the long answers are cut
off, those would wait for a pass without any decoding."""
AGGREGATED = tuple(Layout({"aggregated": WORKERS}, chunk=chunk) for chunk in (512, 2048, 8192))
SPLITS = tuple(Layout({"prefill": count, "decode": WORKERS - count}) for count in range(1, WORKERS))
MIXES = tuple(
    Layout({"prefill": p, "decode": d, "aggregated": WORKERS - p - d}, chunk=2048, conditional="auto")
    for p, d in ((1, 3), (2, 2), (2, 4))
)
LAYOUTS = (*AGGREGATED, *SPLITS, *MIXES)
