"""The import contract of the companions: the server imports none of their modules but by `penstock.extension`.

`tests/companions.json` says which modules are whose while they still lie in the server's folders; the exceptions that
are left stand in pyproject.toml. usage: python -m tests.import_contracts   lists today's arrows, as pyproject has them
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
from importlinter import Contract, ContractCheck, output
from importlinter.domain import fields

MAP = Path(__file__).parent / "companions.json"
SERVER = "penstock"


def companion_of(module: str, companions: dict[str, list[str]]) -> str:
    """Return whose a module is: the longest entry that it is, or lies below."""
    best, owner = "", SERVER
    for name, entries in companions.items():
        for each in entries:
            prefix = each.removesuffix(".*")
            below = each.endswith(".*") and module.startswith(f"{prefix}.")
            if (module == prefix or below) and len(prefix) > len(best):
                best, owner = prefix, name
    return owner


def arrows(graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    """Yield what the server imports of companions: importing and imported module."""
    companions = json.loads(MAP.read_text())
    owners = {module: companion_of(module, companions) for module in graph.modules if module.split(".")[0] == SERVER}
    for module, owner in sorted(owners.items()):
        if owner == SERVER:
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                if owners.get(imported, SERVER) != SERVER:
                    yield module, imported


class CompanionContract(Contract):
    """The server imports no companion, but for ``ignore_imports``, each of which must still be there."""

    ignore_imports = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        left = {f"{importer} -> {imported}" for importer, imported in arrows(graph)}
        allowed = set(self.ignore_imports or ())  # type: ignore[call-overload]
        faults = [f"{one} goes past penstock.extension" for one in sorted(left - allowed)]
        faults += [f"{one} is gone: take it out of ignore_imports" for one in sorted(allowed - left)]
        return ContractCheck(kept=not faults, metadata={"faults": faults})

    def render_broken_contract(self, check: Any) -> None:
        for fault in check.metadata["faults"]:
            output.print_error(fault)


if __name__ == "__main__":
    for importer, imported in arrows(grimp.build_graph(SERVER, cache_dir=None)):
        print(f'  "{importer} -> {imported}",')
