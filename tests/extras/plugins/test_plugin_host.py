"""Do plugins in other processes register, answer, fail and leave as the planner needs it, and is nobody else let in?"""

import asyncio
import os
import random
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import Override, PoolTarget, Predicted, Prediction, Reason, Reject, Result
from penstock.planner.settings_plugins import PluginEntry, PluginSettings
from penstock_extras.plugins.plugin_address import address_of, channel
from penstock_extras.plugins.plugin_server import PluginServer, RegistrationRefused
from penstock_extras.plugins.plugin_tokens import PluginTokens, bearer, tokens_of
from penstock_extras.plugins.protobuf_messages import message, service
from tests.extras.plugins.harness import OTHER, TOKEN, Stand, Wants, settings

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "planner-plugin" / "price_of_day.py"


class Most(StatelessPlugin):
    """CONSTRAIN: at most so many; with a fault that can be switched on."""

    def __init__(self, most: int, id: str = "p", **spec: Any) -> None:
        self.spec = PluginSpec(id=id, **{"stage": "constrain", "needs": ("pools", "traffic"), **spec})
        self.most = most
        self.fails = False
        self.seen: list[PluginContext] = []

    def evaluate(self, context: PluginContext) -> Result:
        self.seen.append(context)
        if self.fails:
            raise RuntimeError("the price list is gone")
        because = (Reason(code="price", text=f"{self.most} are allowed", facts={"most": self.most}),)
        return Override(targets=(PoolTarget(pool="decode", replicas=self.most, kind="at_most"),), reasons=because)


@asynccontextmanager
async def serving(
    plugin: Any, registry: str | None, token: str | None = TOKEN, **more: Any
) -> AsyncIterator[PluginServer]:
    server, stop = PluginServer(plugin, registry=registry, token=token, **more), asyncio.Event()
    ready = asyncio.Event()
    task = asyncio.create_task(server.run(stop, ready=ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED, timeout=30)
    waiting.cancel()
    if task.done():
        await task  # raises
    assert ready.is_set()
    try:
        yield server
    finally:
        stop.set()
        await task


async def say(stand: Stand, method: str, token: str | None = TOKEN, **given: Any) -> Any:
    """Call the registry as a program of somebody else would."""
    assert stand.host.address is not None
    path, kind, reply = service("Registry")[method]
    async with channel(address_of(stand.host.address), PluginSettings()) as open_channel:
        call = open_channel.unary_unary(
            path, request_serializer=kind.SerializeToString, response_deserializer=reply.FromString
        )
        return await call(kind(**given), timeout=10, metadata=bearer(token))


def registration(**spec: Any) -> dict[str, Any]:
    given = {"id": "p", "stage": 4, "endpoint": "unix:///nowhere.sock", **spec}
    return {"spec": message("PluginSpec")(**given), "protocol_version": "1.0"}


async def test_a_plugin_outside_bounds_what_was_proposed(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path), [Wants(5)]) as stand:
        await stand.until(lambda: stand.desired["decode"] == 5)
        plugin = Most(3)
        async with serving(plugin, stand.host.address):
            await stand.until(lambda: stand.desired["decode"] == 3)
            record = await stand.until(
                lambda: next((tick for tick in stand.ticks if tick.bound and tick.bound[0].code == "price"), None)
            )
            assert record.bound[0].facts == {"most": 3}
            seen = plugin.seen[-1]
            assert seen.observation.models["m"].traffic is not None and seen.baseline == {"decode": 5}
            assert seen.observation.models["m"].pools["decode"].engines == ()  # it did not ask for engines
            listed = await say(stand, "List")
            state = {each.spec.id: each for each in listed.plugins}["p"]
            assert state.outside and state.circuit == "closed" and state.evaluations["override"] > 0
        await stand.until(lambda: stand.desired["decode"] == 5)  # it unregistered, and bounds no more
        assert "it unregistered: it ends" in stand.alarms[-1].reason.text


async def test_looks_pile_up_in_a_plugin_as_in_the_planner(tmp_path: Path) -> None:
    plugin = Most(3)
    async with Stand(settings(tmp_path), []) as stand, serving(plugin, stand.host.address):
        await stand.until(lambda: plugin.seen and len(plugin.seen[-1].observations) >= 3)
        await stand.host.reset("the settings changed")
        count = len(plugin.seen)
        await stand.until(lambda: len(plugin.seen) > count)
        assert len(plugin.seen[count].observations) == 1


