"""Does a frontend tell another one what an engine holds, at its own address alone?"""

import aiohttp
import msgspec

from penstock.adapters.stores.memory_store import MemoryStore
from penstock.kernel.values import KvStored, Target, WorkerCard, WorkerId
from penstock.router.events import KvObserved
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, FrontendCard
from penstock.runtime.kv_events.peer_blocks import PeerBlocksClient
from tests.frontend.stand import stand

EVENTS = "tcp://127.0.0.1:1"


async def test_what_is_known_of_an_engine_is_told_to_another_frontend() -> None:
    async with stand(card={"events": (EVENTS,), "hash_scheme": "vllm"}) as s:
        [engine] = s.engines
        worker = WorkerId(engine.name)
        stored = KvStored(hashes=[7, 8], block_size=4, local=[1, 2])
        s.live.post("router", KvObserved(worker=worker, rank=0, epoch=1, sequence=0, events=[stored]))
        store, url = MemoryStore(), s.server.own_url
        other = FrontendCard(id="other", url=url, admin_url=url, pid=0, plane="", run="")
        await store.put(FRONTENDS + "other", msgspec.json.encode(other))
        client = PeerBlocksClient(store, "me", None)
        card = WorkerCard(id=worker, url=engine.url, model="m", epoch=1, events=(EVENTS,))
        blocks = await client.ask(card, 0)
        assert blocks is not None and blocks.sequence == 0
        [event] = blocks.events
        assert isinstance(event, KvStored) and event.hashes == [7, 8] and event.blocks is not None
        exact = s.router.pools["m"].index.exact
        assert exact is not None and exact.blocks_of(Target(worker)) == set(event.blocks)
        assert await client.ask(msgspec.structs.replace(card, id=WorkerId("nobody")), 0) is None
        await client.close()
        async with aiohttp.ClientSession() as http:
            assert (await http.get(f"{url}/peer/kv-blocks/{worker}/1")).status == 404
            assert (await http.get(f"{url}/peer/kv-blocks/{worker}/first")).status == 404
            assert (await http.get(f"{s.server.url}/peer/kv-blocks/{worker}/0")).status == 404
