"""What a part of the planner declares is its memory, and nothing else is."""

import msgspec
import numpy as np
import pytest

from penstock.planner.performance.performance_model import Floats
from penstock.planner.remembering import Remembering


class Leaf(Remembering):
    sums: Floats
    by_size: dict[int, tuple[float, ...]]

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.sums = np.zeros(2)
        self.by_size = {}


class Tree(Remembering):
    _leaves: dict[str, Leaf]
    _row: list[Leaf]
    _first: Leaf

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._leaves, self._row, self._first = {}, [Leaf(limit), Leaf(limit)], Leaf(limit)

    def part(self, name: str, key: str) -> Leaf:
        return Leaf(self.limit)


def test_a_tree_comes_back_with_its_own_settings() -> None:
    tree = Tree(1)
    tree._leaves["a"] = Leaf(1)
    for place, leaf in enumerate((tree._leaves["a"], *tree._row, tree._first)):
        leaf.sums = np.array([place, 0.1])
        leaf.by_size[place] = (0.5, 1.5)
    again = Tree(2)
    again.restore(msgspec.json.decode(msgspec.json.encode(tree.snapshot())))
    assert again.snapshot() == tree.snapshot()
    assert again._leaves["a"].by_size == {0: (0.5, 1.5)} and again._row[1].sums.tolist() == [2.0, 0.1]
    assert {leaf.limit for leaf in (*again._leaves.values(), *again._row, again._first)} == {2}


def test_another_tree_is_refused() -> None:
    with pytest.raises(KeyError):
        Tree(1).restore({"row": []})
    with pytest.raises(msgspec.ValidationError):
        Leaf().restore({"sums": [], "by_size": {"a": 1}})
