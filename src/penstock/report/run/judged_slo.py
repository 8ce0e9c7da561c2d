"""The SLO by which the requests of a run are judged, as its results name it and as its run folder keeps it."""

from pathlib import Path
from typing import Any

from penstock.config.reading.load import load_resolved
from penstock.kernel.values import Slo, SloClass
from penstock.report.run.run_files import json_of

USUAL = Slo(ttft=2.0, itl=0.025)
"""By which ``penstock bench`` and ``penstock simulate`` judge what is not promised: TTFT and mean ITL, seconds."""


def judged_by(slo: Slo) -> Slo:
    """Return the SLO that requests are judged by: the promised one, with the usual target where there is none."""
    return slo.otherwise(slo.ttft or USUAL.ttft, slo.itl or USUAL.itl)


def slo_json(slo: Slo) -> dict[str, Any]:
    """Return an SLO as results name it; seconds, null is no target."""
    named = {name: {"ttft_s": own.ttft, "itl_mean_s": own.itl} for name, own in slo.classes.items()}
    return {"ttft_s": slo.ttft, "itl_mean_s": slo.itl, **({"classes": named} if named else {})}


def slo_of(folder: Path) -> Slo:
    """Return the SLO of a finished run: that of its results, else that of its config.

    Raises:
        ConfigError: a file of the run folder is damaged.
    """
    judged = (json_of(folder / "simulate.json") or json_of(folder / "bench.json")).get("slo")
    if judged is not None:
        named = {
            name: SloClass(ttft=own["ttft_s"], itl=own["itl_mean_s"]) for name, own in judged.get("classes", {}).items()
        }
        return Slo(ttft=judged["ttft_s"], itl=judged["itl_mean_s"], classes=named)
    path = folder / "config.yaml"
    return load_resolved(path, {}).slo if path.exists() and path.read_text().strip() else Slo()
