"""Router plug-ins: scorers, which add to the cost of candidates, and filters, which exclude some, each with its name.

They are pure: an answer follows from the arguments, without clock, I/O or memory of earlier calls, and what it says of
a candidate does not depend on which others there are. So a simulation and a replay decide as the cluster did.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock import extension
from penstock.extension import Seam
from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock.kernel.values import RequestId, Role, Target, WorkerCard
from penstock.router.settings import RouterPluginSettings

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
REASON_MAX = 200
"""Characters that are kept of what a plug-in says: it stands in every decision's record."""


class PluginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a plug-in may know of a request: ``output_tokens`` only where the caller says it."""

    id: RequestId
    model: str
    stage: Role
    prompt_tokens: int
    output_tokens: int | None = None
    tenant: str | None = None
    adapter: str | None = None
    session: str | None = None
    program: str | None = None
    service_class: str | None = None
    priority: int = 0


class PluginCandidates:
    """What a plug-in may know of the candidates: columns of shape (n,), one place for each, which it can't change.

    Args:
        targets, cards: worker and rank of each candidate, and its worker's card.
        loads: returns tokens still to prefill, running requests and blocks in use; called when one is first read.
    """

    def __init__(
        self, targets: Sequence[Target], cards: Sequence[WorkerCard], loads: Callable[[], Sequence[Ints]]
    ) -> None:
        self.targets, self.cards, self._read_loads = targets, cards, loads
        self._known: list[Ints] = []

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def _loads(self) -> list[Ints]:
        if not self._known:
            self._known = [_read_only(np.asarray(column, dtype=np.int64)) for column in self._read_loads()]
        return self._known

    @property
    def prefill_tokens(self) -> Ints:
        """Prompt tokens that each still has to prefill."""
        return self._loads[0]

    @property
    def requests(self) -> Ints:
        """Running requests of each."""
        return self._loads[1]

    @property
    def blocks(self) -> Ints:
        """KV blocks that running requests use on each."""
        return self._loads[2]


class PricedCandidates(PluginCandidates):
    """The same with what the router's own cost function knows: the cost so far and the prompt tokens cached on each."""

    def __init__(
        self,
        targets: Sequence[Target],
        cards: Sequence[WorkerCard],
        loads: Callable[[], Sequence[Ints]],
        cost: Floats,
        cached_tokens: Ints,
    ) -> None:
        super().__init__(targets, cards, loads)
        self.cost, self.cached_tokens = _read_only(cost), _read_only(cached_tokens)


class Scorer(Protocol):
    """Adds to the cost of candidates in router mode ``kv``; lower cost wins."""

    def score(self, request: PluginRequest, candidates: PricedCandidates) -> Sequence[float] | Floats:
        """Return one finite number for each candidate, in the unit of ``router.cost.kind``, before the weight."""
        ...


class CandidateFilter(Protocol):
    """Excludes candidates."""

    def exclude(self, request: PluginRequest, candidates: PluginCandidates) -> Mapping[int, str]:
        """Return place -> reason of those that must not get the request, as in ``is in another rack``."""
        ...


Call = Callable[[str, int, Callable[[PluginRequest, Any], Any], PluginRequest, PluginCandidates], Any]
"""Calls a plug-in: name, candidates, method and its two arguments. A driver may have one that measures the time."""


def call_directly(
    name: str,
    count: int,
    method: Callable[[PluginRequest, Any], Any],
    request: PluginRequest,
    candidates: PluginCandidates,
) -> Any:
    """Call a plug-in as it is: what a simulation and a replay do."""
    return method(request, candidates)


