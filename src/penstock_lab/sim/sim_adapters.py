"""LoRA adapters of the simulated engine: loaded and unloaded as vLLM does, with a memory of so many."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject

CONFIG_FILE = "adapter_config.json"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class SimAdapters:
    """The adapters of one server.

    As in vLLM, any number may be loaded by name; ``slots`` of them are in memory, and one that was pushed out is read
    again when a request needs it.

    Args:
        fixed: served from the start, and in no slot.
        slots: adapters in memory; None loads none while it runs.
        seconds: that a load takes.
    """

    def __init__(self, fixed: tuple[str, ...], slots: int | None, seconds: float) -> None:
        self.slots = slots
        self.loads = 0
        """Reads from disk."""
        self.most = 0
        """Most adapters that were loaded at once."""
        self._seconds = seconds
        self._paths = dict(zip(fixed, fixed, strict=True))
        self._fixed = frozenset(fixed)
        self._memory: dict[str, None] = {}
        """Names in memory, the least recently used first."""
        self._disk = asyncio.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def path(self, name: str) -> str:
        """Return where an adapter came from."""
        return self._paths[name]

    async def load(self, body: JsonObject, model: str) -> str:
        """Load an adapter; return its name.

        Raises:
            ClientError: 400 and 404, with vLLM's words.
        """
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise ClientError("Both 'lora_name' and 'lora_path' must be provided.")
        if name == model:
            raise ClientError(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self._paths:
            raise ClientError(f"The lora adapter '{name}' has already been loaded.")
        if not await asyncio.to_thread(_is_adapter, path):
            raise ClientError(f"Loading lora {name} failed: No adapter found for {path}", status=404)
        await self._read(name)
        self._paths[name] = path
        self.most = max(self.most, len(self._paths) - len(self._fixed))
        return name

    def unload(self, body: JsonObject) -> str:
        """Unload an adapter; return its name.

        Raises:
            ClientError: 404: it is not loaded.
        """
        name = body.get("lora_name")
        if not isinstance(name, str) or not name:
            raise ClientError("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._paths or name in self._fixed:
            raise ClientError(f"The lora adapter '{name}' cannot be found.", status=404)
        del self._paths[name]
        self._memory.pop(name, None)
        return name

    async def use(self, name: str) -> None:
        """A request needs an adapter that is loaded."""
        if self.slots is None or name in self._fixed:
            return
        if name not in self._memory:
            await self._read(name)
        self._memory.pop(name, None)
        self._memory[name] = None

    async def _read(self, name: str) -> None:
        async with self._disk:
            if name in self._memory:
                return
            await asyncio.sleep(self._seconds)
            self.loads += 1
            self._memory[name] = None
            while self.slots is not None and len(self._memory) > self.slots:
                del self._memory[next(iter(self._memory))]


def _is_adapter(path: str) -> bool:
    """Return whether a load of a path would find an adapter: a folder with its config, or an id of a hub."""
    folder = Path(path).expanduser() if path.startswith("~/") else Path(path)
    if (folder / CONFIG_FILE).is_file():
        return True
    # An id is taken for one that the hub has, unless its first part names a folder here.
    return _HUB_ID.fullmatch(path) is not None and not folder.parent.exists()
