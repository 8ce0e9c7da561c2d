"""Writes the page of settings: every knob in a table, derived from the structs."""

from itertools import groupby

import msgspec

from penstock.config.derived.knobs import RESERVED, DerivedKnob, derive, range_text, type_text
from penstock.config.reading.units import format_number
from penstock.config.settings.cluster_settings import ClusterSettings

HEAD = """\
# Configuration

One YAML file sets up a cluster; without one, `penstock up` takes the embedded default: one simulated model in
one pool of four engines. `penstock config init` prints a commented file to start from, `penstock config check
FILE` says what is wrong with one, `penstock config show FILE` what it comes to and where each value came from,
and `penstock config schema` is the JSON Schema for editors.

## Where values come from

Later ones win:

1. the default in the tables below,
2. the YAML file,
3. the environment: `PENSTOCK_` and the name in upper case, parts joined by two underscores, such as
   `PENSTOCK_ROUTER__COST__OVERLAP_CREDIT=2` or `PENSTOCK_MODELS__SIM__POOLS__MAIN__REPLICAS=8`; in the name of
   a model or pool every run of other characters than letters, digits and `_` is one `_`,
4. flags of `up`, `serve` and `attach`: `--router.cost.overlap_credit 2`, or `--set
   router.cost.overlap_credit=2`. A model with dots in its name is put in quotes: `--set
   'models."org/model-1.5".pools.main.replicas=2'`.

A whole group or entry is given as YAML: `--set 'models={small: {tokenizer: builtin:sim, pools: {main:
{replicas: 2}}}}'`. A list is `[a, b]` or `a,b`. `models` given in a file replaces the default; it is not merged
with it.

Unknown keys and unknown `PENSTOCK_*` names are errors. All problems are listed at once, each with file, line
and column, and nothing starts: the exit status is 2.

## Values

Numbers take a unit: durations `200ms`, `5s`, `2m`, `1h`, `1d`; sizes and counts `8k`, `1M` (powers of 1000) or
`8Ki`, `64GiB` (powers of 1024); shares `80%`; rates `10/s`, `600/min`. Without a unit they are in the unit of
the table. YAML's `<<` and aliases work; `null` unsets a value that may be unset.

Secrets are never written to the run folder, a log or the page. Give them by environment.

Knobs marked *Live* can be changed while the cluster runs: `penstock set router.cost.overlap_credit=2`, or change the
file and send SIGHUP to `penstock up`. [operating.md](../guides/operating.md) says more.

These environment names are not settings: """

TAIL = """
## Rules across settings

- A model has at least one pool, and all its pools have one block size.
- A pool whose engine is not `sim` lists `urls`; no server is listed twice, and none is the cluster's own
  endpoint.
- An address other than loopback needs `frontend.security.api_keys`, or `frontend.security.insecure: true`.
- `tls_cert` and `tls_key` come together. A key that opens `/admin` is not one that clients have.
- `frontend.admin_port` differs from `frontend.port`; several frontend processes need a fixed port and share no
  admin port.
- A simulated engine's `max_num_batched_tokens` holds one decode step of `max_num_seqs` requests."""


def configuration_page() -> str:
    """Return the page of settings as Markdown: the site has it, and `penstock config docs` prints it."""
    reserved = "; ".join(f"`{name}` ({meaning})" for name, meaning in RESERVED.items())
    parts = [HEAD + reserved + "."]
    knobs = derive(ClusterSettings)
    ordered = sorted(enumerate(knobs), key=lambda pair: (_order(knobs, pair[1]), pair[0]))
    for group, members in groupby((knob for _, knob in ordered), key=lambda knob: knob.group):
        title = f"`{group.replace('*', 'NAME')}`" if group else "Top"
        rows = "\n".join(_knob_table_row(knob) for knob in members)
        parts.append(f"## {title}\n\n| Key | Default | Unit | Takes | What it does |\n|---|---|---|---|---|\n{rows}")
    return "\n\n".join(parts) + "\n" + TAIL


def _order(knobs: list[DerivedKnob], knob: DerivedKnob) -> int:
    """Keep groups together, in the order in which they first appear."""
    return next(index for index, other in enumerate(knobs) if other.group == knob.group)


def _knob_table_row(knob: DerivedKnob) -> str:
    takes = type_text(knob.type)
    allowed = range_text(knob.knob)
    if allowed is not None:
        takes += f", {allowed}"
    notes = [knob.knob.help]
    if knob.knob.secret:
        notes.append("Secret.")
    if knob.knob.live:
        notes.append("*Live.*")
    cells = [f"`{knob.path[-1]}`", _default(knob), knob.knob.unit or "", takes, " ".join(notes)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(knob: DerivedKnob) -> str:
    value = knob.default
    if knob.is_mapping:
        return "one model `sim` in one pool of four engines" if value else "none"
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"`{format_number(value, knob.knob.unit)}`"
    if isinstance(value, msgspec.Struct):
        value = [f"{name}: {number:g}" for name, number in msgspec.structs.asdict(value).items()]
    if isinstance(value, tuple | list | dict):
        return ", ".join(f"`{item}`" for item in value) or "none"
    return f"`{value}`"
