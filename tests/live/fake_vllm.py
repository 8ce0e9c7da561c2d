"""A program that takes vLLM's command line and serves the simulated engine, for machines without vLLM.

``vllm serve MODEL --port P ...``; MODEL ``broken`` ends at once, as a bad checkpoint does.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time


async def serve(options: argparse.Namespace) -> None:
    from penstock_lab.engine.settings import SimSettings
    from penstock_lab.sim.sim_server import start

    if options.load_format == "penstock":
        print(await asyncio.to_thread(weights, options.model), flush=True)
    events = json.loads(options.kv_events_config or "{}")
    settings = SimSettings(block_size=options.block_size or 16, kv_blocks=256, max_model_len=4096)
    server = await start(
        settings,
        model=options.served_model_name,
        host=options.host,
        port=options.port,
        topic=events.get("topic", ""),
        kv_events=bool(events.get("enable_kv_cache_events")),
    )
    print(f"serving {options.model} at {server.url}, host ip {os.environ.get('VLLM_HOST_IP')}", flush=True)
    print(f"noise of its own: {options}", file=sys.stderr, flush=True)
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    await ending.wait()
    await server.stop(grace=float(options.shutdown_timeout))


def weights(folder: str) -> str:
    """Ask for weights as our loader in a vLLM does; it takes seconds to import before, in which siblings are found."""
    from penstock_kv.inside.weights.weight_protocol import WEIGHTS_ENV, Answer, WantWeights, WeightsHere, ask

    answer: Answer | None = None
    for _ in range(int(os.environ.get("FAKE_PATIENCE", "1"))):
        try:
            answer, fd = ask(os.environ[WEIGHTS_ENV], WantWeights(folder), 10.0)
        except OSError:
            fd = None
        if isinstance(answer, WeightsHere) and fd is not None:
            os.close(fd)
            return f"weights from {answer.sibling}: {len(answer.tensors)} tensors"
        time.sleep(0.25)
    return f"weights from the files: {answer}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--kv-events-config")
    parser.add_argument("--scheduling-policy", choices=["fcfs", "priority"])
    parser.add_argument("--shutdown-timeout", type=int)
    parser.add_argument("--extra")
    parser.add_argument("--load-format")
    for flag in (
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
        "--enable-logging-iteration-details",
    ):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.model.endswith("broken"):
        print("ValueError: the checkpoint has no config.json", file=sys.stderr)
        return 1
    asyncio.run(serve(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
