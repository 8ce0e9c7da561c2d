"""Two plugins of the planner: no more replicas than the hour's price allows, and a forecast from yesterday's table.

The classes run in the planner's process as they stand (planner.plugins.use), or in this one:

    python price_of_day.py cap --registry unix:///run/penstock/plugins.sock --table 'batch=0-7:8,7-19:3,19-24:6'

The token is read from PLUGIN_TOKEN. See docs/guides/planner-plugins.md.
"""

import argparse
import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import Accept, Override, PoolTarget, Predicted, Prediction, Reason, Result

log = logging.getLogger("price_of_day")

Hours = list[tuple[float, float, float]]
"""(from hour, until hour, value), hours 0..24."""


def read_table(text: str) -> dict[str, Hours]:
    """Read ``NAME=FROM-UNTIL:VALUE,...`` for each name, with ``;`` between names."""
    table: dict[str, Hours] = {}
    for part in text.split(";"):
        name, equals, rest = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is no row of a table; it takes NAME=0-7:8,7-24:3")
        rows: Hours = []
        for row in rest.split(","):
            span, _, value = row.partition(":")
            begin, _, end = span.partition("-")
            rows.append((float(begin), float(end), float(value)))
        table[name.strip()] = rows
    return table


def hour_utc() -> float:
    """Return the hour of the day, 0..24."""
    return time.time() / 3600 % 24


class Cap(StatelessPlugin):
    """CONSTRAIN: at most so many replicas of a pool at this hour.

    Args:
        table: pool -> hours, as text.
        hour: what says which hour it is. In the planner's process give the hour at which the run began instead
            (``begins``): a plugin there reads no clock, so that a journal of it replays.
    """

    def __init__(
        self, spec: PluginSpec, table: str, begins: float | None = None, hour: Callable[[], float] = hour_utc
    ) -> None:
        self.spec = spec
        self._table = read_table(table)
        self._begins, self._hour = begins, hour

    def evaluate(self, context: PluginContext) -> Result:
        hour = self._hour() if self._begins is None else (self._begins + context.at / 3600) % 24
        targets, reasons = [], []
        for pool, hours in self._table.items():
            most = at_hour(hours, hour)
            if most is None or pool not in context.baseline:
                continue
            targets.append(PoolTarget(pool=pool, replicas=int(most), kind="at_most"))
            if context.baseline[pool] > most:
                text = f"{pool}: {context.baseline[pool]} were proposed; at hour {hour:.1f} the price allows {most:.0f}"
                facts = {"pool": pool, "hour": round(hour, 2), "most": int(most)}
                reasons.append(Reason(code="price", text=text, facts=facts))
        return Override(targets=tuple(targets), reasons=tuple(reasons)) if targets else Accept()


class Daily(StatelessPlugin):
    """PREDICT: requests per second of a model by the hour, from a table; it says nothing of lengths.

    Args:
        table: model -> hours, as text.
        seconds: that the forecast is for.
    """

    def __init__(
        self,
        spec: PluginSpec,
        table: str,
        seconds: float = 60.0,
        begins: float | None = None,
        hour: Callable[[], float] = hour_utc,
    ) -> None:
        self.spec = spec
        self._table, self._seconds = read_table(table), seconds
        self._begins, self._hour = begins, hour

    def evaluate(self, context: PluginContext) -> Result:
        hour = self._hour() if self._begins is None else (self._begins + context.at / 3600) % 24
        found = {}
        for model, hours in self._table.items():
            rate = at_hour(hours, hour)
            if rate is not None:
                requests = rate * self._seconds
                found[model] = Prediction(seconds=self._seconds, requests=requests, source=self.spec.id)
        return Predicted(models=found)


def at_hour(hours: Hours, hour: float) -> float | None:
    """Return the value of the row that an hour falls into."""
    return next((value for begin, end, value in hours if begin <= hour < end), None)


async def serve(args: argparse.Namespace) -> None:
    # Imported here: in the planner's process nothing of gRPC is needed.
    from penstock_extras.plugins.plugin_server import PluginServer

    if args.kind == "cap":
        plugin: Cap | Daily = Cap(
            PluginSpec(id=args.id or "price-of-day", stage="constrain", priority=50, needs=("pools",)), args.table
        )
    else:
        plugin = Daily(PluginSpec(id=args.id or "daily", stage="predict", priority=5), args.table)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = PluginServer(plugin, listen=args.listen, token=os.environ.get("PLUGIN_TOKEN"), registry=args.registry)
    await server.run(stop, ready=lambda: log.info("%s takes part, served at %s", plugin.spec.id, server.endpoint))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=("cap", "daily"))
    parser.add_argument("--table", required=True, help="NAME=FROM-UNTIL:VALUE,...;NAME=...")
    parser.add_argument("--registry", required=True, help="where the planner takes registrations")
    parser.add_argument("--listen", default="127.0.0.1:0", help="where this plugin serves")
    parser.add_argument("--id", help="as in planner.plugins.tokens")
    logging.basicConfig(level=logging.INFO)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
