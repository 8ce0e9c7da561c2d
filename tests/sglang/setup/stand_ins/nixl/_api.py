"""How can NIXL register the KV of a CPU? SGLang calls all KV memory VRAM: here that is a name of the host's memory."""

from typing import Any

import nixl_cu12._api as real
from nixl_cu12._api import nixl_agent_config as nixl_agent_config
from nixl_cu12._api import nixl_thread_sync_t as nixl_thread_sync_t


class nixl_agent(real.nixl_agent):
    """NIXL's agent with one kind of memory under two names."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]
