"""Tenant desk: admits a tenant's request by models, classes, rate and budget, and settles its tokens at its end.

A tenant's bucket holds tokens per minute, reserved when a request arrives and settled when it ends.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.config.settings.tenant_settings import TenantSettings
from penstock.frontend.tenants.budget_ledger import BudgetLedger
from penstock.kernel.errors import ClientError, OverloadedError
from penstock.router.events import Closed, Preferences


class TokenBucket:
    """A bucket that holds one minute's tokens at most.

    A request that needs more than the whole bucket is let in by a full one, so that none is refused for ever; what it
    takes beyond is owed, and the next ones wait for it.

    Args:
        per_minute: tokens that come in a minute.
        now: seconds, any origin.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self.level = per_minute
        self._at = now

    def use(self, per_minute: float) -> None:
        """Go on with another rate: that of this process's part."""
        if per_minute != self.per_minute:
            self.level *= per_minute / self.per_minute
            self.per_minute = per_minute

    def fill(self, now: float) -> None:
        """Add what has come since the last time."""
        self.level = min(self.per_minute, self.level + (now - self._at) * self.per_minute / 60)
        self._at = now

    def wait(self, tokens: int) -> float:
        """Return the seconds until so many tokens may be taken; 0 where they may be now."""
        return max(0.0, min(float(tokens), self.per_minute) - self.level) * 60 / self.per_minute

    def take(self, tokens: float) -> None:
        """Take tokens, or give them back where the number is negative."""
        self.level = min(self.per_minute, self.level - tokens)

    @property
    def until_full(self) -> float:
        """Seconds until the bucket is full."""
        return max(0.0, self.per_minute - self.level) * 60 / self.per_minute


EXPECTED_OUTPUT = 128
"""Tokens that are reserved for an answer of which nobody says how long it may get; settled when it ends."""


@dataclass(slots=True)
class TenantAdmission:
    """A request that was let in. ``reserved``: tokens that count for it until it has ended."""

    tenant: str
    preferences: Preferences
    reserved: int
    headers: Mapping[str, str]


