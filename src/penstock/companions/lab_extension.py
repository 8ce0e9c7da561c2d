"""What the lab companion adds: the form of prompts that its simulations use."""

from penstock.extension import Extension

EXTENSION = Extension(name="lab", entries={"prompt form": {"runs": "penstock.router.kv_index.runs.run_form:RUNS"}})
