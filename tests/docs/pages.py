"""The pages of docs/ that `docs/generated.py` makes, by name."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("generated_pages", ROOT / "docs" / "generated.py")
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
GENERATED: dict[str, str] = {name: page() for name, page in _module.PAGES.items()}
"""Name below docs/ -> its Markdown."""
