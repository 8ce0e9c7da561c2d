"""Does a frontend let in another one of its cluster, only for reading and only once, and nobody else?"""

from typing import Any

import pytest

from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from penstock.frontend.http.api_keys import NONCES_MAX, SPAN, PeerGuard
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.cluster_state.peer_signature import HEADER, signature
from tests.frontend.stand import Stand, stand

OURS, OTHER = ClusterSecret("the secret of this cluster"), ClusterSecret("the secret of another one")
NONCE = "0123456789abcdef"
ASKED = ("GET", "127.0.0.1:9", "/admin/status?scope=process")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def header(secret: ClusterSecret = OURS, at: float = 1_000_000, nonce: str = NONCE, asked: Any = ASKED) -> str:
    return signature(secret, *asked, int(at), nonce)


def test_a_signed_request_is_let_in_once():
    guard = PeerGuard(OURS, Clock())
    assert guard.admits(header(), *ASKED)
    assert not guard.admits(header(), *ASKED)
    assert guard.admits(header(nonce=NONCE + "0"), *ASKED)
    assert guard.refused == {"repeated": 1}


@pytest.mark.parametrize(
    ("said", "asked", "why"),
    [
        (header(OTHER), ASKED, "wrong secret"),
        (header(), ("GET", "127.0.0.1:9", "/admin/decisions?scope=process"), "wrong secret"),
        (header(), ("GET", "127.0.0.1:8", ASKED[2]), "wrong secret"),
        (header(asked=("POST", *ASKED[1:])), ("POST", *ASKED[1:]), "not allowed"),
        (header(nonce="short"), ASKED, "not allowed"),
        (header(at=1_000_000 - SPAN - 1), ASKED, "too old"),
        (header(at=1_000_000 + SPAN + 1), ASKED, "too old"),
        ("2" + header()[1:], ASKED, "newer"),
        ("2 a completely different shape", ASKED, "newer"),
        (header()[:-1] + "x", ASKED, "wrong secret"),
        (header() + " more", ASKED, "malformed"),
        ("", ASKED, "malformed"),
        ("1", ASKED, "malformed"),
        ("1 x y z", ASKED, "malformed"),
        ("1 ² " + NONCE + " z", ASKED, "malformed"),
        ("² 1 " + NONCE + " z", ASKED, "malformed"),
        (f"1 1000000 {NONCE} ÿ\udc80", ASKED, "wrong secret"),
        ("9" * 5000, ASKED, "malformed"),
    ],
)
def test_anything_else_is_refused_with_its_reason(said, asked, why, caplog):
    guard = PeerGuard(OURS, Clock())
    assert not guard.admits(said, *asked)
    assert guard.refused == {why: 1} and caplog.text.count("not let in") == 1


def test_stored_responses_are_ended_and_forgotten_by_peers_too():
    guard = PeerGuard(OURS, Clock())
    for method in ("POST", "DELETE"):
        asked = (method, "127.0.0.1:9", "/peer/responses/resp_1?owner=")
        assert guard.admits(header(asked=asked, nonce=NONCE + method.encode().hex()), *asked)


def test_without_a_header_or_a_secret_nobody_is_let_in():
    assert not PeerGuard(OURS, Clock()).admits(None, *ASKED)
    guard = PeerGuard(None, Clock())
    assert not guard.admits(header(), *ASKED)
    assert guard.refused == {"not allowed": 1}


def test_what_was_used_is_forgotten_only_when_it_is_too_old_to_be_used_again():
    clock = Clock()
    guard = PeerGuard(OURS, clock)
    early = header(at=clock.now + SPAN)  # good for the longest time there is
    assert guard.admits(early, *ASKED)
    clock.now += 2 * SPAN
    assert not guard.admits(early, *ASKED)
    for step in range(10):
        clock.now += SPAN
        assert guard.admits(header(at=clock.now, nonce=f"{NONCE}{step}"), *ASKED)
    assert not guard.admits(early, *ASKED)
    assert len(guard._nonces) <= 4


def test_a_flood_can_not_make_it_forget(monkeypatch):
    monkeypatch.setattr("penstock.frontend.http.api_keys.NONCES_MAX", 3)
    guard = PeerGuard(OURS, Clock())
    said = [header(nonce=f"{NONCE}{number}") for number in range(4)]
    assert [guard.admits(each, *ASKED) for each in said] == [True, True, True, False]
    assert not guard.admits(said[0], *ASKED) and NONCES_MAX > 1000


def know_each_other(a: Stand, b: Stand, secret: ClusterSecret = OURS, theirs: ClusterSecret = OURS) -> None:
    a.service.secret, b.service.secret = secret, theirs
    b.service.gate.peer_guard = PeerGuard(theirs)
    a.service.cluster.peers = lambda: [b.server.url]  # type: ignore[method-assign]


ROOT = {"authorization": "Bearer the key of an administrator"}


async def test_an_administrators_key_is_not_passed_on_to_other_frontends():
    frontend = FrontendSettings(security=SecuritySettings(admin_keys=("the key of an administrator",)))
    async with stand(frontend=frontend) as a, stand(frontend=frontend) as b:
        know_each_other(a, b)
        seen: list[Any] = []
        admits = b.service.gate.peer_guard.admits
        b.service.gate.peer_guard.admits = lambda *args: seen.append(args) or admits(*args)  # type: ignore[method-assign]
        assert (await b.chat("counted by b")).status == 200
        found = await (await a.http.get("/admin/status", headers=ROOT)).json()
        assert found["requests"]["ok"] == 1, "the other frontend let us in"
        request = b.records[0].id
        told = await (await a.http.get(f"/admin/explain/{request}", headers=ROOT)).json()
        assert told["request"]["id"] == request
        assert (await a.http.get("/metrics")).status == 200
        assert len(seen) == 2 and all(args[0] is not None for args in seen)
        assert (await b.http.get("/admin/status")).status == 401
        assert b.service.gate.peer_guard.refused == {}


async def test_a_wrong_secret_between_frontends_is_counted_and_told(caplog):
    frontend = FrontendSettings(security=SecuritySettings(admin_keys=("the key of an administrator",)))
    async with stand(frontend=frontend) as a, stand(frontend=frontend) as b:
        know_each_other(a, b, OURS, OTHER)
        assert (await b.chat("not counted")).status == 200
        found = await (await a.http.get("/admin/status", headers=ROOT)).json()
        assert found["requests"]["ok"] == 0
        assert "another cluster secret" in caplog.text
        theirs = await (await b.http.get("/admin/status", headers=ROOT)).json()
        assert any("wrong secret" in finding["text"] for finding in theirs["findings"])
        assert 'penstock_notes_total{kind="peer_request_wrong_secret"} 1' in await (await b.http.get("/metrics")).text()


async def test_a_signature_opens_only_reading(caplog):
    frontend = FrontendSettings(security=SecuritySettings(admin_keys=("the key of an administrator",)))
    async with stand(frontend=frontend) as s:
        s.service.gate.peer_guard = PeerGuard(OURS)
        import time

        host = s.server.url.removeprefix("http://")
        said = signature(OURS, "POST", host, "/clear_kv_blocks", int(time.time()), NONCE)
        assert (await s.http.post("/clear_kv_blocks", headers={HEADER: said})).status == 401
        said = signature(OURS, "POST", host, "/v1/chat/completions", int(time.time()), NONCE)
        assert (await s.chat(headers={HEADER: said})).status == 200  # no key is needed here, and none is gained
        assert s.engines[0].resets == 0 and HEADER not in s.engines[0].headers[0]
