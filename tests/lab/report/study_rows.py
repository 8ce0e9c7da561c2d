"""Rows of a study that tests look at: made by hand, so that every number is known."""

from bench.planner_study import cells, contenders
from bench.planner_study.scenario import StudyResult


def result(hours: float, attainment: float, **more) -> StudyResult:
    return StudyResult(
        attainment=attainment, gpu_hours=hours, requests=100, misses=round(100 * (1 - attainment)), **more
    )


def done(who: str, *results: StudyResult, **cell) -> cells.StudyRow:
    made = {"traffic": "ramps", "layout": "aggregated", "start_up": 120.0, "seed": 1, "contender": who, **cell}
    return cells.StudyRow(cell=cells.StudyCell(**made), results=results)


def studied() -> list[cells.StudyRow]:
    """Return a study of one place, and one fault."""
    return [
        done("slo", result(2.0, 0.5), result(4.0, 0.99), knob=contenders.BY_NAME["slo"].default),
        done("clairvoyant", result(3.0, 0.99)),
        done("static", result(6.0, 0.99)),
        done("HPA-like", result(4.0, 0.8), knob=contenders.BY_NAME["HPA-like"].default),
        done("slo", result(4.0, 0.9), fault="gap", knob=contenders.BY_NAME["slo"].default),
    ]
