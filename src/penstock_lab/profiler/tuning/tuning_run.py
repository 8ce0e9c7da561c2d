"""Command ``penstock tune``: searches settings on the first part of the traffic, and tries the best on the rest."""

import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from penstock.config.live_knobs import differences
from penstock.config.reading.load import load, resolved_yaml
from penstock.config.reading.problems import ConfigProblems
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError, write_hint
from penstock.kernel.plurals import counted
from penstock.page.page_file import write_csv, write_page
from penstock_lab.profiler.tuning.tuning_report import (
    WORTH,
    SettingEffect,
    TunedSettings,
    TuningOutcome,
    as_dict,
    print_tables,
    tuning_page,
)
from penstock_lab.profiler.tuning.tuning_space import AS_IT_IS, Candidate, TuningSpace, space_of
from penstock_lab.profiler.tuning.tuning_trial import TrialScore, TuningTask, TuningTrial, carry_out, front, gain, halve
from penstock_lab.report.outcome import json_text
from penstock_lab.report.simulation.simulation_options import SimulateOptions
from penstock_lab.report.simulation.simulation_run import SimulationVariant, traffic_of, variants_of
from penstock_lab.report.simulation.variant_processes import cores, in_processes
from penstock_lab.traffic import trace_slices
from penstock_lab.traffic.traffic_request import TrafficRequest