async def test_a_prediction_comes_from_outside(tmp_path: Path) -> None:
    class Says(StatelessPlugin):
        spec = PluginSpec(id="p", stage="predict")

        def evaluate(self, context: PluginContext) -> Result:
            return Predicted(models={"m": Prediction(seconds=60, requests=120.0, source="a table")})

    async with Stand(settings(tmp_path), []) as stand, serving(Says(), stand.host.address):
        record = await stand.until(lambda: next((t for t in stand.ticks if t.models["m"].predicted), None))
        assert record.models["m"].predicted["requests"] == 120.0


async def test_a_veto_from_outside_holds_everything(tmp_path: Path) -> None:
    class No(StatelessPlugin):
        spec = PluginSpec(id="p", stage="reconcile")

        def evaluate(self, context: PluginContext) -> Result:
            return Reject(reasons=(Reason(code="freeze", text="there is a freeze until Monday"),))

    async with Stand(settings(tmp_path), []) as stand, serving(No(), stand.host.address):
        record = await stand.until(lambda: next((t for t in stand.ticks if t.outcome == "veto"), None))
        assert record.chosen[0].text == "there is a freeze until Monday"


async def test_a_plugin_that_fails_is_left_alone_and_the_tick_goes_on(tmp_path: Path) -> None:
    plugin = Most(3)
    async with Stand(settings(tmp_path), [Wants(5)]) as stand, serving(plugin, stand.host.address):
        await stand.until(lambda: stand.desired["decode"] == 3)
        plugin.fails = True
        await stand.until(lambda: stand.seat("p").circuit(stand.ticks[-1].at) == "open")
        assert stand.seat("p").evaluations["error"] == 5
        await stand.until(lambda: stand.desired["decode"] == 5)
        said = [
            said for tick in stand.ticks for said in tick.plugin_results if said.id == "p" and said.result == "error"
        ]
        assert "RuntimeError: the price list is gone" in said[-1].reasons[0].text


async def test_a_bug_of_ours_in_asking_is_told_at_once_and_the_tick_goes_on(tmp_path, monkeypatch, caplog) -> None:
    async with Stand(settings(tmp_path), [Wants(5)]) as stand, serving(Most(3), stand.host.address):

        async def breaks(ask: Any, endpoint: str) -> Any:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(stand.host._calls, "ask", breaks)
        await stand.until(lambda: stand.desired["decode"] == 5)
        said = await stand.until(
            lambda: [s for t in stand.ticks for s in t.plugin_results if s.id == "p" and s.result == "error"]
        )
        assert "ZeroDivisionError" in said[0].reasons[0].text
    assert "by a bug of ours" in caplog.text


async def test_one_that_is_slow_has_no_say_and_nobody_waits_longer_than_its_deadline(tmp_path: Path) -> None:
    class Slow(Most):
        def evaluate(self, context: PluginContext) -> Result:
            self.seen.append(context)
            going.wait(timeout=30)
            return super().evaluate(context)

    going = threading.Event()
    async with Stand(settings(tmp_path, deadline=0.2), [Wants(5)]) as stand, serving(Slow(3), stand.host.address):
        try:
            await stand.until(lambda: stand.desired["decode"] == 5)
            seat = await stand.until(lambda: stand.seat("p"))
            await stand.until(lambda: seat.evaluations.get("timeout", 0) + seat.evaluations.get("error", 0) >= 2)
        finally:
            going.set()


async def test_one_that_falls_silent_is_put_out_and_may_come_back(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path, heartbeat=0.5), [Wants(5)]) as stand:
        plugin = Most(3, interval=3600.0)  # answers would be signs of life as well
        server, stop = PluginServer(plugin, registry=stand.host.address, token=TOKEN), asyncio.Event()
        task = asyncio.create_task(server.run(stop))
        await stand.until(lambda: stand.seat("p"))
        first = server.session
        task.cancel()  # it dies without a word
        with suppress(asyncio.CancelledError):
            await task
        await stand.until(lambda: stand.seat("p") is None)
        assert any(alarm.reason.code == "plugin_silent" for alarm in stand.alarms)
        assert not (await say(stand, "Heartbeat", id="p", session=first)).known
        async with serving(plugin, stand.host.address) as again:
            assert stand.seat("p") is not None and again.session != first