class TenantDesk:
    """The tenants of one frontend process.

    Args:
        processes: how many frontends there are now; each has its part of a rate.
        refused: called with the tenant and the limit of each refusal.
        clock: seconds, any origin.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantSettings],
        budgets: BudgetLedger,
        processes: Callable[[], int],
        refused: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tenants = tenants
        self.budgets = budgets
        self._processes = processes
        self._refused = refused
        self._clock = clock
        self._buckets = {
            name: TokenBucket(each.tokens_per_minute, clock())
            for name, each in tenants.items()
            if each.tokens_per_minute is not None
        }

    def may_use(self, tenant: str | None, name: str, behind: Collection[str]) -> bool:
        """Return whether a tenant may ask by a name, which is its own or one of ``behind``, all of which it may ask."""
        if tenant is None:
            return True
        named = self.tenants[tenant].names
        return named(name) or all(map(named, behind))

    def check_model(self, tenant: str | None, name: str, behind: Collection[str]) -> None:
        """Refuse a name by which a tenant may not ask.

        Raises:
            ClientError: 403.
        """
        if tenant is None or self.may_use(tenant, name, behind):
            return
        self._refused(tenant, "models")
        raise ClientError(
            f"the model {name!r} is not among those of this key",
            status=403,
            code="model_not_allowed",
            param="model",
            hint="GET /v1/models lists those that are",
        )

    def admit(self, tenant: str, preferences: Preferences, *, isl: int, osl: int | None) -> TenantAdmission:
        """Let a request in, and reserve its tokens.

        Args:
            isl, osl: tokens of its prompt, and at most of its answer where that is known.
        Raises:
            ClientError: 403: not this class.
            OverloadedError: 429: the rate or the budget is used up.
        """
        settings = self.tenants[tenant]
        preferences = self._preferences(tenant, settings, preferences)
        expected = preferences.osl if preferences.osl is not None else osl
        work = isl + (EXPECTED_OUTPUT if expected is None else expected)
        headers = self._rate(tenant, settings, work)
        if settings.budget is not None:
            self._budget(tenant, settings.budget, work, headers)
        if tenant in self._buckets:
            self._buckets[tenant].take(work)
        return TenantAdmission(tenant, preferences, work, headers)

    def settle(self, admission: TenantAdmission, closed: Closed | None) -> None:
        """Count what an ended request took in place of what was reserved; nothing where no engine had it."""
        used = closed.isl + closed.osl if closed is not None and closed.legs else 0
        tenant = admission.tenant
        if tenant in self._buckets:
            self._buckets[tenant].take(used - admission.reserved)
        if self.tenants[tenant].budget is not None:
            self.budgets.add(tenant, used - admission.reserved)

    def _preferences(self, tenant: str, settings: TenantSettings, given: Preferences) -> Preferences:
        """Return the preferences as they may be."""
        named, most = given.service_class, settings.priority_max
        if settings.classes and named is not None and named not in settings.classes:
            self._refused(tenant, "classes")
            raise ClientError(
                f"the class {named[:100]!r} is not among those of this key: {', '.join(settings.classes)}",
                status=403,
                code="class_not_allowed",
            )
        if settings.classes and named is None:
            named = settings.classes[0]
        if named == given.service_class and given.priority <= most and given.strict <= most:
            return given
        return msgspec.structs.replace(
            given, service_class=named, priority=min(given.priority, most), strict=min(given.strict, most)
        )

    def _rate(self, tenant: str, settings: TenantSettings, work: int) -> dict[str, str]:
        """Return the headers that tell the rate.

        Raises:
            OverloadedError: it is used up.
        """
        bucket = self._buckets.get(tenant)
        if bucket is None or settings.tokens_per_minute is None:
            return {}
        bucket.use(settings.tokens_per_minute / max(1, self._processes()))
        bucket.fill(self._clock())
        wait = bucket.wait(work)
        left = bucket.level - (0 if wait else work)
        headers = {
            "x-ratelimit-limit-tokens": str(settings.tokens_per_minute),
            "x-ratelimit-remaining-tokens": str(max(0, int(left))),
            "x-ratelimit-reset-tokens": _reset_time(bucket.until_full + (0 if wait else work * 60 / bucket.per_minute)),
        }
        if wait:
            self._refused(tenant, "tokens_per_minute")
            raise OverloadedError(
                f"more than {settings.tokens_per_minute} tokens per minute of {tenant}: this request needs about "
                f"{work}",
                retry_after=wait,
                status=429,
                code="rate_limit_exceeded",
                param=f"tenants.{tenant}.tokens_per_minute",
                headers=headers,
            )
        return headers

    def _budget(self, tenant: str, budget: int, work: int, headers: Mapping[str, str]) -> None:
        """Reserve tokens of the budget.

        Raises:
            OverloadedError: it is used up.
        """
        if self.budgets.used(tenant) + work > budget:
            self._refused(tenant, "budget")
            raise OverloadedError(
                f"the budget of {tenant} is used up: {self.budgets.used(tenant)} of {budget} tokens in this "
                f"{self.tenants[tenant].budget_period}, and this request needs about {work}",
                retry_after=self.budgets.left(tenant),
                status=429,
                code="insufficient_quota",
                param=f"tenants.{tenant}.budget",
                headers=headers,
            )
        self.budgets.add(tenant, work)


def token_name(tenant: str) -> str:
    """Return the name of a tenant's callers with tokens: tokens are short-lived, so they share one."""
    return f"{tenant}/jwt"


def most_output(fields: Mapping[str, Any]) -> int | None:
    """Return the most tokens that an answer may have, of all its choices; None where the body does not say."""
    found = [fields.get(name) for name in ("max_completion_tokens", "max_tokens")]
    most = next((number for number in found if isinstance(number, int) and number >= 0), None)
    choices = fields.get("n")
    return None if most is None else most * (choices if isinstance(choices, int) and choices > 0 else 1)


def _reset_time(seconds: float) -> str:
    """Write a duration as OpenAI does: 120ms, 7.5s, 6m0s."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{rest:.3g}s" if not minutes else f"{minutes:.0f}m{rest:.0f}s"
