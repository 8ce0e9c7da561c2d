"""Calls from a planner to its external plugins: each has a deadline; every failure becomes a sentence."""

import time
from typing import Any

from penstock.planner.events import AskPlugin, PluginAnswered
from penstock.planner.settings_plugins import PluginSettings
from penstock_extras.plugins.plugin_address import address_of, channel, check_reachable
from penstock_extras.plugins.plugin_tokens import PluginTokens
from penstock_extras.plugins.protobuf_convert import ConversionError
from penstock_extras.plugins.protobuf_messages import PROTOCOL, call, message, need_grpc
from penstock_extras.plugins.stage_messages import METHODS, question_of, result_of

PLANNER = "penstock"


class PluginUnreachable(Exception):
    """A call to a plugin failed; the message says why."""


class PluginCalls:
    """Channels to plugins, one for each id and endpoint.

    Args:
        tick: seconds between two ticks; plugins receive it.
    """

    def __init__(self, settings: PluginSettings, tokens: PluginTokens, tick: float) -> None:
        self._settings = settings
        self._tokens = tokens
        self._tick = tick
        self._channels: dict[str, tuple[str, Any]] = {}

    async def ask(self, ask: AskPlugin, endpoint: str) -> PluginAnswered:
        """Return a plugin's answer, or why there is none. It raises nothing but cancellation."""
        begun = time.monotonic()
        name, method = METHODS[ask.stage]
        try:
            answer = await self._call(ask.plugin, endpoint, name, method, question_of(ask), ask.deadline)
            result = result_of(answer, ask.stage)
        except (PluginUnreachable, ConversionError) as error:
            return PluginAnswered(id=ask.id, plugin=ask.plugin, error=str(error), seconds=time.monotonic() - begun)
        return PluginAnswered(id=ask.id, plugin=ask.plugin, result=result, seconds=time.monotonic() - begun)

    async def bootstrap(self, id: str, endpoint: str) -> None:
        """Greet a plugin at its start.

        Raises:
            PluginUnreachable: it does not answer.
        """
        hello = message("BootstrapRequest")(planner=PLANNER, protocol_version=PROTOCOL, id=id, tick_seconds=self._tick)
        await self._call(id, endpoint, "Lifecycle", "Bootstrap", hello, self._settings.deadline)

    async def reset(self, id: str, endpoint: str, why: str) -> None:
        """Notify a plugin that the planner starts over.

        Raises:
            PluginUnreachable: it does not answer.
        """
        await self._call(id, endpoint, "Lifecycle", "Reset", message("ResetRequest")(why=why), self._settings.deadline)

    async def forget(self, id: str) -> None:
        """Close the channel to a plugin that is gone."""
        _, open_channel = self._channels.pop(id, ("", None))
        if open_channel is not None:
            await open_channel.close()

    async def close(self) -> None:
        for id in list(self._channels):
            await self.forget(id)

    async def _call(self, id: str, endpoint: str, name: str, method: str, question: Any, deadline: float) -> Any:
        grpc = need_grpc()
        try:
            open_channel = await self._channel(id, endpoint)
        except ValueError as error:
            raise PluginUnreachable(str(error)) from None
        shown = self._tokens.shown_to(id)
        try:
            return await call(open_channel, name, method, question, timeout=deadline, metadata=shown)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PluginUnreachable(f"no answer within {deadline:g} s") from None
            raise PluginUnreachable(f"{code.name.lower()}: {(error.details() or 'no details')[:300]}") from None

    async def _channel(self, id: str, endpoint: str) -> Any:
        known = self._channels.get(id)
        if known is not None and known[0] == endpoint:
            return known[1]
        await self.forget(id)
        address = address_of(endpoint)
        check_reachable(address, self._settings)
        opened = channel(address, self._settings)
        self._channels[id] = (endpoint, opened)
        return opened