async def test_one_that_was_put_out_by_mistake_registers_again(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path, heartbeat=0.3), []) as stand, serving(Most(3), stand.host.address) as server:
        first = server.session
        stand.planner.registry.remove("p")
        await stand.until(lambda: stand.seat("p") is not None and server.session not in (None, first))


@pytest.mark.slow
async def test_a_plugin_outlives_its_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_extras.plugins.registry_service.PLUGINS_MAX", 1)
    stand = await Stand(settings(tmp_path), []).__aenter__()
    async with serving(Most(3), stand.host.address) as server:
        await stand.until(lambda: stand.seat("p").evaluations.get("override"))
        first = server.session
        await stand.__aexit__()
        async with Stand(settings(tmp_path, heartbeat=0.5), [Wants(5)]) as after:
            # Its place is taken at first; that passes, and so the plugin does not give up.
            after.planner.registry.add(PluginSpec(id="other", stage="predict", outside=True), None, 0.0)
            await after.until(lambda: after.desired["decode"] == 3)
            assert server.session not in (None, first)


async def test_the_newest_registration_of_an_id_counts(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path), [Wants(9)]) as stand, serving(Most(3), stand.host.address) as old:
        await stand.until(lambda: stand.desired["decode"] == 3)
        session = old.session
        async with serving(Most(6), stand.host.address):
            await stand.until(lambda: stand.desired["decode"] == 6)
            assert not (await say(stand, "Heartbeat", id="p", session=session)).known
            assert not (await say(stand, "Unregister", id="p", session=session)).known
            old.session = None  # it would register again otherwise, and the two would take turns for ever
            assert stand.seat("p") is not None


@pytest.mark.parametrize(
    ("token", "given", "code"),
    [
        (None, {}, "auth_failed"),
        ("wrong" * 5, {}, "auth_failed"),
        (OTHER, {}, "auth_failed"),  # another plugin's
        (TOKEN, {"id": "unknown"}, "auth_failed"),
        (TOKEN, {"version": "2.0"}, "protocol_version_unsupported"),
        (TOKEN, {"version": ""}, "protocol_version_unsupported"),
        (TOKEN, {"stage": 0}, "bad_spec"),
        (TOKEN, {"interval": -1.0}, "bad_spec"),
        (TOKEN, {"window": 0.001}, "bad_window"),
        (TOKEN, {"needs": ["secrets"]}, "bad_needs"),
        (TOKEN, {"requires": ["luck"]}, "bad_requires"),
        (TOKEN, {"endpoint": ""}, "bad_endpoint"),
        (TOKEN, {"endpoint": "http://127.0.0.1:80"}, "bad_endpoint"),
        (TOKEN, {"endpoint": "grpc://169.254.169.254:80"}, "bad_endpoint"),  # we would carry the token there
        (TOKEN, {}, "unreachable"),
    ],
)
async def test_who_is_refused_hears_why(tmp_path: Path, token: str | None, given: dict[str, Any], code: str) -> None:
    version = given.pop("version", "1.0") if "version" in given else "1.0"
    async with Stand(settings(tmp_path, deadline=1.0), []) as stand:
        reply = await say(stand, "Register", token, **{**registration(**given), "protocol_version": version})
        assert (reply.accepted, reply.reject_code) == (False, code), reply.reject_text
        assert reply.reject_text and reply.protocol_version == "1.0"
        assert TOKEN not in reply.reject_text and OTHER not in reply.reject_text
        assert not [seat for seat in stand.planner.registry.seats.values() if seat.spec.outside]
        counted = f'penstock_planner_plugin_registrations_refused_total{{code="{code}"}} 1'
        assert counted in stand.metrics.render()


async def test_nobody_takes_the_id_of_a_built_in_one(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path, tokens={"wants": TOKEN}), [Wants(2)]) as stand:
        with pytest.raises(RegistrationRefused, match="duplicate_id"):
            async with serving(Most(3, id="wants"), stand.host.address):
                raise AssertionError
        assert stand.seat("wants").plugin is not None


async def test_there_are_never_more_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_extras.plugins.registry_service.PLUGINS_MAX", 1)
    async with Stand(settings(tmp_path), []) as stand, serving(Most(3), stand.host.address):
        with pytest.raises(RegistrationRefused, match="full"):
            async with serving(Most(3, id="q"), stand.host.address, OTHER):
                raise AssertionError


