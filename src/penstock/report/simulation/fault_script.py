"""Faults and scaling policies of a simulated cluster, as a command line names them."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.simulate.scale_policy import ScalePolicy
from penstock.simulate.simulation_plan import Fault, FaultKind


def policy_of(text: str) -> ScalePolicy:
    """Import a scaling policy by ``MODULE:NAME``; a class is made without arguments.

    Raises:
        ConfigError: it can't be imported, or has no method decide.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"the policy {text!r} is not MODULE:NAME", hint="such as my_policies:Reactive")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed program does not look for modules in the current folder
        sys.path.insert(0, here)
    try:
        policy = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the policy {text!r} can't be imported: {error}") from error
    made = policy() if isinstance(policy, type) else policy
    if not isinstance(made, ScalePolicy):
        raise ConfigError(
            f"the policy {text!r} has no method decide(seen)", hint="see penstock.simulate.scale_policy.ScalePolicy"
        )
    return made


def fault_of(text: str) -> Fault:
    """Read ``at=60,kind=fail,worker=main-0,restart=5``.

    Raises:
        ConfigError: a field or its value is none of a fault's.
    """
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    return _fault({name.strip(): value.strip() for name, value in fields.items()}, f"the fault {text!r}")


def faults_of(path: Path) -> list[Fault]:
    """Read a JSON list of faults.

    Raises:
        ConfigError: the file can't be read, or an entry is no fault.
    """
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path} holds no list of faults")
    return [_fault(entry, f"{path}[{number}]") for number, entry in enumerate(entries)]


def _fault(entry: Any, where: str) -> Fault:
    if isinstance(entry, dict) and entry.get("restart") == "never":
        entry = {**entry, "restart": None}
    try:
        return msgspec.convert(entry, Fault, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: {error}",
            hint=f"a fault has at, kind ({', '.join(get_args(FaultKind))}), worker, pool, restart, role",
        ) from error
