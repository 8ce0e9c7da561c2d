"""JWT verifier: the tenant of a token that an OIDC issuer signed, or why it is not accepted."""

from collections.abc import Collection

import jwt

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.tenant_settings import JwtSettings
from penstock.frontend.http.api_keys import Unauthorized
from penstock.frontend.tenants.tenant_desk import token_name
from penstock.kernel.errors import ClientError
from penstock_extras.jwt.issuer_keys import IssuerKeys

ALGORITHMS = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
"""Kind of key -> algorithms that it may be used with: signatures alone, so that no public key becomes a password."""
LEEWAY = 30.0
"""Seconds by which the clocks of issuer and frontend may differ."""
TOKEN_MAX = 16_384
"""Longest token in characters; a longer one is no token of a client."""


class JwtVerifier:
    """Accepts the tokens of one issuer.

    Args:
        tenants: names of the configured ones.
    """

    def __init__(self, settings: JwtSettings, tenants: Collection[str], keys: IssuerKeys) -> None:
        self._settings = settings
        self._tenants = tenants
        self.keys = keys

    async def close(self) -> None:
        """Close the connection to the issuer."""
        await self.keys.close()

    async def name(self, token: str) -> str:
        """Return the name under which the caller is written down: its tenant and that it came with a token.

        Raises:
            Unauthorized: the token is not valid, and why.
            ClientError: 403: it is valid, and names no tenant.
            OverloadedError: the issuer's keys are not known.
        """
        if len(token) > TOKEN_MAX:
            raise _token_not_accepted(f"it has more than {TOKEN_MAX} characters")
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise _token_not_accepted(str(error)) from error
        algorithm, kid = header.get("alg"), header.get("kid")
        if not any(algorithm in allowed for allowed in ALGORITHMS.values()):
            raise _token_not_accepted(f"its algorithm {str(algorithm)[:20]!r} is not accepted")
        key = await self.keys.key(kid)
        if key is None:
            raise _token_not_accepted("the issuer has no such key")
        if algorithm not in ALGORITHMS.get(key.key_type or "", ()):
            raise _token_not_accepted(f"its algorithm {algorithm} is not one of its key")
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=LEEWAY,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise _token_not_accepted(str(error)) from error
        tenant = claims.get(self._settings.tenant_claim)
        if not isinstance(tenant, str) or tenant not in self._tenants:
            raise ClientError(
                f"the token's claim {self._settings.tenant_claim} names no tenant that is known here",
                status=403,
                code="unknown_tenant",
            )
        return token_name(tenant)


def _token_not_accepted(reason: str) -> Unauthorized:
    return Unauthorized(f"this token is not accepted: {reason}", 'Bearer realm="penstock", error="invalid_token"')


def verifier_of(settings: ClusterSettings) -> JwtVerifier:
    """Return what checks the tokens of ``frontend.security.jwt``."""
    given = settings.frontend.security.jwt
    return JwtVerifier(given, settings.tenants, IssuerKeys(given))
