"""What does every gateway stand before in this bench? Engines that answer at once, or token by token at a fixed pace.

usage: python backend.py COUNT MODEL_FOLDER     (prints the ports as one line of JSON)

A request says itself what it wants: ``stream``, ``max_tokens`` chunks, and ``seed`` milliseconds between two of them
(0 sends the whole stream at once). Those fields are the ones that every gateway passes on.
"""

import asyncio
import json
import re
import sys

import uvloop

TOKENS, GAP = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)'), re.compile(rb'"seed": ?(\d+)')
STREAMS = re.compile(rb'"stream": ?true')
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(found: dict[str, object]) -> bytes:
    return chunk(b"data: " + json.dumps(found, separators=(",", ":")).encode() + b"\n\n")


def whole(tokens: int) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "word " * tokens}, "finish_reason": "length"}
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
    base = {"id": "c", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice], "usage": usage}
    return answer(json.dumps(base).encode())


def pieces(tokens: int) -> list[bytes]:
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    found = []
    for number in range(tokens):
        finish = "length" if number == tokens - 1 else None
        choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": finish}
        found.append(event({**base, "choices": [choice]}))
    return [*found, chunk(b"data: [DONE]\n\n") + LAST]


class Engine(asyncio.Protocol):
    """One connection."""

    unary: dict[int, bytes] = {}
    streams: dict[int, list[bytes]] = {}

    def __init__(self, folder: str, loop: asyncio.AbstractEventLoop) -> None:
        told = {"status": "ok", "is_generation": True, "served_model_name": "tiny"}
        self.health = answer(json.dumps({**told, "model_path": folder, "tokenizer_path": folder}).encode())
        model = {"id": "tiny", "object": "model", "created": 1, "owned_by": "bench", "max_model_len": 131_072}
        self.models = answer(json.dumps({"object": "list", "data": [model]}).encode())
        self.loop = loop
        self.held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.held = (self.held + data).lstrip(b"\r\n")  # some gateways send empty lines between requests
        while (end := self.held.find(b"\r\n\r\n")) >= 0:
            head, end = self.held[:end].lower(), end + 4
            if b"\r\ntransfer-encoding: chunked" in head:
                last = self.held.find(b"\r\n0\r\n\r\n", end - 2)
                if last < 0:
                    return
                body, over = self.held[end:last], last + 7
            else:
                at = head.find(b"\r\ncontent-length:")
                over = end + (int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0)
                if len(self.held) < over:
                    return
                body = self.held[end:over]
            self.held = self.held[over:]
            self.serve(head.split(b" ", 2)[1], body)

    def serve(self, path: bytes, body: bytes) -> None:
        if not path.startswith((b"/v1/chat", b"/v1/completions", b"/generate")):
            self.transport.write(self.models if path.startswith(b"/v1/models") else self.health)
            return
        found = TOKENS.search(body)
        tokens = int(found.group(1)) if found else 16
        if not STREAMS.search(body):
            if tokens not in self.unary:
                self.unary[tokens] = whole(tokens)
            self.transport.write(self.unary[tokens])
            return
        if tokens not in self.streams:
            self.streams[tokens] = pieces(tokens)
        stream = self.streams[tokens]
        gap = GAP.search(body)
        if gap and int(gap.group(1)):
            self.transport.write(SSE)
            self.pace(stream, 0, int(gap.group(1)) / 1e3, self.loop.time())
        else:
            self.transport.write(SSE + b"".join(stream))

    def pace(self, stream: list[bytes], number: int, gap: float, started: float) -> None:
        """Send the next piece; the end mark goes out with the last one's successor, as engines do it."""
        if self.transport.is_closing():
            return
        self.transport.write(stream[number])
        if number + 1 < len(stream):
            self.loop.call_at(started + (number + 1) * gap, self.pace, stream, number + 1, gap, started)


async def main(count: int, folder: str) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for _ in range(count):
        server = await loop.create_server(lambda: Engine(folder, loop), "127.0.0.1", 0, backlog=4096)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
