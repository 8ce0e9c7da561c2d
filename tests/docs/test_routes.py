"""Does the table of routes by API name exactly the routes and calls that are served?"""

import re
from pathlib import Path

from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.frontend.openapi.openapi import openapi
from penstock_extras.open_inference.inference_service import NAME
from penstock_extras.plugins.protobuf_messages import INFERENCE, service

TEXT = (Path(__file__).parents[2] / "docs/reference/routes.md").read_text()
ROW = re.compile(r"^\| `([^`]+)` \|(.*)\|$", re.MULTILINE)


def test_every_route_has_its_row_and_every_row_is_a_route() -> None:
    served = {
        f"{method.upper()} {path}"
        for path, item in openapi(FrontendSettings())["paths"].items()
        for method in item
        if not path.startswith(("/admin", "/ui", "/clear_kv_blocks")) and path != "/"
    }
    calls = set(service(NAME, INFERENCE))
    rows = [name for name, _ in ROW.findall(TEXT)]
    assert len(rows) == len(set(rows)) and set(rows) == served | calls


def test_each_row_says_what_is_honoured_ignored_and_refused() -> None:
    for name, cells in ROW.findall(TEXT):
        assert cells.count("|") == 2, name
