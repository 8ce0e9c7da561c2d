"""gRPC service Registry, the planner's side: registration, heartbeat and leave of external plugins."""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.planner.events import PluginAlive, PluginLeft, PluginRegistered
from penstock.planner.plugins.plugin_registry import PluginSlot, PluginSpec
from penstock.planner.settings_plugins import PLUGINS_MAX, PluginSettings
from penstock_extras.plugins.plugin_address import address_of, check_reachable
from penstock_extras.plugins.plugin_calls import PluginCalls, PluginUnreachable
from penstock_extras.plugins.plugin_tokens import PluginTokens
from penstock_extras.plugins.protobuf_convert import ConversionError, fill
from penstock_extras.plugins.protobuf_messages import PROTOCOL, handler_of, message, need_grpc, text_metadata
from penstock_extras.plugins.stage_messages import spec_message, spec_of

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
NEEDS = ("pools", "traffic", "engines")
REQUIRES = ("predictions",)
BEATS = 3
"""Heartbeats that fit into the time after which a silent plugin is evicted."""

_SHOWN = ("failures", "evaluations", "called", "last_heartbeat", "seconds")
"""What a listing shows of a plugin's seat."""
Post = Callable[[PluginRegistered | PluginAlive | PluginLeft], None]


class RegistrationDenied(Exception):
    """A refused registration: one word for programs, a sentence for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class PluginSession:
    """A registration that was accepted."""

    spec: PluginSpec
    key: str


class RegistryService:
    """Answers the calls of service Registry.

    Args:
        refuses: returns why the planner can't take a plugin as ``code: sentence``, or None.
        seats: the present plugins; the planner may have evicted one meanwhile.
        refused: called with the code of every refused registration.
    """

    def __init__(
        self,
        settings: PluginSettings,
        tokens: PluginTokens,
        calls: PluginCalls,
        post: Post,
        *,
        refuses: Callable[[PluginSpec], str | None],
        seats: Callable[[], Mapping[str, PluginSlot]],
        refused: Callable[[str], None],
    ) -> None:
        self._settings, self._tokens, self._calls, self._post = settings, tokens, calls, post
        self._refuses, self._seats, self._refused = refuses, seats, refused
        self._sessions: dict[str, PluginSession] = {}
        self._coming: set[str] = set()

    def handler(self) -> Any:
        """Return the generic handler that a gRPC server takes."""
        return handler_of(
            "Registry",
            {
                "Register": self._register,
                "Heartbeat": self._heartbeat,
                "Unregister": self._unregister,
                "List": self._list,
            },
        )

    async def _register(self, request: Any, context: Any) -> Any:
        reply = message("RegisterReply")
        try:
            session = await self._accept(request, text_metadata(context))
        except RegistrationDenied as error:
            self._refused(error.code)
            return reply(accepted=False, reject_code=error.code, reject_text=str(error), protocol_version=PROTOCOL)
        return reply(
            accepted=True,
            protocol_version=PROTOCOL,
            session=session.key,
            heartbeat_interval=self._settings.heartbeat / BEATS,
        )

    async def _accept(self, request: Any, metadata: Mapping[str, str]) -> PluginSession:
        id = request.spec.id
        if not self._tokens.allows(id, metadata):
            # The same text whether the id or the token is wrong, so that neither can be guessed alone.
            raise RegistrationDenied("auth_failed", "no such plugin with that token; see planner.plugins.tokens")
        version = request.protocol_version
        if version.split(".")[0] != PROTOCOL.split(".")[0]:
            raise RegistrationDenied(
                "protocol_version_unsupported", f"the plugin speaks {version or 'none'}, we speak {PROTOCOL}"
            )
        spec = self._checked(request)
        if id in self._coming:
            raise RegistrationDenied("duplicate_id", f"plugin {id} is being registered by another call")
        before = self._sessions.get(id) if self._takes_part(id) else None
        if before is None:
            self._admit(spec)
        elif self._tokens.insecure and before.spec.endpoint != spec.endpoint:
            # Without tokens any process could evict a plugin by taking its name.
            raise RegistrationDenied("duplicate_id", f"there is a plugin {id} already, at {before.spec.endpoint}")
        self._coming.add(id)
        try:
            await self._calls.bootstrap(id, spec.endpoint)
        except PluginUnreachable as error:
            raise RegistrationDenied("unreachable", f"the planner called {spec.endpoint} and got: {error}") from None
        finally:
            self._coming.discard(id)
        if before is None:
            self._admit(spec)  # again: another may have registered during the call
        session = PluginSession(spec, secrets.token_hex(16))
        self._sessions[id] = session
        self._post(PluginRegistered(spec=spec))
        return session

    def _checked(self, request: Any) -> PluginSpec:
        """Return the spec of a registration, or refuse it."""
        try:
            spec = spec_of(request.spec)
        except ConversionError as error:
            raise RegistrationDenied("bad_spec", str(error)) from None
        if ID.fullmatch(spec.id) is None:
            raise RegistrationDenied(
                "bad_id", f"{spec.id[:80]!r} is not an id; it takes letters, digits and _.:- , at most 64"
            )
        for code, given, known in (("bad_needs", spec.needs, NEEDS), ("bad_requires", spec.requires, REQUIRES)):
            unknown = [name for name in given if name not in known]
            if unknown:
                raise RegistrationDenied(code, f"nobody knows {', '.join(unknown)[:200]}; there are {', '.join(known)}")
        try:
            check_reachable(address_of(spec.endpoint), self._settings)
        except ValueError as error:
            raise RegistrationDenied("bad_endpoint", str(error)) from None
        return msgspec.structs.replace(spec, version=spec.version[:64] or "v1")

    def _admit(self, spec: PluginSpec) -> None:
        if sum(seat.spec.outside for seat in self._seats().values()) >= PLUGINS_MAX:
            raise RegistrationDenied("full", f"there are {PLUGINS_MAX} plugins already")
        why = self._refuses(spec)
        if why is not None:
            code, _, text = why.partition(": ")
            raise RegistrationDenied(code, text)

    async def _heartbeat(self, request: Any, context: Any) -> Any:
        known = self._is(request, context) and self._takes_part(request.id)
        if known:
            self._post(PluginAlive(plugin=request.id))
        return message("HeartbeatReply")(known=known)

    async def _unregister(self, request: Any, context: Any) -> Any:
        known = self._is(request, context)
        if known:
            del self._sessions[request.id]
            self._post(
                PluginLeft(plugin=request.id, why=f"it unregistered: {request.why[:200] or 'it did not say why'}")
            )
            await self._calls.forget(request.id)
        return message("UnregisterReply")(known=known)

    async def _list(self, _: Any, context: Any) -> Any:
        if not self._tokens.allows_any(text_metadata(context)):
            await context.abort(need_grpc().StatusCode.UNAUTHENTICATED, "no plugin has that token")
        reply = message("ListReply")()
        for seat in self._seats().values():
            fill(
                reply.plugins.add(),
                {
                    "outside": seat.spec.outside,
                    "circuit": "closed" if seat.opened is None else "open",
                    **{name: getattr(seat, name) for name in _SHOWN},
                },
            ).spec.CopyFrom(spec_message(seat.spec))
        return reply

    def _takes_part(self, id: str) -> bool:
        seat = self._seats().get(id)
        return seat is not None and seat.spec.outside

    def _is(self, request: Any, context: Any) -> bool:
        """Return whether a call comes from the newest registration of its id."""
        session = self._sessions.get(request.id)
        allowed = self._tokens.allows(request.id, text_metadata(context))
        return session is not None and allowed and secrets.compare_digest(session.key, request.session)
