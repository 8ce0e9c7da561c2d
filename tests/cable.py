"""How does a network fail between two processes of one machine? A forwarder of TCP that can be held or cut."""

import asyncio


class Cable:
    """Forward connections from a port of its own to another address, until told otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self.refusing = False
        """New connections end at once."""
        self._to = host, port
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._held: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> "Cable":
        self._server = await asyncio.start_server(self._come, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def hold(self) -> None:
        """Let the connections that there are carry nothing more, and stay open; new ones work."""
        self._held |= {writer for pair in self._open for writer in pair}

    def cut(self) -> None:
        """End the connections that there are."""
        for pair in self._open:
            for writer in pair:
                writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            there, onward = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        pair = writer, onward
        self._open.add(pair)
        tasks = [asyncio.create_task(self._carry(reader, onward)), asyncio.create_task(self._carry(there, writer))]
        self._tasks |= set(tasks)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks -= set(tasks)
        self._open.discard(pair)
        for one in pair:
            self._held.discard(one)
            one.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if writer not in self._held:
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
