"""An engine site in a folder of a test: what processes beside engines are made from."""

from pathlib import Path

from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.supervision.child_process import EngineSite


def site(folder: Path) -> EngineSite:
    store = MemoryStore(MemorySpace())
    return EngineSite(
        settings=SuperviseSettings,
        state=folder,
        namespace="test",
        logs=folder,
        env={},
        host="127.0.0.1",
        crashes=CrashBook(store, 10.0),
        store=store,
        ttl=10.0,
    )
