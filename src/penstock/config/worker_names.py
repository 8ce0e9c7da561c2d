"""Worker names of a pool, safe in files, headers and logs, whatever the model's name."""

import re

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_LENGTH_MAX = 100
"""Characters of a model's name in its workers' names: with pool and number a file name stays below 255 bytes."""


def pool_prefix(model: str, models: int) -> str:
    """Return the prefix of a pool's name in its workers' names; empty where there is only one model.

    Two models may get the same prefix; `penstock.config.checks` refuses them.
    """
    if models == 1:
        return ""
    return (_UNSAFE.sub("-", model)[:_LENGTH_MAX].strip("-.") or "model") + "-"
