"""Does the site build with no dead link, with the pages that are made from the code, and without a host of others?"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.docs.pages import GENERATED, ROOT

ELSEWHERE = re.compile(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"?(https?:)?//[^\">]*", re.IGNORECASE)


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    program = ROOT / ".venv-docs/bin/mkdocs"
    if not program.exists():
        skip_or_fail("mkdocs", "there is no MkDocs: make docs")
    done = subprocess.run(
        [program, "build", "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {name.replace(".md", ".html") for name in GENERATED} <= pages.keys()
    assert [name for name, page in pages.items() if ELSEWHERE.search(page)] == []
