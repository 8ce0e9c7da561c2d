"""Command ``penstock study disaggregation``: searches the design space, simulates, writes the page."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.timing.gpus import named
from penstock.engine.timing.known_models import model_named
from penstock.kernel.errors import ConfigError
from penstock.page.page_schema import Section
from penstock.profiler.design_space.design_report import sections_of_study, write_study
from penstock.profiler.design_space.design_study import MODELS, TRAFFIC, DesignSpace, cases
from penstock.profiler.design_space.energy_rows import FILE, energy_section
from penstock.profiler.design_space.simulated_rows import simulated_section
from penstock.report.markdown import write_part


@dataclass(frozen=True, slots=True)
class DesignOptions:
    """One study. ``models``, ``traffic``: empty is all; ``ttft``: seconds that the passes of a prompt may take;
    ``simulated``: whether the scenarios are simulated as well; ``traces``: folder of public traces and measurements."""

    out: Path
    docs: Path | None
    gpu: str
    models: tuple[str, ...]
    traffic: tuple[str, ...]
    ttft: float
    traces: Path | None
    simulated: bool


def main(options: DesignOptions) -> int:
    """Search, simulate, write; return 0.

    Raises:
        ConfigError: a model, a kind of traffic or the GPU is not known, or a file can't be written.
    """
    for name in options.traffic:
        if name not in TRAFFIC:
            raise ConfigError(f"--traffic {name!r} is not known", hint=f"there are {', '.join(TRAFFIC)}")
    for name in options.models:
        model_named(name)
    began = time.monotonic()
    chosen = cases(
        named(options.gpu, "--gpu"), options.models or MODELS, options.traffic or tuple(TRAFFIC), options.ttft
    )
    spaces = [DesignSpace(case) for case in chosen]
    took = time.monotonic() - began
    sections = [*sections_of_study(spaces), *_beyond(options)]
    options.out.mkdir(parents=True, exist_ok=True)
    text = write_study(options.out, spaces, sections, took)
    if options.docs is not None:
        write_part(options.docs, text, title="Disaggregation study")
    sys.stdout.write(text)
    return 0


def _beyond(options: DesignOptions) -> list[Section]:
    """Return what the published study leaves out, as far as it was asked for and can be had."""
    sections = [simulated_section(options.traces)] if options.simulated else []
    measured = None if options.traces is None else options.traces / FILE
    if measured is not None and measured.is_file():
        return [*sections, energy_section(measured)]
    return [*sections, Section("Energy per token", [f"Left out: no {FILE} in --traces, so no measured power."])]