RUNGS = (0.2, 0.5, 1.0)
"""Shares of the searched traffic. The first is no smaller, since queues take a while to show who is better."""
RUNG_LEAST = 100
"""Requests below which a rung says too little to leave candidates out."""
DRAWS = 50
"""Draws for each configuration that is wanted, of which many may be known or contradict themselves."""
FRONT_MAX = 8
"""Members of the front that are tried on the held-out traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """One call of ``penstock tune``.

    Args:
        simulate: config, traffic, SLO and jobs, as ``penstock simulate`` takes them.
        vary: as `space_of` takes them.
        trials: configurations that the search tries, the present one among them.
        hold_out: share of the traffic's time, at its end, that is not searched.
        attainment: share of requests within the SLO that is wanted: the cheapest that reaches it is proposed.
        out: folder for the results.
    """

    simulate: SimulateOptions
    vary: Sequence[str]
    trials: int
    hold_out: float
    attainment: float
    out: Path


def main(options: TuneOptions) -> int:
    """Search, try the front on the held-out part, and write and print what came of it.

    Returns: 0.
    Raises:
        ConfigError: the config, the traffic or what is to be varied is at fault, or there are too few requests.
        PenstockError: the process of a trial ended early.
    """
    simulate = options.simulate
    (variant,) = variants_of(simulate)
    space = space_of(variant.settings, variant.plan.model, options.vary)
    make, notes = traffic_of(simulate)
    search, holdout = _split_traffic(list(make()), options.hold_out)
    trials = TrialRunner(simulate, space, search, holdout)
    scores = _searched_scores(options, space, trials)
    best = front(scores)[:FRONT_MAX]
    wanted = options.attainment
    proposed = pared(_proposed_candidate(scores, best, wanted, space.configured), trials.trial, wanted)
    rest = (one for one in best if one not in (space.configured, proposed))
    tried = trials.holdout(list(dict.fromkeys([space.configured, proposed, *rest])))
    before = tried[space.configured]
    undone = [] if proposed == space.configured else trials.valid(iter(without_one(proposed).values()), len(proposed))
    undone = [one for one in undone if one != space.configured]
    apart = trials.holdout(undone)
    present = _settings_of(simulate, space, space.configured)
    rows = [
        TunedSettings(
            candidate=candidate,
            changes=differences(present, _settings_of(simulate, space, candidate)),
            searched=trials.whole[candidate],
            holdout=tried[candidate],
            gain=None if candidate == space.configured else gain(tried[candidate], before),
        )
        for candidate in tried
    ]
    outcome = TuningOutcome(
        rows=rows,
        proposed=proposed,
        effects=[
            SettingEffect(
                names=[
                    change.key
                    for change in differences(
                        _settings_of(simulate, space, one), _settings_of(simulate, space, proposed)
                    )
                ],
                gain=gain(tried[proposed], apart[one]),
                gpu_hours=tried[proposed].gpu_hours - apart[one].gpu_hours,
            )
            for one in undone
        ],
        trials=trials.done,
        configurations=trials.searched,
        requests=(len(search.requests), len(holdout.requests)),
        seconds=(search.seconds, holdout.seconds),
        axes=[axis.name for axis in space.axes],
        wanted=wanted,
        notes=[*variant.notes, *notes, *trials.refused[:1]],
    )
    _write_results(options, outcome, _settings_of(simulate, space, outcome.proposed))
    if simulate.json:
        sys.stdout.write(json_text(as_dict(outcome)))
    else:
        print_tables(outcome, options.out)
    return 0


@dataclass(frozen=True, slots=True)
class TrafficStretch:
    """Requests of a stretch of the traffic, whose time begins at 0, and its length in seconds."""

    requests: list[TrafficRequest]
    seconds: float


class TrialRunner:
    """Carries trials out in processes, all on the same requests (common random numbers), each once."""

    def __init__(
        self, options: SimulateOptions, space: TuningSpace, search: TrafficStretch, holdout: TrafficStretch
    ) -> None:
        self._options = options
        self._space = space
        self._search = search
        self._holdout = holdout
        self._variants: dict[Candidate, SimulationVariant] = {}
        self.refused: list[str] = []
        """A sentence for each candidate whose settings contradict each other."""
        self.done: list[TuningTrial] = []
        """All simulations, in the order in which they were carried out."""
        self.searched = 0
        """Configurations that the search tried, the present one among them; the same one may be simulated for longer
        and longer, and the proposal is checked by more."""
        self.whole: dict[Candidate, TuningTrial] = {}
        """Those on the whole of the searched traffic."""

    @property
    def requests(self) -> int:
        """Requests of the searched traffic."""
        return len(self._search.requests)

    def variant(self, candidate: Candidate) -> SimulationVariant:
        """Return a candidate as it is simulated.

        Raises:
            ConfigProblems: its settings contradict each other.
        """
        if candidate not in self._variants:
            overrides = [*self._options.overrides, *self._space.overrides(candidate)]
            (self._variants[candidate],) = variants_of(replace(self._options, overrides=overrides))
        return self._variants[candidate]

    def evaluate(self, candidates: Sequence[Candidate], share: float) -> Mapping[Candidate, TrialScore]:
        """Return the scores of candidates on a share of the searched traffic."""
        known = {one: self.whole[one] for one in candidates if share == 1.0 and one in self.whole}
        fresh = self._carry_out([one for one in candidates if one not in known], self._search, share, holdout=False)
        if share == 1.0:
            self.whole.update(fresh)
        return {one: trial.score for one, trial in {**known, **fresh}.items()}

    def trial(self, candidate: Candidate) -> TuningTrial | None:
        """Return a candidate's trial on the whole of the searched traffic; None where its settings contradict."""
        if not self.valid(iter((candidate,)), 1):
            return None
        self.evaluate([candidate], 1.0)
        return self.whole[candidate]

    def holdout(self, candidates: Sequence[Candidate]) -> dict[Candidate, TuningTrial]:
        """Return the trials of candidates on the traffic that was not searched."""
        return self._carry_out(candidates, self._holdout, 1.0, holdout=True)

    def _carry_out(
        self, candidates: Sequence[Candidate], stretch: TrafficStretch, share: float, *, holdout: bool
    ) -> dict[Candidate, TuningTrial]:
        seconds = stretch.seconds * share
        requests = [request for request in stretch.requests if request.at < seconds]
        tasks = [
            TuningTask(
                candidate=one,
                variant=self.variant(one),
                seconds=seconds,
                share=share,
                holdout=holdout,
            )
            for one in candidates
        ]
        work, jobs = partial(carry_out, requests), min(self._options.jobs or cores(), len(tasks))
        trials = (
            in_processes(work, tasks, jobs, quiet=self._options.json) if jobs > 1 else [work(task) for task in tasks]
        )
        self.done += trials
        return {trial.candidate: trial for trial in trials}

    def valid(self, candidates: Iterator[Candidate], count: int, tried: Collection[Candidate] = ()) -> list[Candidate]:
        """Return so many different candidates whose settings do not contradict each other, or as many as there are.

        Args:
            tried: those that are none of them.
        """
        chosen: dict[Candidate, None] = {}
        for candidate in islice(candidates, 2 * DRAWS * count + len(tried)):
            if len(chosen) == count:
                break
            if candidate in chosen or candidate in tried:
                continue
            try:
                self.variant(candidate)
            except ConfigProblems as error:
                self.refused.append(f"left out: {'; '.join(str(each) for each in error.problems)}")
                continue
            chosen[candidate] = None
        return list(chosen)


def without_one(candidate: Candidate) -> dict[int, Candidate]:
    """Return, for each axis that a candidate changes, the candidate without that change."""
    return {
        place: (*candidate[:place], AS_IT_IS, *candidate[place + 1 :])
        for place, choice in enumerate(candidate)
        if choice != AS_IT_IS
    }


