"""What has a planner to do with plugins outside? Let them register, carry questions to them, and look after the rest.

Breaker, what is held and who is put out are the planner's own (`penstock.planner.plugins`); here is only the carrying.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.adapters.plugins.address import bind
from penstock.adapters.plugins.auth import tokens_of
from penstock.adapters.plugins.calls import Calls, Unreachable
from penstock.adapters.plugins.messages import need_grpc
from penstock.adapters.plugins.registry import BEATS, Registry
from penstock.kernel.machine import Event
from penstock.planner.events import Answered, Ask, PluginAlive, PluginCame
from penstock.planner.plugins import Seat, Spec
from penstock.planner.settings_plugins import ExternalPlugin, PluginSettings

log = logging.getLogger("penstock.planner.plugins")


def wants_outside(settings: PluginSettings) -> bool:
    """Say whether any plugin may run elsewhere, so that a `PluginHost`, and gRPC, is needed."""
    return settings.listen is not None or bool(settings.external)


class PluginHost:
    """Plugins outside of one planner.

    Args:
        post: gives the planner an event; called on the event loop.
        tick: seconds between two ticks.
        refuses: `penstock.planner.planner.Planner.refuses`.
        seats: who takes part at present, such as ``lambda: planner.registry.seats``; it is only read.
        refused: told the code of every registration that is refused.
    Raises:
        ConfigError: gRPC is not installed, or tokens can't be read.
    """

    def __init__(
        self,
        settings: PluginSettings,
        post: Callable[[Event], None],
        *,
        tick: float,
        refuses: Callable[[Spec], str | None],
        seats: Callable[[], Mapping[str, Seat]],
        refused: Callable[[str], None],
    ) -> None:
        self._grpc = need_grpc()
        self._settings, self._give, self._seats = settings, post, seats
        self._tokens = tokens_of(settings)
        self._calls = Calls(settings, self._tokens, tick)
        self.registry = Registry(
            settings, self._tokens, self._calls, self._post, refuses=refuses, seats=seats, refused=refused
        )
        self._server: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address: str | None = None
        """Where plugins register, once it listens."""

    async def start(self) -> None:
        """Listen where the settings say so, and look after the plugins that they name.

        Raises:
            ConfigError: nobody can listen there.
        """
        if self._settings.listen is not None:
            options = [
                ("grpc.max_receive_message_length", self._settings.message_max),
                ("grpc.so_reuseport", 0),  # a second planner on the same port is a mistake, not a partner
            ]
            # More calls at a time than plugins can have is somebody's fault, and is refused.
            most = 4 * self._settings.most
            self._server = self._grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
            self._server.add_generic_rpc_handlers((self.registry.handler(),))
            self.address = bind(self._server, self._settings.listen, self._settings)
            await self._server.start()
            if not len(self._tokens) and not self._settings.insecure:
                log.warning("no plugin can register at %s: planner.plugins.tokens has none", self.address)
            else:
                log.info("plugins of the planner register at %s", self.address)
        for id, plugin in self._settings.external.items():
            self._begin(self._look_after(id, plugin))

    def ask(self, ask: Ask) -> None:
        """Carry a question out; its answer, or why there is none, is posted."""
        self._begin(self._carry(ask))

    async def reset(self, why: str) -> None:
        """Tell all plugins outside that the planner starts over; who does not answer is logged."""
        for seat in list(self._seats().values()):
            if seat.spec.outside:
                try:
                    await self._calls.reset(seat.spec.id, seat.spec.endpoint, why)
                except Unreachable as error:
                    log.warning("planner plugin %s was not reset: %s", seat.spec.id, error)

    async def close(self) -> None:
        """Stop listening and forget what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=0.5)
        await self._calls.close()

    async def _carry(self, ask: Ask) -> None:
        seat = self._seats().get(ask.plugin)
        if seat is None:
            self._post(Answered(id=ask.id, plugin=ask.plugin, error="it takes part no more"))
            return
        try:
            answered = await self._calls.ask(ask, seat.spec.endpoint)
        except Exception as error:  # supervision boundary: the tick hears of our bug at once, not at its deadline
            log.exception("asking planner plugin %s failed by a bug of ours", ask.plugin)
            answered = Answered(id=ask.id, plugin=ask.plugin, error=f"asking it failed: {error!r}")
        self._post(answered)

    async def _look_after(self, id: str, plugin: ExternalPlugin) -> None:
        """Call a plugin that does not register, and let it take part for as long as it answers."""
        given = {name: getattr(plugin, name) for name in plugin.__struct_fields__}
        spec = msgspec.convert({**given, "id": id, "outside": True}, Spec)
        silent = ""
        while True:
            try:
                await self._calls.bootstrap(id, spec.endpoint)
                silent = ""
                self._post(PluginAlive(plugin=id) if id in self._seats() else PluginCame(spec=spec))
            except Unreachable as error:
                if silent != str(error):
                    log.warning("planner plugin %s at %s has no say: %s", id, spec.endpoint, error)
                silent = str(error)
            await asyncio.sleep(self._settings.heartbeat / BEATS)

    def _post(self, event: Event) -> None:
        try:
            self._give(event)
        except Exception:
            # Supervision boundary: the planner's fault must not be a plugin's, whose call this may be.
            log.exception("the planner failed on %s", type(event).__name__)

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
