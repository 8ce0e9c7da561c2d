"""Plugin host of a planner: lets external plugins register, carries requests to them, and calls the named ones.

Circuit breaker, retained answers and evictions are the planner's (`penstock.planner.plugins.plugin_registry`); this
only carries messages.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.kernel.machine import Event
from penstock.planner.events import AskPlugin, PluginAlive, PluginAnswered, PluginRegistered
from penstock.planner.plugins.plugin_registry import PluginSlot, PluginSpec
from penstock.planner.settings_plugins import MESSAGE_MAX, PLUGINS_MAX, PluginSettings
from penstock_extras.plugins.plugin_address import bind
from penstock_extras.plugins.plugin_calls import PluginCalls, PluginUnreachable
from penstock_extras.plugins.plugin_tokens import tokens_of
from penstock_extras.plugins.protobuf_messages import need_grpc
from penstock_extras.plugins.registry_service import BEATS, RegistryService

log = logging.getLogger("penstock.planner.plugins")


class PluginHost:
    """External plugins of one planner.

    Args:
        post: gives the planner an event; called on the event loop.
        tick: seconds between two ticks.
        refuses: `penstock.planner.planner.Planner.refuses`.
        seats: the present plugins, such as ``lambda: planner.registry.seats``; it is only read.
        refused: called with the code of every refused registration.
    Raises:
        ConfigError: gRPC is not installed, or tokens can't be read.
    """

    def __init__(
        self,
        settings: PluginSettings,
        post: Callable[[Event], None],
        *,
        tick: float,
        refuses: Callable[[PluginSpec], str | None],
        seats: Callable[[], Mapping[str, PluginSlot]],
        refused: Callable[[str], None],
    ) -> None:
        self._grpc = need_grpc()
        self._settings, self._give, self._seats = settings, post, seats
        self._tokens = tokens_of(settings)
        self._calls = PluginCalls(settings, self._tokens, tick)
        self.registry = RegistryService(
            settings, self._tokens, self._calls, self._post, refuses=refuses, seats=seats, refused=refused
        )
        self._server: Any = None
        self._tasks = BackgroundTasks()
        self.address: str | None = None
        """The endpoint where plugins register, once it listens."""

    async def start(self) -> None:
        """Listen at the address of the settings, and keep calling the plugins that they name.

        Raises:
            ConfigError: the address can't be bound.
        """
        if self._settings.listen is not None:
            options = [
                ("grpc.max_receive_message_length", MESSAGE_MAX),
                ("grpc.so_reuseport", 0),  # a second planner on the same port is a mistake, not a partner
            ]
            # More calls at a time than all plugins need are a fault of some caller, and are refused.
            most = 4 * PLUGINS_MAX
            self._server = self._grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
            self._server.add_generic_rpc_handlers((self.registry.handler(),))
            self.address = bind(self._server, self._settings.listen, self._settings)
            await self._server.start()
            if not len(self._tokens) and not self._settings.insecure:
                log.warning("no plugin can register at %s: planner.plugins.tokens has none", self.address)
            else:
                log.info("plugins of the planner register at %s", self.address)
        for id, entry in self._settings.use.items():
            if entry.endpoint:
                self._tasks.spawn(self._look_after(PluginSpec.of(id, entry)))

    def ask(self, ask: AskPlugin) -> None:
        """Call a plugin; its answer, or why there is none, is posted."""
        self._tasks.spawn(self._carry(ask))

    async def reset(self, why: str) -> None:
        """Notify all external plugins that the planner starts over; one that does not answer is logged."""
        for seat in list(self._seats().values()):
            if seat.spec.outside:
                try:
                    await self._calls.reset(seat.spec.id, seat.spec.endpoint, why)
                except PluginUnreachable as error:
                    log.warning("planner plugin %s was not reset: %s", seat.spec.id, error)

    async def close(self) -> None:
        """Stop listening and cancel the calls under way."""
        await self._tasks.close()
        if self._server is not None:
            await self._server.stop(grace=0.5)
        await self._calls.close()

    async def _carry(self, ask: AskPlugin) -> None:
        seat = self._seats().get(ask.plugin)
        if seat is None:
            self._post(PluginAnswered(id=ask.id, plugin=ask.plugin, error="it takes part no more"))
            return
        try:
            answered = await self._calls.ask(ask, seat.spec.endpoint)
        except Exception as error:  # supervision boundary: the tick learns of our bug at once, not at its deadline
            log.exception("asking planner plugin %s failed by a bug of ours", ask.plugin)
            answered = PluginAnswered(id=ask.id, plugin=ask.plugin, error=f"asking it failed: {error!r}")
        self._post(answered)

    async def _look_after(self, spec: PluginSpec) -> None:
        """Call a plugin that does not register, and keep it registered for as long as it answers."""
        id, silent = spec.id, ""
        while True:
            try:
                await self._calls.bootstrap(id, spec.endpoint)
                silent = ""
                self._post(PluginAlive(plugin=id) if id in self._seats() else PluginRegistered(spec=spec))
            except PluginUnreachable as error:
                if silent != str(error):
                    log.warning("planner plugin %s at %s is left out: %s", id, spec.endpoint, error)
                silent = str(error)
            await asyncio.sleep(self._settings.heartbeat / BEATS)

    def _post(self, event: Event) -> None:
        try:
            self._give(event)
        except Exception:
            # Supervision boundary: a fault of the planner must not fail the plugin whose call this may be.
            log.exception("the planner failed on %s", type(event).__name__)
