"""How does a test make NATS credentials? An operator, an account and a user, as nsc would; and a server's config."""

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import nkeys


def seed(prefix: int) -> tuple[bytes, Any]:
    """Return a new seed and its key pair."""
    made = nkeys.encode_seed(os.urandom(32), prefix)
    return made, nkeys.from_seed(made)


def public(pair: Any) -> str:
    return str(pair.public_key.decode())


def jwt(subject: Any, issuer: Any, name: str, claims: dict[str, Any]) -> str:
    body = {"iat": 1_700_000_000, "iss": public(issuer), "name": name, "sub": public(subject), "nats": claims}
    digest = hashlib.sha256(json.dumps(body).encode()).digest()
    body["jti"] = base64.b32encode(digest).decode().rstrip("=")
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    signed = ".".join(_part(json.dumps(part, separators=(",", ":")).encode()) for part in (head, body))
    return f"{signed}.{_part(issuer.sign(signed.encode()))}"


def credentials(folder: Path) -> tuple[str, Path]:
    """Return a server's config with an operator in it, and the file of a user's credentials."""
    (_, operator), (_, account), (words, user) = (
        seed(nkeys.PREFIX_BYTE_OPERATOR),
        seed(nkeys.PREFIX_BYTE_ACCOUNT),
        seed(nkeys.PREFIX_BYTE_USER),
    )
    limits = {"subs": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1, "payload": -1}
    of_operator = jwt(operator, operator, "operator", {"type": "operator", "version": 2})
    of_account = jwt(
        account, operator, "account", {"type": "account", "version": 2, "limits": {**limits, "wildcards": True}}
    )
    of_user = jwt(user, account, "user", {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1})
    creds = folder / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{of_user}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{words.decode()}\n------END USER NKEY SEED------\n"
    )
    config = f'operator: "{of_operator}"\nresolver: MEMORY\nresolver_preload: {{{public(account)}: "{of_account}"}}\n'
    return config, creds


def nkey(folder: Path) -> tuple[str, Path]:
    """Return a server's config with one nkey in it, and the file of its seed."""
    words, user = seed(nkeys.PREFIX_BYTE_USER)
    file = folder / "user.nk"
    file.write_bytes(words)
    return f"authorization: {{users: [{{nkey: {public(user)}}}]}}\n", file


def _part(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
