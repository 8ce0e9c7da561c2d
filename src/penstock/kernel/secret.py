"""`ClusterSecret`: the one secret that the processes of a cluster share, from which every key is derived.

Each use has a key of its own, so that what one part of the system shows can't be used against another: keyed
BLAKE2b-256 (RFC 7693) with the purpose as its personalisation. Nothing here ever prints the secret.
"""

import hashlib
import hmac
from typing import Final, NoReturn

LENGTH_MIN = 16
"""Characters that a secret given by a person must have."""
_CONTEXT: Final = b"penstock cluster secret 1"


class ClusterSecret:
    """A secret text, and the keys derived from it.

    Raises:
        ValueError: the text is shorter than `LENGTH_MIN`; the message does not repeat it.
    """

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        if len(text) < LENGTH_MIN:
            raise ValueError(f"a cluster secret has at least {LENGTH_MIN} characters, not {len(text)}")
        # Hashed first, because a BLAKE2b key has at most 64 bytes and a person's secret may be longer.
        self._key = hashlib.blake2b(text.encode(), digest_size=32, key=_CONTEXT).digest()

    def __repr__(self) -> str:
        return "ClusterSecret(***)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster secret is not written down")

    def __copy__(self) -> "ClusterSecret":
        return self

    def derive(self, purpose: str) -> bytes:
        """Return the 32-byte key of one purpose, a name of at most 16 bytes."""
        return hashlib.blake2b(digest_size=32, key=self._key, person=purpose.encode()).digest()

    def sign(self, purpose: str, *parts: bytes) -> str:
        """Return the authentication code of some parts, as hexadecimal text.

        Each part goes in with its length, so that moving a byte from one part to the next changes the code.
        """
        mac = hashlib.blake2b(digest_size=32, key=self.derive(purpose))
        for part in parts:
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.hexdigest()

    def verify(self, code: str, purpose: str, *parts: bytes) -> bool:
        """Tell whether a code is that of these parts, in a time that does not depend on how close it is."""
        return hmac.compare_digest(code.encode("utf-8", "replace"), self.sign(purpose, *parts).encode())
