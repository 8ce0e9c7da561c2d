"""Plugin server: runs one planner plugin in its own process, serves its stage, registers, sends heartbeats.

The same object may run in the planner's process: it is given a `PluginContext` and answers with a `Result`.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.planner.observation import Observation
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PlannerPlugin
from penstock.planner.plugins.proposals import Prediction
from penstock.planner.settings_plugins import MESSAGE_MAX, PluginSettings
from penstock_extras.plugins.plugin_address import address_of, bind, channel
from penstock_extras.plugins.plugin_tokens import HEADER, bearer
from penstock_extras.plugins.protobuf_convert import ConversionError, struct_of
from penstock_extras.plugins.protobuf_messages import PROTOCOL, call, handler_of, message, need_grpc
from penstock_extras.plugins.stage_messages import METHODS, answer_of, observation_of, spec_message

log = logging.getLogger("penstock.planner.plugin")

HISTORY = 1200.0
"""Seconds of observations that are kept for the plugin, as in the planner for its own plugins."""
RETRY = 1.0
"""Seconds between two tries to register."""
CALL = 10.0
"""Seconds that the registry has to answer; it calls this plugin meanwhile."""


FINAL = ("auth_failed", "protocol_version_unsupported")
"""Refusals that end a plugin even if it was accepted before."""


class RegistrationRefused(ConfigError):
    """The planner does not accept this plugin; ``code`` is one of docs/guides/planner-plugins.md."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class PluginServer:
    """One plugin in this process.

    Args:
        plugin: its ``spec`` has stage and intervals; ``evaluate`` runs in a thread, one call at a time.
        listen: where it serves: ``unix:///PATH`` or ``HOST:PORT``; port 0 takes a free one.
        token: shown to the planner and expected from it; None is for tests, and for planners that are insecure.
        registry: where the planner takes registrations; None where the planner's settings name this plugin.
    """

    def __init__(
        self,
        plugin: PlannerPlugin,
        *,
        listen: str = "127.0.0.1:0",
        token: str | None = None,
        registry: str | None = None,
        settings: PluginSettings | None = None,
    ) -> None:
        self._grpc = need_grpc()
        self._plugin, self._token, self._registry, self._listen = plugin, token, registry, listen
        self._settings = settings or PluginSettings()
        self._begin = plugin.snapshot()
        self._looks: list[Observation] = []
        self._one = asyncio.Lock()
        self._server: Any = None
        self.endpoint = ""
        self.session: str | None = None
        self.answered = 0

    async def run(self, stop: asyncio.Event, *, ready: Callable[[], None] | None = None) -> None:
        """Serve until ``stop`` is set; ``ready`` is called once it is registered.

        Raises:
            RegistrationRefused: the planner refuses it.
            ConfigError: the address can't be bound.
        """
        self._server = self._grpc.aio.server(options=[("grpc.max_receive_message_length", MESSAGE_MAX)])
        for handler in self._handlers():
            self._server.add_generic_rpc_handlers((handler,))
        self.endpoint = bind(self._server, self._listen, self._settings)
        await self._server.start()
        try:
            if self._registry is None:
                if ready is not None:
                    ready()
                await stop.wait()
            else:
                await self._take_part(self._registry, stop, ready)
        finally:
            await self._server.stop(grace=1.0)

    async def _take_part(self, registry: str, stop: asyncio.Event, ready: Callable[[], None] | None) -> None:
        open_channel = channel(address_of(registry), self._settings)
        interval, taken = RETRY, False
        try:
            while not stop.is_set():
                try:
                    if self.session is None:
                        interval = await self._register(open_channel)
                        if not taken and ready is not None:
                            ready()
                        taken = True
                    else:
                        beat = message("HeartbeatRequest")(id=self._plugin.spec.id, session=self.session)
                        reply = await self._say(open_channel, "Heartbeat", beat)
                        if not reply.known:
                            log.info("the planner has put this plugin out; it registers again")
                            self.session = None
                            continue
                except self._grpc.aio.AioRpcError as error:
                    log.warning("the planner at %s does not answer: %s", registry, error.details())
                    self.session = None
                except RegistrationRefused as error:
                    if not taken or error.code in FINAL:
                        raise
                    # It was accepted before, so the reason of this refusal may pass.
                    log.warning("the planner does not take this plugin back yet: %s", error.message)
                try:
                    await asyncio.wait_for(stop.wait(), RETRY if self.session is None else interval)
                except TimeoutError:
                    continue
            await self._leave(open_channel)
        finally:
            await open_channel.close()

    async def _register(self, open_channel: Any) -> float:
        request = message("RegisterRequest")(protocol_version=PROTOCOL)
        spec = msgspec.structs.replace(self._plugin.spec, endpoint=self.endpoint)
        request.spec.CopyFrom(spec_message(spec))
        reply = await self._say(open_channel, "Register", request)
        if not reply.accepted:
            raise RegistrationRefused(reply.reject_code, reply.reject_text)
        self.session = reply.session
        interval: float = reply.heartbeat_interval
        return interval

    async def _leave(self, open_channel: Any) -> None:
        if self.session is None:
            return
        request = message("UnregisterRequest")(id=self._plugin.spec.id, session=self.session, why="it ends")
        try:
            await self._say(open_channel, "Unregister", request)
        except self._grpc.aio.AioRpcError as error:
            log.warning("the planner could not be notified that this plugin ends: %s", error.details())

    async def _say(self, open_channel: Any, method: str, request: Any) -> Any:
        return await call(open_channel, "Registry", method, request, timeout=CALL, metadata=bearer(self._token))

    def _handlers(self) -> list[Any]:
        name, method = METHODS[self._plugin.spec.stage]
        lifecycle = {"Bootstrap": self._bootstrap, "Reset": self._reset}
        return [handler_of(name, {method: self._answer}), handler_of("Lifecycle", lifecycle)]

    async def _answer(self, question: Any, context: Any) -> Any:
        await self._check(context)
        try:
            given = self._context(question)
        except ConversionError as error:
            await context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, f"the question does not fit: {error}")
            raise AssertionError from None  # abort raises
        async with self._one:
            try:
                result = await asyncio.to_thread(self._plugin.evaluate, given)
            except Exception as error:
                # Supervision boundary: the planner receives the plugin's error, and the plugin goes on serving.
                log.exception("the plugin failed on tick %d", question.tick)
                await context.abort(self._grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
                raise
        self.answered += 1
        return answer_of(result)

    async def _bootstrap(self, _: Any, context: Any) -> Any:
        await self._check(context)
        return message("BootstrapReply")()

    async def _reset(self, _: Any, context: Any) -> Any:
        await self._check(context)
        async with self._one:
            self._looks = []
            self._plugin.restore(self._begin)
        return message("ResetReply")()

    def _context(self, question: Any) -> PluginContext:
        if question.HasField("observation"):
            observation = observation_of(question.observation)
            if self._looks and self._looks[-1].at >= observation.at:
                self._looks = []  # another run, whose clock began anew
            self._looks = [look for look in self._looks if look.at >= observation.at - HISTORY] + [observation]
            looks = self._looks
        else:
            looks = [Observation(at=0.0, window=0.0, models={})]
        predictions = {model: struct_of(each, Prediction) for model, each in question.predictions.items()}
        proposal = dict(question.proposal)
        return PluginContext(question.tick, looks[-1].at, looks, proposal, predictions)

    async def _check(self, context: Any) -> None:
        """Refuse every caller but the planner: its messages would count as the planner's."""
        if self._token is None:
            return
        shown = dict(context.invocation_metadata() or ()).get(HEADER, "")
        if not hmac.compare_digest(str(shown).encode(), dict(bearer(self._token))[HEADER].encode()):
            await context.abort(self._grpc.StatusCode.UNAUTHENTICATED, "that is not the planner's token")
