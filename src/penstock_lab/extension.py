"""What the lab adds: the simulated engine with its settings, its commands, pages of runs, readers of traces."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="lab",
    entries={
        "tick listener": {"report": "penstock_lab.report.planner.scheduled_report:scheduled_report"},
        "run": {
            "page": "penstock_lab.report.run.run_page:write_report",
            "newest": "penstock_lab.report.run.run_files:newest_ends",
            "explain": "penstock_lab.report.run.run_files:recorded_explanation",
            "planner page": "penstock_lab.report.planner.planner_report_page:write_planner_report",
            "planner dry run": "penstock_lab.report.planner.planner_dry_run:dry_run",
        },
        "command": {
            name: f"penstock_lab.cli.{name}:command"
            for name in ("bench", "plan", "profile", "replay", "simulate", "study", "trace", "tune", "ui", "engine")
        },
        "tokenizer": {"builtin:sim": "penstock_lab.sim.sim_tokenizer:DATA_DIR"},
        "speeds": {
            "pools": "penstock_lab.config.described_speeds:inputs_of",
            "card": "penstock_lab.config.described_speeds:described_speed",
        },
        "engine": {"sim": "penstock_lab.sim.sim_launch:sim_launch"},
        "check": {"sim": "penstock_lab.config.sim_checks:sim_complaints"},
        "file check": {"sim": "penstock_lab.config.sim_checks:sim_files"},
        "settings": {"sim": "penstock_lab.engine.settings:SimSettings"},
        "trace format": {"any": "penstock_lab.traffic.formats.trace_format:reader"},
        "prompt form": {"runs": "penstock_lab.runs.run_form:RUNS"},
    },
)
