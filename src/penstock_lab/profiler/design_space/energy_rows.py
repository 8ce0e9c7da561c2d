"""Energy per token of splits and co-located engines, by the power that GPUs were measured to draw in each phase.

The file of measurements is given by the user: columns as splitwise-sim's ``perf_model.csv`` has them, power as a share
of what the GPU draws at most.
"""

import csv
from pathlib import Path
from statistics import mean

import numpy as np

from penstock.kernel.errors import ConfigError
from penstock.page.page_schema import Section, table_section
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.roofline import work_of
from penstock_lab.profiler.design_space.design_study import TRAFFIC, DesignCase, DesignSpace

FILE = Path("measured", "splitwise_perf_model.csv")
"""Where a folder of traces has it."""
MODEL, HARDWARE, GPU, WATTS = "llama2-70b", "a100-80gb", "a100", 400.0
"""Rows that have power, and that GPU by its data sheet. The H100's rows have none."""
SPEED = 20.0
LONG, SHORT = 2048, 512
"""Prompts from so many tokens on fill a GPU; a run with prompts up to so many is decoding nearly all of the time."""


def powers_of(path: Path) -> tuple[float, float]:
    """Return the shares of its power that a GPU draws while it computes prompts, and while it decodes.

    Raises:
        ConfigError: the file can't be read, lacks a column, or has no row with power.
    """
    prompts, decodes = [], []
    try:
        with path.open(encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                if (row["model"], row["hardware"]) != (MODEL, HARDWARE) or not float(row["average_power"]):
                    continue  # 0 stands for a run whose power was not measured
                size = int(row["prompt_size"])
                if size >= LONG:
                    prompts.append(float(row["peak_power"]))
                elif size <= SHORT:
                    decodes.append(float(row["average_power"]))
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a file of measured power: {error}", hint="see perf_model.csv of splitwise-sim"
        ) from error
    if not prompts or not decodes:
        raise ConfigError(f"{path} has no power of {MODEL} on {HARDWARE}", hint="leave --traces out")
    return mean(prompts), mean(decodes)


def energy_section(path: Path) -> Section:
    """Return joules per token of answers at 20 tokens/s, on A100."""
    prompt, decode = powers_of(path)
    rows = []
    for traffic in TRAFFIC:
        space = DesignSpace(DesignCase("Llama-3.1-70B", traffic, GPUS[GPU], GPUS[GPU].link_gpus, 10.0))
        cells = []
        for kind in (space.disaggregated, space.colocated):
            number = space.at(kind, SPEED)
            if number is None:
                cells += ["unknown", ""]
                continue
            share = _prompt_share(space, number) if kind is space.colocated else float(_share_of(kind.ratio[number]))
            power = WATTS * (share * prompt + (1.0 - share) * decode)
            cells += [f"{power / kind.density[number]:.2f}", f"{share:.0%}"]
        rows.append([traffic, *cells])
    text = (
        f"Llama-3.1-70B in bf16 on A100 of {WATTS:g} W at {SPEED:g} tokens/s/user. Prompts draw {prompt:.0%} of that, "
        f"decoding {decode:.0%}, as measured for {MODEL}; GPUs that wait draw what decoding does. Joules are per token "
        "of answers, of GPUs alone; a split spends as much per GPU-second of each phase, so it saves by needing fewer."
    )
    head = ["traffic", "split J/token", "GPUs on prompts", "co-located J/token", "time on prompts"]
    return table_section("Energy per token", text, head, rows)


def _share_of(ratio: float) -> float:
    """Return the share of all GPUs that is of context."""
    return ratio / (1.0 + ratio)


def _prompt_share(space: DesignSpace, number: int) -> float:
    """Return the share of its time that a co-located engine computes prompts, by what they would take alone."""
    points, point = space.colocated_points, int(space.colocated.point[number])
    mapping = space.mappings[int(points.mapping[point])]
    roofline = mapping.roofline(space.served)
    alone = roofline.seconds(work_of([(0, space.case.request.isl)], 0, 0, None, roofline.replicas))
    return float(np.minimum(1.0, points.rate[point] * alone / mapping.stages))
