"""Frame of a report page: self-contained HTML with its style, in light and dark, and tables."""

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --back: #fcfcfb; --ink: #1d1d1b; --dim: #66655f; --grid: #e4e2dc; --bad: #b3261e;
  --s0: #1f6f9f; --s1: #c2571a; --s2: #3d7d3d; --s3: #8a4f9e; --s4: #a07a10; --s5: #57606a; }
@media (prefers-color-scheme: dark) { :root { --back: #171816; --ink: #e8e6e0; --dim: #a09e96; --grid: #33342f;
  --bad: #ff8a80; --s0: #6cb6e0; --s1: #f0955c; --s2: #83c283; --s3: #c79ad6; --s4: #dcb84f; --s5: #a9b2bc; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 46rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin-bottom: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
.about, .data, .note, .none { color: var(--dim); font-size: .9rem; }
.invalid { border: 1px solid var(--bad); color: var(--bad); padding: .5rem .8rem; border-radius: .3rem; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--dim); } svg text.axis { fill: var(--ink); } svg text.mark { fill: var(--bad); }
.grid { stroke: var(--grid); } .line { fill: none; stroke-width: 2; }
line.mark { stroke: var(--bad); stroke-dasharray: 5 4; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } td, th { padding: .15rem .7rem .15rem 0; }
th { text-align: left; color: var(--dim); font-weight: 500; } td + td, th + th { text-align: right; }
.legend span { margin-right: 1rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
.scroll { overflow-x: auto; } a { color: var(--s0); }
"""


def page(title: str, about: str, sections: Iterable[str]) -> str:
    """Return a whole page of sections that are HTML already."""
    name = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style></head>\n<body><h1>{name}</h1>"
        f'<p class="about">{html.escape(about)}</p>\n' + "\n".join(sections) + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain text cells."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