class RouterPlugins:
    """The plug-ins that ``router.plugins`` names, in alphabetical order, and those that are left out.

    Args:
        note: takes the name of each that is left out from then on, and a sentence about it.
        make: makes one of its name and settings: of installed extensions, where it is `plugin_of`.
    Raises:
        ConfigError: no extension has a scorer or filter of that name, or it does not take its options.
    """

    def __init__(
        self,
        settings: Mapping[str, RouterPluginSettings],
        note: Callable[[str, str], None],
        make: Callable[[str, RouterPluginSettings], Any] | None = None,
    ) -> None:
        self.scorers: dict[str, tuple[float, Scorer]] = {}
        self.filters: dict[str, CandidateFilter] = {}
        self.left_out: dict[str, str] = {}
        """Name -> why."""
        self.call: Call = call_directly
        self._note, self._make = note, plugin_of if make is None else make
        self._settings: dict[str, RouterPluginSettings] = {}
        self.use(settings)

    def use(self, settings: Mapping[str, RouterPluginSettings]) -> None:
        """Go on with other settings; a plug-in whose own ones changed is tried again."""
        before, self._settings = self._settings, dict(settings)
        self.left_out = {
            name: why for name, why in self.left_out.items() if name in settings and settings[name] == before.get(name)
        }
        made = {name: self._make(name, settings[name]) for name in sorted(settings)}
        self.scorers = {name: (settings[name].weight, one) for name, one in made.items() if hasattr(one, "score")}
        self.filters = {name: one for name, one in made.items() if hasattr(one, "exclude")}
        for name in self.left_out:
            self._drop(name)

    def restore(self, left_out: Mapping[str, str]) -> None:
        """Leave out what was left out before."""
        for name, why in left_out.items():
            if name in self._settings:
                self.left_out[name] = why
                self._drop(name)

    def leave_out(self, name: str, why: str) -> None:
        """Go on without a plug-in, until its settings change or the process starts anew."""
        if name in self._settings and name not in self.left_out:
            self.left_out[name] = why[:REASON_MAX]
            self._drop(name)
            self._note(name, f"the router's plug-in {name} is left out from now on: {self.left_out[name]}")

    def excluded(self, request: PluginRequest, candidates: PluginCandidates) -> dict[int, str]:
        """Return the places of the candidates that filters exclude, each with the first one's reason and its name."""
        reasons: dict[int, str] = {}
        for name, each in list(self.filters.items()):
            try:
                answer = self.call(name, len(candidates), each.exclude, request, candidates)
                reasons_of_one = {range(len(candidates))[place]: str(why) for place, why in dict(answer).items()}
            except Exception as error:  # noqa: BLE001 - others' code: whatever it does wrong, requests go on without it
                self.leave_out(name, _failure_reason(error))
                continue
            for place, why in reasons_of_one.items():
                reasons.setdefault(place, f"{why[:REASON_MAX]} (filter {name})")
        return reasons

    def added(self, request: PluginRequest, candidates: PricedCandidates) -> dict[str, Floats]:
        """Return what each scorer adds to the candidates' costs, its weight included."""
        added: dict[str, Floats] = {}
        for name, (weight, each) in list(self.scorers.items()):
            try:
                answer = self.call(name, len(candidates), each.score, request, candidates)
                scores = np.asarray(answer, dtype=np.float64)
                with np.errstate(all="ignore"):
                    weighted = weight * scores
            except Exception as error:  # noqa: BLE001 - as above
                self.leave_out(name, _failure_reason(error))
                continue
            if scores.shape != (len(candidates),):
                text = f"its scores have the shape {scores.shape} for {counted(len(candidates), 'candidate')}"
                self.leave_out(name, text)
            elif not np.isfinite(weighted).all():
                self.leave_out(name, "it gave a score that is not a finite number")
            else:
                added[name] = weighted
        return added

    def _drop(self, name: str) -> None:
        self.scorers.pop(name, None)
        self.filters.pop(name, None)


def plugin_of(name: str, settings: RouterPluginSettings) -> Any:
    """Return the scorer or filter that an installed extension has under a name, made with its options.

    Raises:
        ConfigError: there is none, or it does not take its options.
    """
    where = f"router.plugins.{name}"
    seam: Seam = "scorer" if extension.offers("scorer", name) else "filter"
    if not extension.offers(seam, name):
        raise ConfigError(
            f"{where}: no installed extension has a scorer or filter {name!r}", hint=extension.known("scorer", "filter")
        )
    make = extension.entry(seam, name, where)
    try:
        plugin = make(**{option: _option_value(text) for option, text in settings.options.items()})
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}.options: {name} does not take them: {type(error).__name__}: {error}") from error
    if not hasattr(plugin, "score") and not hasattr(plugin, "exclude"):
        raise ConfigError(f"{where}: it has neither score nor exclude", hint="see docs/guides/router-plugins.md")
    return plugin


def _option_value(text: str) -> Any:
    """Return what JSON says, or the text itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _failure_reason(error: Exception) -> str:
    return f"it raised {type(error).__name__}: {error}"


def _read_only(column: npt.NDArray[Any]) -> Any:
    view = column.view()
    view.flags.writeable = False
    return view
