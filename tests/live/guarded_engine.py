"""A simulated engine behind an API key, TLS and a client's certificate; it writes down who came without its key.

``python -m tests.live.guarded_engine --port P --key KEY --refused FILE [--cert FILE --cert-key FILE] [--clients CA]``
"""

import argparse
import asyncio
import signal
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim.sim_server import SimServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    settings = SimSettings(block_size=16, kv_blocks=256, max_model_len=4096)
    app = SimServer(settings, kv_events=False, max_cpu_loras=2).application(faults=False)

    def note(request: web.Request) -> None:
        with Path(options.refused).open("a") as file:
            file.write(f"{request.method} {request.path}\n")

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("authorization") == f"Bearer {options.key}" and request.headers.get("x-team") == "a":
            return await handler(request)
        await asyncio.to_thread(note, request)
        return web.json_response({"error": "Unauthorized"}, status=options.status)

    app.middlewares.insert(0, guard)
    tls = None
    if options.cert is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.cert, options.cert_key)
        if options.clients is not None:
            tls.load_verify_locations(options.clients)
            tls.verify_mode = ssl.CERT_REQUIRED
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port, ssl_context=tls).start()
    print("serving", flush=True)
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    await ending.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--refused", required=True)
    parser.add_argument("--status", type=int, default=401)
    for flag in ("--cert", "--cert-key", "--clients"):
        parser.add_argument(flag)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
