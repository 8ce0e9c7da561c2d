"""Command ``penstock audit``: reads the encrypted log of prompts and answers, and checks that nothing is missing."""

import re
from pathlib import Path

import click
import msgspec

from penstock.kernel.errors import ConfigError

EPILOG = """\b
Examples:
  penstock audit read /var/log/penstock-audit --key audit.key
  penstock audit read /var/log/penstock-audit --key audit.key | jq 'select(.tenant == "acme") | .prompt'

Ends with 1 where a file was cut, changed, moved or is missing; what can be read is printed before. A file without an
end belongs to a process that runs, or was killed.
"""


@click.group("audit", epilog=EPILOG, short_help="Read the log of prompts and answers.")
def command() -> None:
    """Read the log of prompts and answers."""


@command.command("read", epilog=EPILOG)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--key", "key_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Its key."
)
def read(folder: Path, key_file: Path) -> int:
    """Print what FOLDER holds, one request a line as JSON, and its faults on standard error."""
    try:
        from penstock_extras.audit import audit_frames
    except ImportError as error:
        raise ConfigError(f"the audit log needs a package: {error}", hint="pip install 'penstock[audit]'") from error
    key = audit_frames.read_key(key_file)
    faults: list[str] = []
    last: dict[str, int] = {}
    for path in sorted(folder.glob(f"*{audit_frames.SUFFIX}")):
        process = re.sub(r"-\d+$", "", path.stem)
        try:
            number = audit_frames.number_of(path)
            if number != last.get(process, -1) + 1:
                faults.append(f"{path}: is number {number} of its process, after {last.get(process, 'none')}")
            last[process] = number
            for entry in audit_frames.frames(path, key):
                plain = msgspec.structs.asdict(entry)
                for name in ("prompt", "answer"):
                    plain[name] = plain[name].decode("utf-8", "replace")
                click.echo(msgspec.json.encode(plain))
        except audit_frames.AuditFault as error:
            faults.append(str(error))
    for fault in faults:
        click.echo(fault, err=True)
    return 1 if faults else 0
