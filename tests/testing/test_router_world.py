"""A router's world says what a request leads to: the example of docs/reference/testing.md."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "testing.md"


def test_the_example_of_the_docs_holds() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    names["test_a_request_goes_to_the_only_worker"]()  # type: ignore[operator]
