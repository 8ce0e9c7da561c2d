"""Numbers of hand-offs: an engine takes two requests with one number for one, whoever sent them and when."""

from pathlib import Path

from penstock.adapters.stores.memory_store import MemoryStore
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.runtime.node.router_node import RouterNode


async def test_no_two_frontends_and_no_restart_draw_the_same_numbers(tmp_path: Path) -> None:
    nodes = [
        RouterNode(ClusterSettings(), tmp_path / str(start), index, MemoryStore())
        for start in (0, 1)
        for index in (0, 1)
    ]
    drawn = [node.router.rng.getrandbits(62) for node in nodes for _ in range(100)]
    assert len(set(drawn)) == len(drawn)