def pared(proposed: Candidate, trial_of: Callable[[Candidate], TuningTrial | None], wanted: float) -> Candidate:
    """Return a proposal without the changes that bring nothing: each in turn is undone where that costs nothing.

    Args:
        trial_of: on the searched traffic; None for a candidate whose settings contradict each other.
        wanted: attainment.
    """
    whole = trial_of(proposed)
    for place in without_one(proposed):
        simpler = without_one(proposed)[place]
        if whole is not None and (trial := trial_of(simpler)) is not None and _costs_nothing(trial, whole, wanted):
            proposed = simpler
    return proposed


def _costs_nothing(simpler: TuningTrial, whole: TuningTrial, wanted: float) -> bool:
    """Return whether no loss can be told: against the whole proposal each time, so that small losses don't add up."""
    if simpler.gpu_hours > whole.gpu_hours * (1 + WORTH) or simpler.attainment < wanted <= whole.attainment:
        return False
    loss = gain(simpler, whole)
    return simpler.attainment >= whole.attainment if loss is None else loss.high >= 0


def _searched_scores(options: TuneOptions, space: TuningSpace, trials: TrialRunner) -> Mapping[Candidate, TrialScore]:
    """Return the scores of all that came to a last rung: of samples from everywhere, then of the front's neighbours."""
    rng = random.Random(options.simulate.seed)
    rungs = [share for share in RUNGS if share * trials.requests >= RUNG_LEAST or share == 1.0]
    # The present config is one of the trials.
    tried = {space.configured}
    half = max(1, (options.trials - 1) // 2)
    first = trials.valid(_or_any(space, space.samples(rng), half), half, tried)
    scores = dict(halve(first, rungs, trials.evaluate, space.configured))
    tried.update(first)
    left = options.trials - len(tried)
    near = trials.valid(_or_any(space, space.neighbours(front(scores), rng), left), left, tried)
    trials.searched = len(tried) + len(near)
    return {**scores, **halve(near, rungs, trials.evaluate, space.configured)} if near else scores


def _or_any(space: TuningSpace, drawn: Iterator[Candidate], count: int) -> Iterator[Candidate]:
    """Return drawn candidates, then all of a space: draws may miss what is left of a small one."""
    return chain(islice(drawn, DRAWS * count), space.every())


def _split_traffic(requests: Sequence[TrafficRequest], hold_out: float) -> tuple[TrafficStretch, TrafficStretch]:
    """Split traffic by time.

    Raises:
        ConfigError: a part has no request.
    """
    end = requests[-1].at if requests else 0.0
    split = (1.0 - hold_out) * end
    search = list(trace_slices.by_time(requests, 0.0, split))
    holdout = list(trace_slices.rebase(trace_slices.by_time(requests, split, None), split))
    if not search or not holdout:
        raise ConfigError(
            f"{counted(len(requests), 'request')} over {end:g} s can't be split at {split:g} s",
            hint="give a longer trace, or another --hold-out",
        )
    return TrafficStretch(search, split), TrafficStretch(holdout, end - split)


def _proposed_candidate(
    scores: Mapping[Candidate, TrialScore], best: Sequence[Candidate], wanted: float, configured: Candidate
) -> Candidate:
    """Return the cheapest of the front that has the wanted attainment, else the one with the most of it.

    It is chosen by the searched traffic alone, so that the held-out part stays an honest trial of it.
    """
    enough = [one for one in best if scores[one].attainment >= wanted]
    chosen = enough[0] if enough else max(best, key=lambda one: scores[one].attainment)
    return configured if scores[chosen][:2] == scores[configured][:2] else chosen


def _settings_of(simulate: SimulateOptions, space: TuningSpace, candidate: Candidate) -> ClusterSettings:
    """Return a candidate's config as it is written: a variant's has what follows from it, such as KV blocks."""
    return load(simulate.config, [*simulate.overrides, *space.overrides(candidate)], os.environ).settings


def _write_results(options: TuneOptions, outcome: TuningOutcome, proposed: ClusterSettings) -> None:
    """Write the proposed config, the trials and the page."""
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "tuned.yaml").write_text(resolved_yaml(proposed))
        (options.out / "tuning.json").write_text(json_text(as_dict(outcome)))
    except OSError as error:
        hint = write_hint(error, "name another --out")
        raise ConfigError(f"{options.out} can't be written: {error.strerror}", hint=hint) from error
    write_csv(
        options.out / "trials.csv",
        ["holdout", "share", "attainment", "gpu_hours", "strain", *outcome.axes],
        [
            [int(each.holdout), each.share, each.attainment, each.gpu_hours, each.strain, *each.candidate]
            for each in outcome.trials
        ],
    )
    write_page(options.out / "report.html", tuning_page(outcome))
