"""States of parts of the router, as a journal has them."""

from typing import Any

import msgspec


def written(part: Any, kind: Any = None) -> Any:
    """Return a part's state, of a kind, as it is read after it was written: nothing in it belongs to the part."""
    state = part.snapshot()
    plain = msgspec.to_builtins(state, builtin_types=(bytes,), enc_hook=list)
    return msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)), type(state) if kind is None else kind)
