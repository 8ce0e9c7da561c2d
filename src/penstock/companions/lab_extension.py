"""What the lab companion adds: readers of traces, and the form of prompts that its simulations use."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="lab",
    entries={
        "trace format": {"any": "penstock.traffic.formats.trace_format:reader"},
        "prompt form": {"runs": "penstock.router.kv_index.runs.run_form:RUNS"},
    },
)