async def test_without_tokens_everybody_is_refused_unless_that_was_said(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path, tokens={}), []) as stand:
        assert (await say(stand, "Register", TOKEN, **registration())).reject_code == "auth_failed"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await say(stand, "List", TOKEN)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    open_to_all = settings(tmp_path, tokens={}, insecure=True)
    async with Stand(open_to_all, []) as stand, serving(Most(3), stand.host.address, None):
        assert (await say(stand, "List", None)).plugins
        again = await say(stand, "Register", None, **registration(endpoint="unix:///elsewhere.sock"))
        assert again.reject_code == "duplicate_id"  # a name alone throws nobody out


async def test_insecure_does_not_open_what_has_a_token(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path, insecure=True), []) as stand:
        assert (await say(stand, "Register", None, **registration())).reject_code == "auth_failed"


async def test_a_plugin_answers_only_its_planner(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path), []) as stand, serving(Most(3), stand.host.address) as server:
        path, kind, reply = service("Constrainer")["Constrain"]
        async with channel(address_of(server.endpoint), PluginSettings()) as open_channel:
            call = open_channel.unary_unary(
                path, request_serializer=kind.SerializeToString, response_deserializer=reply.FromString
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(kind(), timeout=10, metadata=bearer(OTHER))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_message_that_is_too_long_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plugin_address", "plugin_host", "plugin_server"):
        monkeypatch.setattr(f"penstock_extras.plugins.{module}.MESSAGE_MAX", 2048)

    class Long(Most):
        def evaluate(self, context: PluginContext) -> Result:
            return msgspec.structs.replace(super().evaluate(context), evidence={"x": "y" * 5000})  # type: ignore[type-var]

    async with Stand(settings(tmp_path), []) as stand, serving(Long(3), stand.host.address):
        said = await stand.until(
            lambda: next(
                (s for t in stand.ticks for s in t.plugin_results if s.id == "p" and s.result == "error"), None
            )
        )
        assert "larger than max" in said.reasons[0].text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await say(stand, "Register", **registration(version="v" * 5000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_one_that_the_settings_name_takes_part_while_it_answers(tmp_path: Path) -> None:
    where = f"unix://{tmp_path}/own.sock"
    use = {"p": PluginEntry(stage="constrain", endpoint=where, needs=("pools",))}
    async with Stand(settings(tmp_path, listen=None, use=use, heartbeat=0.5), [Wants(5)]) as stand:
        await stand.until(lambda: stand.desired["decode"] == 5)
        for _ in range(2):  # it may end and come back
            async with serving(Most(3), None, listen=where):
                await stand.until(lambda: stand.desired["decode"] == 3)
            await stand.until(lambda: stand.desired["decode"] == 5)


async def test_where_the_planner_listens_is_checked(tmp_path: Path) -> None:
    for listen, words in (
        ("0.0.0.0:0", "there is no TLS"),
        ("nonsense", "not an address"),
        ("unix://relative", "no absolute path"),
    ):
        stand = Stand(settings(tmp_path, listen=listen), [])
        with pytest.raises(ConfigError, match=words):
            await stand.host.start()
        await stand.host.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stand = Stand(settings(tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}"), [])
        with pytest.raises(ConfigError, match="nobody can listen"):
            await stand.host.start()
        await stand.host.close()
    async with Stand(settings(tmp_path, listen="127.0.0.1:0"), []) as stand:
        assert stand.host.address is not None and stand.host.address.startswith("grpc://127.0.0.1:")
        async with serving(Most(3), stand.host.address):
            assert stand.seat("p") is not None
    async with Stand(settings(tmp_path), []):
        assert stat.S_IMODE((tmp_path / "p.sock").stat().st_mode) == 0o600


async def test_over_tls_both_show_a_certificate(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    tls = {"cert": str(cert), "key": str(key), "ca": str(cert)}
    async with Stand(settings(tmp_path, listen="localhost:0", **tls), []) as stand:
        assert stand.host.address is not None and stand.host.address.startswith("grpcs://localhost:")
        own = msgspec.structs.replace(PluginSettings(), **tls)
        async with serving(Most(3), stand.host.address, listen="localhost:0", settings=own) as server:
            assert server.endpoint.startswith("grpcs://")
            await stand.until(lambda: stand.seat("p").evaluations.get("override"))
        with pytest.raises(grpc.aio.AioRpcError):
            await say(stand, "List")  # no certificate of its own


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for localhost that signs itself."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run(
            [*command, "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl: there is none in PATH")
    return cert, key


def test_tokens_are_read_from_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# of the cap\np {TOKEN}\n\n")
    file.chmod(0o600)
    given = msgspec.structs.replace(PluginSettings(), tokens_file=str(file), tokens={"q": OTHER})
    tokens = tokens_of(given)
    assert len(tokens) == 2 and tokens.allows("p", dict(bearer(TOKEN))) and not tokens.allows("q", dict(bearer(TOKEN)))
    assert TOKEN not in repr(tokens)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        tokens_of(given)
    file.chmod(0o600)
    file.write_text("one two three\n")
    with pytest.raises(ConfigError, match="line 1: 3 words"):
        tokens_of(given)
    with pytest.raises(ConfigError, match="p has 5 characters"):
        PluginTokens({"p": "short"})


async def test_the_example_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The worked example of docs/guides/planner-plugins.md: a cap and a forecast, each in its own process."""
    given = settings(tmp_path, tokens={"price-of-day": TOKEN, "daily": OTHER})
    async with Stand(given, [Wants(9)]) as stand:
        await stand.until(lambda: stand.desired["decode"] == 9)
        words = [
            ("cap", "decode=0-8:4,8-16:4,16-24:4", TOKEN),
            ("daily", "m=0-12:2.5,12-24:2.5", OTHER),
        ]
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, EXAMPLE, kind, "--table", table, "--registry", str(stand.host.address),
                env={**os.environ, "PLUGIN_TOKEN": token}, stderr=asyncio.subprocess.PIPE,
            )
            for kind, table, token in words
        ]  # fmt: skip
        try:
            await stand.until(lambda: stand.desired["decode"] == 4)
            record = await stand.until(lambda: stand.ticks[-1] if stand.ticks[-1].models["m"].predicted else None)
            assert record.models["m"].predicted["requests"] == 150.0
            assert any("the price allows 4" in because.text for tick in stand.ticks for because in tick.bound)
        finally:
            for process in processes:
                process.terminate()
            errors = [(await process.communicate())[1].decode() for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors
        await stand.until(lambda: stand.desired["decode"] == 9)


async def raw(stand: Stand, path: str, data: bytes) -> grpc.StatusCode:
    """Call a path with bytes as they are; return how it ended."""
    assert stand.host.address is not None
    async with channel(address_of(stand.host.address), PluginSettings()) as open_channel:
        try:
            await open_channel.unary_unary(path)(data, timeout=10, metadata=bearer(TOKEN))
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_garbage_ends_a_call_and_nothing_else(tmp_path: Path) -> None:
    noise = random.Random(7)
    async with Stand(settings(tmp_path, deadline=1.0), []) as stand:
        for _ in range(60):
            path = service("Registry")[noise.choice(("Register", "Heartbeat", "Unregister", "List"))][0]
            data = noise.randbytes(noise.randrange(0, 200))
            # Bytes that happen to be a message are refused like any other that nobody knows.
            assert await raw(stand, path, data) in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
        assert await raw(stand, "/penstock.planner.v1.Registry/Nothing", b"") is grpc.StatusCode.UNIMPLEMENTED
        assert stand.planner.registry.seats == {}
        async with serving(Most(3), stand.host.address):
            assert stand.seat("p") is not None


async def test_two_that_register_at_once_are_one(tmp_path: Path) -> None:
    async with Stand(settings(tmp_path), []) as stand:
        server, stop = PluginServer(Most(3), token=TOKEN), asyncio.Event()
        task = asyncio.create_task(server.run(stop))
        while not server.endpoint:
            await asyncio.sleep(0)
        asked = [say(stand, "Register", **registration(endpoint=server.endpoint)) for _ in range(8)]
        replies = await asyncio.gather(*asked)
        accepted = [reply for reply in replies if reply.accepted]
        assert accepted and {reply.reject_code for reply in replies if not reply.accepted} <= {"duplicate_id"}
        newest = [(await say(stand, "Heartbeat", id="p", session=reply.session)).known for reply in accepted]
        assert newest.count(True) == 1
        stop.set()
        await task
