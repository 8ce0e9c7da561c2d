"""Report of a search for settings: tables on the screen, JSON, and a page with the front."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.live_knobs import SettingChange
from penstock.kernel.plurals import counted
from penstock.page.page_schema import Axis, Chart, Colour, Page, PageNote, Section, Series, percent, text_table
from penstock_lab.profiler.tuning.tuning_space import Candidate
from penstock_lab.profiler.tuning.tuning_trial import Gain, TuningTrial
from penstock_lab.report.outcome import print_outcome

WORTH = 0.01
"""Share of GPU-hours below which nothing is saved."""
HEAD = ["", "in SLO, searched", "GPU-hours", "in SLO, held out", "GPU-hours", "gain held out (95 %)", "changes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSettings:
    """A member of the front, or the present config, with its trials on both parts of the traffic."""

    candidate: Candidate
    changes: Sequence[SettingChange]
    searched: TuningTrial
    holdout: TuningTrial
    gain: Gain | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEffect:
    """What one change of the proposal brings on the held-out traffic, beside its other changes.

    Args:
        names: the settings that change together, mostly one.
        gain: over the proposal without this change.
        gpu_hours: more than without it.
    """

    names: Sequence[str]
    gain: Gain | None
    gpu_hours: float

    @property
    def text(self) -> str:
        """The effect in words; a range with both signs tells nothing."""
        saved = f"{_hours_text(self.gpu_hours, '+')} GPU-hours" if round(self.gpu_hours, 4) else ""
        if self.gain is None:
            return ", ".join(filter(None, ("too few requests to tell", saved)))
        unsure = "no difference can be told: " if self.gain.low <= 0 <= self.gain.high else ""
        words = unsure + points(self.gain)
        return ", ".join(filter(None, (words, saved)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOutcome:
    """What a search came to.

    Args:
        rows: the present config first, then the front, the cheapest first.
        proposed: candidate of one of the rows.
        effects: of each change of the proposal; none where it has only one, which has the whole gain.
        requests, seconds: of the searched and of the held-out traffic.
        trials: every simulation: of a configuration on a part of the traffic, those that check the proposal among them.
        configurations: that the search tried, the present one among them.
        wanted: attainment.
    """

    rows: Sequence[TunedSettings]
    proposed: Candidate
    effects: Sequence[SettingEffect]
    trials: Sequence[TuningTrial]
    configurations: int
    requests: tuple[int, int]
    seconds: tuple[float, float]
    axes: Sequence[str]
    wanted: float
    notes: Sequence[str]

    @property
    def chosen(self) -> TunedSettings:
        """The row of the proposed settings."""
        return next(row for row in self.rows if row.candidate == self.proposed)

    @property
    def verdict(self) -> str:
        """What the held-out traffic says of the proposal."""
        before, chosen = self.rows[0], self.chosen
        if chosen is before:
            return "The present settings stay: nothing that was tried is better at what is wanted."
        saved = 1.0 - chosen.holdout.gpu_hours / before.holdout.gpu_hours if before.holdout.gpu_hours else 0.0
        won = chosen.gain
        if won is None:
            return "The held-out traffic has too few requests to tell whether the gain is real."
        gained = f"{points(won)} in SLO, "
        gained += f"{abs(saved):.1%} {'fewer' if saved >= 0 else 'more'} GPU-hours"
        if won.low > 0:
            return f"The gain holds on traffic that was not searched: {gained}."
        if won.high < 0 and saved <= 0:
            return f"The gain does not hold on traffic that was not searched: {gained}. Keep the present settings."
        if won.high < 0:
            share = percent(chosen.holdout.attainment)
            return f"On traffic that was not searched it trades attainment for cost ({share} in SLO): {gained}."
        saves = "it saves GPU-hours, and " if saved >= WORTH else ""
        return f"On traffic that was not searched {saves}no difference in attainment can be told: {gained}."


def points(gain: Gain) -> str:
    """Write a gain in points of a percentage, with its range."""
    return f"{100 * gain.mean:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"


def as_dict(outcome: TuningOutcome) -> dict[str, Any]:
    """Return the outcome as plain data, but for `Gain` structs; shares 0..1."""
    return {
        "schema": 1,
        "requests": dict(zip(("searched", "holdout"), outcome.requests)),
        "trials": outcome.configurations,
        "simulations": len(outcome.trials),
        "wanted_attainment": outcome.wanted,
        "verdict": outcome.verdict,
        "settings": [
            {
                "proposed": row.candidate == outcome.proposed,
                "changes": {change.key: change.new for change in row.changes},
                "searched": _trial_figures(row.searched),
                "holdout": _trial_figures(row.holdout),
                "gain": row.gain,
            }
            for row in outcome.rows
        ],
        "effects": [
            {
                "settings": list(effect.names),
                "gain": effect.gain,
                "gpu_hours": effect.gpu_hours,
                "text": effect.text,
            }
            for effect in outcome.effects
        ],
        "notes": list(outcome.notes),
    }


def _tried_text(outcome: TuningOutcome) -> str:
    return f"{counted(outcome.configurations, 'trial')} in {counted(len(outcome.trials), 'simulation')}"


def _trial_figures(trial: TuningTrial) -> dict[str, float]:
    return {"attainment": trial.attainment, "gpu_hours": trial.gpu_hours, "strain_p99": trial.strain}


def print_tables(outcome: TuningOutcome, out: Path) -> None:
    """Print the front and the proposal, for people."""
    searched, holdout = outcome.requests
    title = f"{_tried_text(outcome)}; searched on {counted(searched, 'request')}, held out {holdout:,}"
    print_outcome(title, HEAD, _front_cells(outcome), _sentences_of_tuning(outcome, out), words=(0, len(HEAD) - 1))


def _sentences_of_tuning(outcome: TuningOutcome, out: Path) -> Iterator[str]:
    yield from (f"note: {note}" for note in outcome.notes)
    yield outcome.verdict
    if outcome.chosen.changes:
        yield "Proposed:"
        for change in outcome.chosen.changes:
            yield f"  {change.key}: {_value_text(change.old)} -> {_value_text(change.new)}"
    if outcome.effects:
        yield "Each of them beside the others, on the held-out traffic:"
        for effect in outcome.effects:
            yield f"  {', '.join(effect.names)}: {effect.text}"
    yield f"{out}/tuned.yaml has the proposed config, {out}/report.html the front."


def _hours_text(hours: float, sign: str = "") -> str:
    """Return GPU-hours with enough places for a trace of seconds."""
    return f"{hours:{sign},.{2 if abs(hours) >= 1 else 4}f}"


def _front_cells(outcome: TuningOutcome) -> list[list[str]]:
    cells = []
    for row in outcome.rows:
        name = "proposed" if row.candidate == outcome.proposed and row.changes else ""
        won = row.gain
        cells.append(
            [
                name if row.changes else "as configured",
                percent(row.searched.attainment),
                _hours_text(row.searched.gpu_hours),
                percent(row.holdout.attainment),
                _hours_text(row.holdout.gpu_hours),
                "" if won is None else f"{100 * won.mean:+.1f} ({100 * won.low:+.1f} to {100 * won.high:+.1f})",
                ", ".join(f"{_short_key(change.key)} {_value_text(change.new)}" for change in row.changes),
            ]
        )
    return cells


def tuning_page(outcome: TuningOutcome) -> Page:
    """Return the page: all trials on the whole of the searched traffic, and the front on both parts."""
    whole = [each for each in outcome.trials if each.share == 1.0 and not each.holdout]
    charts = [
        _trial_chart(
            "On the searched traffic",
            [("tried", whole), ("front", [row.searched for row in outcome.rows[1:]])],
            outcome.rows[0].searched,
        ),
        _trial_chart(
            "On the held-out traffic", [("front", [row.holdout for row in outcome.rows[1:]])], outcome.rows[0].holdout
        ),
    ]
    effects = {name: effect.text for effect in outcome.effects for name in effect.names}
    diff = text_table(
        "Proposed changes",
        ["setting", "now", "proposed", "brings, beside the others"],
        [
            [change.key, _value_text(change.old), _value_text(change.new), effects.get(change.key, "the whole gain")]
            for change in outcome.chosen.changes
        ],
    )
    return Page(
        title="Tuned settings",
        about=f"{_tried_text(outcome)}; held out: the last {outcome.seconds[1]:,.0f} s",
        notes=[PageNote("info", outcome.verdict), *(PageNote("info", note) for note in outcome.notes)],
        sections=[
            Section(
                "Attainment against cost",
                charts=charts,
                tables=[text_table("The front", HEAD, _front_cells(outcome)), diff],
                files=["trials.csv"],
            )
        ],
    )


def _trial_chart(title: str, parts: Sequence[tuple[str, Sequence[TuningTrial]]], before: TuningTrial) -> Chart:
    colours: dict[str, Colour] = {"tried": "s5", "front": "s0", "as configured": "bad"}
    series = []
    for name, trials in [*parts, ("as configured", [before])]:
        ordered = sorted(trials, key=lambda trial: trial.gpu_hours)
        series.append(
            Series(
                name,
                [each.gpu_hours for each in ordered],
                [each.attainment for each in ordered],
                "points",
                colours[name],
            )
        )
    return Chart(
        title,
        series,
        "share of requests within the SLO",
        Axis("GPU-hours", "hours"),
        Axis(unit="share"),
        csv="trials.csv",
    )


def _short_key(key: str) -> str:
    """Return a knob's name without the path to a pool."""
    parts = key.split(".")
    return ".".join(parts[-2:]) if parts[0] == "models" else key.removeprefix("router.")


def _value_text(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
