"""Versions of messages between our processes: a message with a newer major version is refused.

A message has ``version``, a whole number that grows only where an older reader would misunderstand it. Fields that an
older reader may leave out are added without a new version: decoders ignore what they do not know. An absent version
is 1. Messages in another project's format (KV events are vLLM's) have none.
"""

from typing import Any, TypeVar

import msgspec

from penstock.kernel.errors import PenstockError

T = TypeVar("T")


class NewerVersion(PenstockError):
    """A message is of a newer major version than this process understands; it is refused, never guessed at."""

    def __init__(self, what: str, version: int, known: int) -> None:
        super().__init__(
            f"{what} has version {version}, and this process reads up to {known}",
            hint="processes of one cluster run the same release; update this one",
        )
        self.version = version


class _Versioned(msgspec.Struct):
    version: int = 1


def refuse_newer(version: int, known: int, what: str) -> None:
    """Refuse a version above the one that is known.

    Raises:
        NewerVersion: it is.
    """
    if version > known:
        raise NewerVersion(what, version, known)


class VersionedDecoder:
    """Decode messages of one type with a ``version`` field.

    Args:
        type: the struct; its default version is the newest that this process understands.
        what: what a message is called in errors, such as ``a worker's entry``.
        binary: msgpack rather than JSON.
    """

    def __init__(self, type: Any, what: str, *, binary: bool = False) -> None:
        codec = msgspec.msgpack if binary else msgspec.json
        fields = {field.name: field.default for field in msgspec.structs.fields(type)}
        self._known: int = fields["version"]
        self._what = what
        self._decode = codec.Decoder(type).decode
        self._peek = codec.Decoder(_Versioned).decode

    def decode(self, raw: bytes) -> Any:
        """Return the message.

        Raises:
            NewerVersion: its major version is newer; checked first, since its shape may be another one.
            msgspec.DecodeError: it is no such message.
        """
        try:
            found = self._decode(raw)
        except msgspec.DecodeError:
            refuse_newer(self._peek(raw).version, self._known, self._what)
            raise
        refuse_newer(found.version, self._known, self._what)
        return found
