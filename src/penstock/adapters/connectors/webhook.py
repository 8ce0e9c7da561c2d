"""Webhook connector: scales by HTTP; posts each planner decision, signed with HMAC-SHA256, until it is accepted.

The receiver computes HMAC-SHA256 with the secret over ``TIMESTAMP.BODY`` (the header's seconds since 1970, a
dot, the raw body), compares it with the header in constant time, refuses old timestamps, and takes each
``decision_id`` once: a decision is posted again where its answer was lost.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec

from penstock.adapters.http_session import within
from penstock.config.settings.planning_settings import WebhookSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Pool
from penstock.planner.plugins.proposals import Flip, Reason

log = logging.getLogger("penstock.planner")

SIGNATURE, TIMESTAMP, IDEMPOTENCY = "x-penstock-signature", "x-penstock-timestamp", "idempotency-key"
SECRET_MIN = 16
TIMEOUT = 10.0
"""Seconds that one POST may take; a receiver that needs longer should accept it first and scale afterwards."""
TRIES = 5
"""How often a POST is sent before it counts as failed, 7.5 s of waiting in all: a restart of the receiver fits in.

The planner posts a decision that failed again with its next tick.
"""
BACKOFF = 0.5
BACKOFF_MAX = 30.0
"""Seconds of the wait after the first failure, which doubles with each, and of the longest wait."""
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same POST may be accepted a little later."""


class WebhookPost(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a POST: how many replicas each pool should have, all of them, and why."""

    version: int = 1
    decision_id: str
    targets: dict[str, int]
    flips: list[Flip]
    reasons: list[str]


class WebhookConnector:
    """A `penstock.adapters.connectors.scale_connector.ScaleConnector` whose decisions are posted.

    An accepted decision counts as desired: the receiver reports no replicas; those are observed where they serve.

    Args:
        pools: as they are before the first decision.
    Raises:
        ConfigError: there is no URL, or no secret.
    """

    def __init__(self, settings: WebhookSettings, *, pools: Mapping[str, Pool]) -> None:
        if settings.url is None:
            raise ConfigError("planner.webhook.url is not set", hint="name the URL that takes the POST")
        if settings.secret is None or len(settings.secret) < SECRET_MIN:
            raise ConfigError(
                f"planner.webhook.secret is {'not set' if settings.secret is None else 'too short'}",
                hint=f"set PENSTOCK_PLANNER__WEBHOOK__SECRET to {SECRET_MIN} characters or more, and tell the receiver",
            )
        self._url = settings.url
        self._secret = settings.secret
        self._pools = dict(pools)
        self._life = secrets.token_hex(6)
        """Ids of another run must not be confused with those of this run."""
        self._number = 0
        self._pending: WebhookPost | None = None
        """A decision that is not accepted yet; the same one again keeps its id."""
        self._http = within(TIMEOUT)
        self._busy = asyncio.Lock()

    async def look(self) -> Mapping[str, Pool]:
        return self._pools

    async def scale(
        self, targets: Mapping[str, int], flips: Sequence[Flip], reasons: Sequence[Reason]
    ) -> dict[str, str]:
        if self._busy.locked():
            return dict.fromkeys(targets, "the decision before it is still being posted")
        async with self._busy:
            unknown = {name: "there is no such pool" for name in targets if name not in self._pools}
            wanted = {name: pool.desired for name, pool in self._pools.items()}
            wanted |= {name: count for name, count in targets.items() if name not in unknown}
            pending = self._pending
            if pending is None or (pending.targets, pending.flips) != (wanted, list(flips)):
                self._number += 1
                pending = self._pending = WebhookPost(
                    decision_id=f"{self._life}-{self._number}",
                    targets=wanted,
                    flips=list(flips),
                    reasons=[each.text for each in reasons],
                )
            why = await self._post(pending)
            if why is not None:
                return {**dict.fromkeys(targets, why), **unknown}
            self._pending = None
            for name, count in wanted.items():
                self._pools[name] = msgspec.structs.replace(self._pools[name], desired=count)
            return unknown

    def describe(self) -> str:
        return f"POST {self._url}"

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, posted: WebhookPost) -> str | None:
        """Post until it is accepted; return why it was not, or None."""
        body = msgspec.json.encode(posted)
        why = ""
        for number in range(TRIES):
            if number:
                await asyncio.sleep(min(BACKOFF_MAX, BACKOFF * 2 ** (number - 1)))
            at = str(int(time.time()))
            headers = {
                "content-type": "application/json",
                TIMESTAMP: at,
                SIGNATURE: f"sha256={signature(self._secret, at, body)}",
                IDEMPOTENCY: posted.decision_id,
            }
            try:
                async with self._http.session.post(
                    self._url, data=body, headers=headers, allow_redirects=False
                ) as answer:
                    if answer.status < 300:
                        return None
                    answer_text = (await answer.content.read(200)).decode(errors="replace").strip()
                    why = f"{self._url} answers {answer.status}" + (f": {answer_text}" if answer_text else "")
                    if answer.status not in _AGAIN:
                        break
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = f"{self._url} can't be reached: {str(error) or type(error).__name__}"
        log.warning("decision %s was not taken: %s", posted.decision_id, why)
        return why


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return the code by which a POST shows that it knows the secret: hexadecimal HMAC-SHA256 of TIMESTAMP.BODY."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
