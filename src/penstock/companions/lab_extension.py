"""What the lab companion adds: readers of traces, and the form of prompts that its simulations use."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="lab",
    entries={
        "tick listener": {"report": "penstock.report.planner.scheduled_report:scheduled_report"},
        "run": {
            "page": "penstock.report.run.run_page:write_report",
            "newest": "penstock.report.run.run_files:newest_ends",
            "explain": "penstock.report.run.run_files:recorded_explanation",
            "planner page": "penstock.report.planner.planner_report_page:write_planner_report",
            "planner dry run": "penstock.report.planner.planner_dry_run:dry_run",
        },
        "command": {
            **{
                name: f"penstock.cli.{name}:command"
                for name in ("bench", "plan", "profile", "replay", "simulate", "study", "trace", "tune", "ui", "engine")
            },
        },
        "tokenizer": {"builtin:sim": "penstock.adapters.engines.sim.sim_tokenizer:DATA_DIR"},
        "speeds": {
            "pools": "penstock.runtime.planning.described_speeds:inputs_of",
            "card": "penstock.runtime.planning.described_speeds:described_speed",
        },
        "engine": {"sim": "penstock.adapters.engines.sim.sim_launch:sim_launch"},
        "check": {"sim": "penstock.config.sim_checks:sim_complaints"},
        "file check": {"sim": "penstock.config.sim_checks:sim_files"},
        "settings": {"sim": "penstock.engine.settings:SimSettings"},
        "trace format": {"any": "penstock.traffic.formats.trace_format:reader"},
        "prompt form": {"runs": "penstock.router.kv_index.runs.run_form:RUNS"},
    },
)
