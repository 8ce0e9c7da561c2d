"""Runs a cluster to its end for a command: the supervisor, and then the run's report."""

from collections.abc import Callable
from pathlib import Path

import click

from penstock import extension
from penstock.config.reading.load import Loaded
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import PenstockError


def run_cluster(loaded: Loaded, command: str, *, reload: Callable[[], Loaded] | None = None) -> int:
    """Run until Ctrl-C, draw the run folder's report, and return the exit status.

    Args:
        reload: reads the settings again at SIGHUP.
    """
    from penstock.runtime.supervision.supervisor import run

    return run(loaded, command=command, finished=_report, reload=reload)


def check_engine_parsers(settings: ClusterSettings) -> None:
    """Check the parsers of pools of vLLM by asking the vLLM that is installed here, where it answers.

    Raises:
        ConfigError: it has none of a name.
    """
    from penstock.adapters.engines.pool_overrides import parses_itself
    from penstock.adapters.engines.vllm_parsers import check_parsers, installed_parsers

    for model in settings.models.values():
        for pool in model.pools.values():
            names = (pool.tool_parser, pool.reasoning_parser)
            if pool.engine == "vllm" and any(parses_itself(pool, name) for name in names):
                parsers = installed_parsers(pool.program)
                if parsers is not None:
                    check_parsers(pool, parsers)


def _report(folder: Path) -> None:
    from penstock.runtime.records.segments import there

    if not there(folder / "requests.jsonl"):
        return  # no request came: there is nothing to draw
    if not extension.offers("run", "page"):
        return
    try:
        click.echo(f"Report: {extension.entry('run', 'page')(folder)}")
    except PenstockError as error:
        click.echo(f"penstock: the report could not be drawn: {error}", err=True)
