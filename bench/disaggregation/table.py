"""What came out? Tables of the page: parity, the loads that each family holds, shares at each load, rules, live."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from plan import HELD, Work
from sweep import middle_of

FAMILIES = ("aggregated", "split", "mix")
TIE = 0.05
"""Loads that differ by less than this share are held equally well."""
AHEAD = 0.02
"""A family is ahead where its best layout keeps so much more of all requests in SLO."""
Row = dict[str, Any]
WHO = {"ours": "ours", "peer": "Dynamo"}


def parity(rows: Sequence[Row]) -> str:
    """Set our simulation beside Dynamo's, with each side's TTFT taken apart."""
    lines = [
        "| trace, arrivals, KV | mode | | mean TTFT ms | until the KV is there | from then on | p99 TTFT ms "
        "| mean ITL ms | mean end to end ms | reuse | equal prefills |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mine, other in zip(rows[::2], rows[1::2], strict=True):
        speed = "" if mine["speed"] == 1 else f", {mine['speed']:g} of the rate, spread"
        head = f"{mine['trace']}{speed}, {'64 GB/s' if mine['moved'] else 'at once'} | {mine['mode']}"
        for row in (mine, other):
            lines.append(
                f"| {head} | {WHO[row['who']]} | {_ms(row['ttft'])} | {_ms(row['prefill'])} | {_ms(row['after'], 2)} "
                f"| {_ms(row['ttft_p99'], 0)} | {_ms(row['itl'], 3)} | {_ms(row['e2e'], 0)} | {row['reuse']:.4f} | |"
            )
        change = {name: mine[name] / other[name] - 1 for name in ("ttft", "prefill", "ttft_p99", "itl", "e2e")}
        change["reuse"] = mine["reuse"] / other["reuse"] - 1 if other["reuse"] else 0.0
        lines.append(
            f"| | | change | {change['ttft']:+.1%} | {change['prefill']:+.1%} "
            f"| {_signed_ms(mine['after'] - other['after'])} | {change['ttft_p99']:+.1%} | {change['itl']:+.1%} "
            f"| {change['e2e']:+.1%} | {change['reuse']:+.1%} | {mine['equal']:.0%} |"
        )
    return "\n".join(lines)


def two_prompts(row: Row) -> str:
    """Say when each of two prompts that meet on a prefill worker is done."""
    mine, other = (" and ".join(_ms(at) for at in row[who]) for who in ("ours", "peer"))
    return (
        "Two prompts of 8,192 tokens, a full pass each, on one prefill worker, the second 100 ms after the first: "
        f"their KV is there after {mine} ms, at Dynamo's after {other} ms."
    )


def held(rows: Sequence[Row], work: Work) -> str:
    """Say which load each family holds by each pair, with its best layout, and whose is the highest."""
    lines = [
        f"| TTFT s, ITL ms | {' | '.join(FAMILIES)} | most by |",
        "|---|---|---|---|---|",
    ]
    for number, pair in enumerate(work.pairs):
        best = {family: best_held(rows, work, family, number) for family in FAMILIES}
        cells = [_load(best[family]) for family in FAMILIES]
        lines.append(f"| {_pair(pair)} | {' | '.join(cells)} | {winner(best)} |")
    return "\n".join(lines)


def shares(rows: Sequence[Row], work: Work) -> str:
    """Show the best share in SLO of each family at each load."""
    lines = [
        f"| TTFT s, ITL ms | {' | '.join(f'{rate:g}/s' for rate in work.rates)} |",
        "|---|" + "---|" * len(work.rates),
    ]
    for number, pair in enumerate(work.pairs):
        cells = []
        for rate in work.rates:
            found = [best_share(rows, work, family, number, rate) for family in FAMILIES]
            top = max(found)
            cells.append(" / ".join(f"**{share:.0%}**" if share > top - 0.005 else f"{share:.0%}" for share in found))
        lines.append(f"| {_pair(pair)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def score(rows: Sequence[Row], works: Sequence[Work]) -> str:
    """Count by how many pairs each family holds the most load, and in how many cells it alone is ahead."""
    names = (*FAMILIES, "several", "none")
    lines = [
        f"| | {' | '.join(f'most load: {name}' for name in names)} "
        f"| {' | '.join(f'ahead: {family}' for family in FAMILIES)} | of cells |",
        "|---|" + "---:|" * (len(names) + len(FAMILIES) + 1),
    ]
    for work in works:
        mine = [row for row in rows if row["work"] == work.name]
        most = [
            winner({family: best_held(mine, work, family, number) for family in FAMILIES})
            for number in range(len(work.pairs))
        ]
        counts = [sum(one == name for one in most) for name in (*FAMILIES, "", "none")]
        counts[3] = len(most) - sum(counts)
        ahead = [alone(mine, work, number, rate) for number in range(len(work.pairs)) for rate in work.rates]
        cells = [*counts, *(sum(one == family for one in ahead) for family in FAMILIES), len(ahead)]
        lines.append(f"| {work.name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def alone(rows: Sequence[Row], work: Work, number: int, rate: float) -> str:
    """Name the family that keeps `AHEAD` more in SLO than any other by a pair at a load; empty where none does."""
    found = sorted((best_share(rows, work, family, number, rate), family) for family in FAMILIES)
    return found[-1][1] if found[-1][0] >= found[-2][0] + AHEAD else ""


def rules(rows: Sequence[Row], works: Iterable[Work]) -> str:
    """Show what becomes of each family's best layout when the rule of handing off, the link or chunking is another."""
    lines = [
        "| traffic, load | layout | hand-off | handed off | mean TTFT ms | mean ITL ms | p99 gap ms "
        "| in SLO: tightest ITL | middle pair | tightest TTFT |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for work in works:
        mine = [row for row in rows if row["work"] == work.name]
        columns = len(work.itl)
        spots = ((len(work.ttft) - 1) * columns, middle_of(work), columns - 1)
        for key in dict.fromkeys((row["layout"], row["rate"], row["conditional"], row["link"]) for row in mine):
            same = [row for row in mine if (row["layout"], row["rate"], row["conditional"], row["link"]) == key]
            handed = median(row["handed"] / row["submitted"] for row in same)
            values = " | ".join(f"{median(row['shares'][spot] for row in same):.0%}" for spot in spots)
            layout, rate, rule, link = key
            slower = "" if link == 1 else f", link times {link:g}"
            rule = "-" if handed == 0 else rule
            lines.append(
                f"| {work.name}, {rate:g}/s | {layout} | {rule}{slower} | {handed:.0%} "
                f"| {_ms(median(row['ttft_mean'] for row in same), 0)} "
                f"| {_ms(median(row['itl_mean'] for row in same))} | {_ms(median(row['gap_p99'] for row in same))} "
                f"| {values} |"
            )
    return "\n".join(lines)


def live(rows: Sequence[Row]) -> str:
    """Set live runs beside the simulated ones of the same layouts."""
    lines = [
        "| layout | | in SLO, tight ITL | in SLO, tight TTFT | mean TTFT ms | mean ITL ms | the run |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["family"], row["layout"], row["who"])):
        verdict = row.get("verdict", "")
        if row.get("cpu") is not None:
            verdict += f", CPU {row['cpu']:.0%}"
        lines.append(
            f"| {row['layout']} | {row['who']} | {row['tight']:.0%} | {row['loose']:.0%} | {_ms(row['ttft'])} "
            f"| {_ms(row['itl'], 2)} | {verdict} |"
        )
    return "\n".join([*lines, "", *order(rows)])


def order(rows: Sequence[Row]) -> list[str]:
    """Say for each pair who is best, simulated and live, among the layouts that ran live."""
    ran = {row["layout"] for row in rows if row["who"] == "live"}
    told = []
    for pair, name in (("tight", "tight ITL"), ("loose", "tight TTFT")):
        best = {
            who: max((row for row in rows if row["who"] == who and row["layout"] in ran), key=lambda row: row[pair])
            for who in ("simulated", "live")
        }
        same = best["simulated"]["family"] == best["live"]["family"]
        told.append(
            f"- {name}: best simulated is {best['simulated']['layout']}, best live {best['live']['layout']}: "
            f"the order of the families {'holds' if same else 'does not hold'}."
        )
    return told


# --- figures --------------------------------------------------------------------------------------------------------


def share_of(rows: Sequence[Row], layout: str, number: int, rate: float) -> float:
    """Return the median share in SLO of a layout; what was given up at a lighter load has none."""
    seeds = {row["seed"] for row in rows if row["layout"] == layout}
    found = [row["shares"][number] for row in rows if row["layout"] == layout and row["rate"] == rate]
    return median([*found, *[0.0] * (len(seeds) - len(found))])


def best_share(rows: Sequence[Row], work: Work, family: str, number: int, rate: float) -> float:
    """Return the best median share of a family's layouts at a load."""
    return max((share_of(rows, layout, number, rate) for layout in _layouts(rows, work, family)), default=0.0)


def best_held(rows: Sequence[Row], work: Work, family: str, number: int) -> tuple[float, str]:
    """Return the highest load that a layout of the family holds, and the layout; 0 where none holds any."""
    found = [
        (load([(rate, share_of(rows, layout, number, rate)) for rate in work.rates]), layout)
        for layout in _layouts(rows, work, family)
    ]
    return max(found, key=lambda one: one[0], default=(0.0, ""))


def load(points: Sequence[tuple[float, float]]) -> float:
    """Return the load up to which `HELD` are in SLO, on lines between the measured (load, share); 0 for none."""
    last = points[0]
    if last[1] < HELD:
        return 0.0
    for here in points[1:]:
        if here[1] < HELD:
            return last[0] + (here[0] - last[0]) * (last[1] - HELD) / (last[1] - here[1])
        last = here
    return last[0]


def winner(best: dict[str, tuple[float, str]]) -> str:
    """Name the families that hold most; a few per cent are no difference."""
    most = max(held for held, _ in best.values())
    if not most:
        return "none"
    near = [family for family, (held, _) in best.items() if held >= most * (1 - TIE)]
    return "all" if len(near) == len(best) else ", ".join(near)


def _layouts(rows: Sequence[Row], work: Work, family: str) -> list[str]:
    return list(dict.fromkeys(row["layout"] for row in rows if row["family"] == family))


def _load(best: tuple[float, str]) -> str:
    return f"{best[0]:.3g}/s ({best[1]})" if best[0] else "-"


def _pair(pair: tuple[float, float]) -> str:
    return f"{pair[0]:g}, {pair[1] * 1e3:g}"


def _ms(value: float, digits: int = 1) -> str:
    return f"{value * 1e3:,.{digits}f}"


def _signed_ms(value: float) -> str:
    return f"{value * 1e3:+.2f} ms"
