"""Plugin tokens: a plugin shows the token of its id to register; without tokens none may, unless set insecure."""

import hmac
from collections.abc import Mapping
from pathlib import Path

from penstock.config.cluster_secret_file import private_text
from penstock.kernel.errors import ConfigError
from penstock.planner.settings_plugins import PluginSettings

LENGTH_MIN = 16
"""Characters that a token must have."""
_NOBODY = "\0" * LENGTH_MIN
HEADER = "authorization"
_SCHEME = "Bearer "


class PluginTokens:
    """Plugin id -> token. No token is ever printed.

    Raises:
        ConfigError: a token is too short.
    """

    def __init__(self, tokens: Mapping[str, str], *, insecure: bool = False) -> None:
        for id, token in tokens.items():
            if len(token) < LENGTH_MIN:
                raise ConfigError(
                    f"the token of planner plugin {id} has {len(token)} characters; it takes {LENGTH_MIN} or more",
                    hint='python -c "import secrets; print(secrets.token_urlsafe(32))" makes one',
                )
        self._tokens = dict(tokens)
        self.insecure = insecure

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"Tokens({len(self)})"

    def allows(self, id: str, metadata: Mapping[str, str]) -> bool:
        """Return whether a call with ``metadata`` may speak for a plugin; compared in constant time."""
        shown = _bearer_token(metadata)
        expected = self._tokens.get(id)
        right = hmac.compare_digest(shown, (expected or _NOBODY).encode())
        if expected is None:
            return self.insecure
        return right

    def allows_any(self, metadata: Mapping[str, str]) -> bool:
        """Return whether a call comes from any of the plugins, or every caller is allowed."""
        shown = _bearer_token(metadata)
        # All are compared, so that the time does not reveal which one matched.
        matches = [hmac.compare_digest(shown, token.encode()) for token in self._tokens.values()]
        return any(matches) or (self.insecure and not self._tokens)

    def shown_to(self, id: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata that proves to a plugin that its planner calls."""
        token = self._tokens.get(id)
        return () if token is None else ((HEADER, _SCHEME + token),)


def tokens_of(settings: PluginSettings) -> PluginTokens:
    """Return the tokens of settings and file.

    Raises:
        ConfigError: the file can't be read, other users may read it, or it holds something else.
    """
    tokens = dict(settings.tokens)
    if settings.tokens_file is not None:
        tokens |= _read_tokens(Path(settings.tokens_file))
    return PluginTokens(tokens, insecure=settings.insecure)


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows a token."""
    return () if token is None else ((HEADER, _SCHEME + token),)


def _bearer_token(metadata: Mapping[str, str]) -> bytes:
    value = metadata.get(HEADER, "")
    return value.removeprefix(_SCHEME).encode("utf-8", "replace") if value.startswith(_SCHEME) else b""


def _read_tokens(path: Path) -> dict[str, str]:
    name = f"planner.plugins.tokens_file {path}"
    tokens: dict[str, str] = {}
    for number, line in enumerate(private_text(path, name).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"{name}, line {number}: {len(words)} words; it takes two, ID TOKEN")
        tokens[words[0]] = words[1]
    return tokens
