"""`RooflineGrid`: passes of many mappings at once: what `penstock.engine.timing.roofline` computes, on arrays.

The costs are the roofline's own (`PassCosts`); only the sum over the parts of a pass is written again, for numpy. A
test holds both sums to be equal.
"""

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace

import numpy as np

from penstock.engine.timing.decode_steps import Array
from penstock.engine.timing.model_shape import ModelShape
from penstock.engine.timing.roofline import PassCosts, Roofline


class RooflineGrid:
    """Passes of one model under several mappings.

    Args:
        rooflines: one for each mapping; they become the first axis of all arrays.
        axes: how many more axes the arrays have.
    """

    def __init__(self, shape: ModelShape, rooflines: Sequence[Roofline], axes: int) -> None:
        def column(values: Sequence[float]) -> Array:
            return np.array(values, dtype=np.float64).reshape(-1, *[1] * axes)

        self._shape = shape
        names = [field.name for field in fields(PassCosts)]
        costs = {name: column([getattr(each.costs, name) for each in rooflines]) for name in names}
        self._costs = SimpleNamespace(**costs)
        self.replicas = column([each.replicas for each in rooflines])

    def seconds(
        self,
        *,
        seqs: Array | float = 0.0,
        kv: Array | float = 0.0,
        prompts: Array | float = 0.0,
        past: Array | float = 0.0,
        new: Array | float = 0.0,
    ) -> Array:
        """Return how long passes take; all arguments are arrays that broadcast to (mappings, ...).

        Args:
            seqs: sequences that decode; ``kv``: tokens that all of them read together.
            prompts: prompts in the pass, which are equally long; ``past``, ``new``: tokens of each before, and now.
        """
        shape, costs = self._shape, self._costs
        new_all, outputs = prompts * new, seqs + prompts
        tokens = seqs + new_all
        # The rank of the attention with the most prompts: all others wait for it.
        uneven = self.replicas * np.ceil(prompts / self.replicas) / np.maximum(prompts, 1.0)
        own = new_all * uneven + seqs
        time = costs.fixed + costs.output * outputs
        time = time + np.maximum(costs.linear_read, costs.linear_token * own)
        time = time + np.maximum(costs.head_read, costs.head_token * outputs)
        if shape.experts:
            touched = shape.experts * (1.0 - (1.0 - shape.experts_per_token / shape.experts) ** tokens)
            time = time + np.maximum(costs.expert_read * touched, costs.expert_token * tokens)
        time = time + costs.other_token * own + costs.exchange_token * tokens
        near, far = shape.near_layers, shape.attention_layers - shape.near_layers
        pairs, reads = prompts * new * (past + (new + 1) / 2), prompts * (past + new)
        time = time + shape.index_layers * (costs.index_pair * pairs * uneven + costs.index * kv)
        if far:
            attention = np.maximum(costs.pair * pairs + costs.past * prompts * past, costs.context * reads)
            time = time + far * (attention * uneven + costs.kv * kv)
        if near and shape.reads is not None:
            window = float(shape.reads)
            growing = np.minimum(new, np.maximum(0.0, window - past))
            pairs = prompts * (growing * (past + (growing + 1) / 2) + (new - growing) * window)
            reads = prompts * (np.minimum(past, window) + new)
            attention = np.maximum(costs.pair * pairs + costs.past * (reads - new_all), costs.context * reads)
            time = time + near * (attention * uneven + costs.kv * np.minimum(kv, window * seqs))
        return np.asarray(time, dtype=np.float64)
