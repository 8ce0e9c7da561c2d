"""Types of the page's scripts: derived from the structs, fresh, and those that the scripts name."""

import re

import msgspec

from penstock.page.page_file import BROWSER
from penstock.page.page_schema import Chart
from tests.frontend.page_types import ASKED, _type, declarations

SCRIPTS = {path.name: path.read_text() for path in BROWSER.iterdir() if path.name.endswith(".js")}


class Given(msgspec.Struct):
    name: str
    pair: tuple[int, str]
    tags: list[str | None]
    by_name: dict[str, float]
    more: "Given | None" = None


def test_the_declarations_are_fresh() -> None:
    made = "python -m tests.frontend.page_types > src/penstock/page/browser/types.d.ts"
    assert (BROWSER / "types.d.ts").read_text() == declarations(), f"run: {made}"


def test_every_type_that_a_script_names_is_declared() -> None:
    named = {name for text in SCRIPTS.values() for name in re.findall(r'import\("./types"\)\.(\w+)', text)}
    declared = set(re.findall(r"^export type (\w+) = ", declarations(), re.MULTILINE))
    assert {"Page", "Chart", "Table", "ClusterStatus", "TimelineView"} <= named <= declared


def test_every_answer_that_the_page_asks_for_is_declared() -> None:
    paths = {path for text in SCRIPTS.values() for path in re.findall(r"get\([`\"](admin/[\w/]+(?:/\$\{)?)", text)}
    wanted = {"/" + re.sub(r"/\$\{$", "/{", path) for path in paths}
    assert len(wanted) > 6
    assert {
        path for path in wanted if not any(known.partition("{")[0] == path.partition("{")[0] for known in ASKED)
    } == set()


def test_a_struct_is_a_type_with_its_optional_fields() -> None:
    _, components = msgspec.json.schema_components([Given], ref_template="{name}")
    assert _type(components["Given"]).split("\n") == [
        "{",
        "  name: string;",
        "  pair: [number, string];",
        "  tags: (string | null)[];",
        "  by_name: {[name: string]: number};",
        "  more?: Given | null;",
        "}",
    ]
    assert {field.encode_name for field in msgspec.structs.fields(Chart)} == set(
        re.findall(r"^  (\w+)\??:", declarations().split("export type Chart = ")[1].split("};")[0], re.MULTILINE)
    )
