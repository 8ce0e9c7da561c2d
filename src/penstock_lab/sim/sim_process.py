"""Simulated engine process: takes arguments, prints one line of JSON with its URL, drains on SIGTERM."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.process_life import SIBLING_ENV, report_ready, stop_event
from penstock.config.cluster_secret_file import secret_of_env
from penstock.kernel.errors import ConfigError
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim.sim_tokenizer import DATA_DIR
from penstock_lab.sim.transfer.transfer_params import ROLES
from penstock_lab.simulate.tiers.tier_plan import TierPlan


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status: 0, or 2 where the settings or the port are unusable."""
    options = vars(_parser().parse_args(argv))
    try:
        settings = msgspec.json.decode(options.pop("settings"), type=SimSettings)
    except msgspec.ValidationError as error:
        return _refuse(f"--settings: {error}")
    except msgspec.DecodeError as error:
        return _refuse(f"--settings is not JSON: {error}")
    try:
        options["cache"] = msgspec.json.decode(options["cache"], type=TierPlan)
    except msgspec.MsgspecError as error:
        return _refuse(f"--cache: {error}")
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve_until_signal(settings, secret=secret_of_env(os.environ), **options))
    except (ConfigError, OSError, ValueError) as error:
        return _refuse(str(error))
    return 0


async def _serve_until_signal(settings: SimSettings, *, grace: float, **options: Any) -> None:
    from penstock_lab.sim.sim_server import start

    stopping = stop_event()
    imported = time.clock_gettime(time.CLOCK_BOOTTIME)
    sibling = settings.sibling_load_time if os.environ.get(SIBLING_ENV) else None
    await asyncio.sleep(settings.load_time if sibling is None else sibling)
    loaded = time.clock_gettime(time.CLOCK_BOOTTIME)
    server = await start(settings, **options)
    ready = time.clock_gettime(time.CLOCK_BOOTTIME)
    spent = {"import": imported - _born(), "weights": loaded - imported, "warm-up": ready - loaded}
    report_ready(url=server.url, start=spent)
    await stopping.wait()
    await server.stop(grace=grace)


def _born() -> float:
    """Return when this process began, in seconds of CLOCK_BOOTTIME."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def _parser() -> argparse.ArgumentParser:
    """Return the parser, whose names are those of `penstock_lab.sim.sim_server.start`."""
    parser = argparse.ArgumentParser(prog="penstock engine sim", description=__doc__)
    parser.add_argument("--model", default="sim", help="name that it serves")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port; 0 lets the system choose")
    parser.add_argument("--settings", default="{}", help="JSON of SimSettings")
    parser.add_argument("--cache", default="{}", help="JSON of TierPlan: simulated tiers below its memory")
    parser.add_argument(
        "--adapter", dest="adapters", action="append", default=[], help="LoRA name served beside the model; repeatable"
    )
    parser.add_argument(
        "--max-cpu-loras", type=int, help="LoRA adapters that it holds, loaded while it runs; unset loads none"
    )
    parser.add_argument("--tokenizer", type=Path, default=DATA_DIR, help="folder with tokenizer.json")
    parser.add_argument("--chat-template", type=Path, help="file with a chat template in place of the folder's")
    parser.add_argument("--topic", default="", help="topic of its KV events")
    parser.add_argument("--no-kv-events", dest="kv_events", action="store_false", help="announce no KV events")
    parser.add_argument(
        "--role", choices=ROLES, default="aggregated", help="which leg it takes of requests with bootstrap fields"
    )
    parser.add_argument(
        "--embeddings", type=Path, help="folder in which engines of role encode leave what the others then need not do"
    )
    parser.add_argument(
        "--enable-scale-out",
        dest="scale_out",
        action="store_true",
        help="offer the routes that render, generate and derender, as vLLM does with this flag",
    )
    parser.add_argument("--grace", type=float, default=20.0, help="seconds that running requests get after SIGTERM")
    parser.add_argument(
        "--faults",
        action="store_true",
        default=os.environ.get("PENSTOCK_SIM_FAULTS") == "1",
        help="offer POST /fault, for tests",
    )
    return parser


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop, which halves the cost of a streamed chunk, or None where it is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


def _refuse(message: str) -> int:
    sys.stderr.write(f"penstock engine sim: {message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
