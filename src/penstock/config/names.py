"""How are the workers of a pool called? Names that may stand in files, headers and logs, whatever the model's name."""

import re

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_LENGTH_MAX = 100
"""Characters of a model's name in its workers' names: with pool and number a file's name stays below 255 bytes."""


def pool_prefix(model: str, models: int) -> str:
    """Return what goes before a pool's name in its workers' names; nothing where there is only one model.

    Two models may come out alike; `penstock.config.checks` refuses them.
    """
    if models == 1:
        return ""
    return (_UNSAFE.sub("-", model)[:_LENGTH_MAX].strip("-.") or "model") + "-"
