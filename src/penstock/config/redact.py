"""Redacts secrets given as flags from a command line before it is written down."""

import re
from collections.abc import Sequence

from penstock.config.derived.knobs import derive
from penstock.config.settings.cluster_settings import ClusterSettings

HIDDEN = "***"
_OPTIONS = ("api_key", "admin_key", "keys")
"""Options of commands that are no settings; ``keys`` of tenants, which settings hold as digests alone."""


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command line with every secret replaced by ``***``, for the run folder.

    Whole groups given as YAML, such as ``--set frontend={security: {api_keys: k}}``, lose their whole value.
    """
    names = {*_OPTIONS, *(knob.path[-1] for knob in derive(ClusterSettings) if knob.knob.secret)}
    secret = re.compile(rf"(?:^|[^a-z])(?:{'|'.join(sorted(names))})(?:$|[^a-z])")
    found: list[str] = []
    hide_next = False
    for word in arguments:
        if hide_next and not word.startswith("--"):
            found.append(HIDDEN)
            hide_next = False
            continue
        head, equals, _ = word.partition("=")
        if head == "--set" and equals:
            head = f"--set={word.split('=')[1]}"
        is_secret = bool(secret.search(word.replace("-", "_").lower()))
        hide_next = is_secret and word.startswith("--") and not equals
        found.append(f"{head}={HIDDEN}" if is_secret and equals else word)
    return found
