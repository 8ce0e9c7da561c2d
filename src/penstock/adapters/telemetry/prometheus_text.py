"""Counters, gauges and histograms, and the text format in which Prometheus reads them.

Written for Penstock because names must come out exactly as dashboards query them (the usual client library appends
``_total`` to every counter) and because a histogram is observed once per output chunk: here that is a bisection. Tests
read the text with that library's parser.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricFamily:
    """One metric name with its labels; children are made as label values appear."""

    kind = "untyped"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.help = help
        self.labels = tuple(labels)

    def lines(self) -> Iterable[str]:
        """Yield the sample lines."""
        raise NotImplementedError

    def render(self) -> str:
        """Return HELP, TYPE and samples."""
        head = f"# HELP {self.name} {_escape_help(self.help)}\n# TYPE {self.name} {self.kind}\n"
        return head + "".join(f"{line}\n" for line in self.lines())


class MetricCell:
    """One counter's or gauge's value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Counter(MetricFamily):
    """A metric that only grows."""

    kind = "counter"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self.cells: dict[tuple[str, ...], MetricCell] = {} if labels else {(): MetricCell()}

    def of(self, *labels: str) -> MetricCell:
        """Return the child with these label values, which may be kept and counted up directly."""
        cell = self.cells.get(labels)
        if cell is None:
            cell = self.cells[labels] = MetricCell()
        return cell

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Count up."""
        cell = self.cells.get(labels)
        if cell is None:
            cell = self.of(*labels)
        cell.value += by

    def set(self, *labels: str, to: float) -> None:
        """Take over a count that is made elsewhere."""
        cell = self.cells.get(labels)
        if cell is None:
            cell = self.of(*labels)
        cell.value = to

    def get(self, *labels: str) -> float:
        cell = self.cells.get(labels)
        return 0.0 if cell is None else cell.value

    def lines(self) -> Iterable[str]:
        for labels, cell in self.cells.items():
            yield f"{self.name}{_label_set_text(self.labels, labels)} {_sample_value_text(cell.value)}"


class Untyped(Counter):
    """A count under a name that others chose: that of a counter ends in ``_total``, or promtool refuses the text."""

    kind = "untyped"


class Gauge(Counter):
    """A metric that goes up and down."""

    kind = "gauge"

    def clear(self) -> None:
        """Forget all children, before a scrape sets those that are still there."""
        self.cells = {}


class Histogram(MetricFamily):
    """Counts observations per bucket.

    Args:
        buckets: upper ends, ascending, without infinity.
    """

    kind = "histogram"

    def __init__(self, name: str, help: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self.buckets = tuple(buckets)
        self._children: dict[tuple[str, ...], Observations] = {} if labels else {(): Observations(self.buckets)}

    def of(self, *labels: str) -> "Observations":
        """Return the child with these label values, which may be kept and observed directly."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = Observations(self.buckets)
        return child

    def observe(self, value: float, *labels: str) -> None:
        (self._children.get(labels) or self.of(*labels)).observe(value)

    def lines(self) -> Iterable[str]:
        ends = [_sample_value_text(bucket) for bucket in self.buckets] + ["+Inf"]
        for labels, child in self._children.items():
            cumulative = 0
            for end, count in zip(ends, child.counts, strict=True):
                cumulative += count
                yield f"{self.name}_bucket{_label_set_text((*self.labels, 'le'), (*labels, end))} {cumulative}"
            yield f"{self.name}_sum{_label_set_text(self.labels, labels)} {_sample_value_text(child.sum)}"
            yield f"{self.name}_count{_label_set_text(self.labels, labels)} {cumulative}"


class Observations:
    """One histogram's counts."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or the same value several times."""
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times

    def observe_all(self, values: Sequence[tuple[float, int]]) -> None:
        """Count many values, each so many times: a stream's gaps, at its end."""
        counts, buckets, total = self.counts, self.buckets, self.sum
        for value, times in values:
            counts[bisect_left(buckets, value)] += times
            total += value * times
        self.sum = total


F = TypeVar("F", bound=MetricFamily)


class MetricRegistry:
    """All metrics of a process, in the order in which they were made; each name begins with ``prefix``."""

    def __init__(self, prefix: str = "") -> None:
        self.families: dict[str, MetricFamily] = {}
        self._prefix = prefix

    def below(self, prefix: str) -> "MetricRegistry":
        """Return the same registry for names that begin with this prefix, too."""
        found = MetricRegistry(self._prefix + prefix)
        found.families = self.families
        return found

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        return self._add(Counter(self._prefix + name, help, labels))

    def untyped(self, name: str, help: str, *labels: str) -> Untyped:
        return self._add(Untyped(self._prefix + name, help, labels))

    def gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return self._add(Gauge(self._prefix + name, help, labels))

    def histogram(self, name: str, help: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return self._add(Histogram(self._prefix + name, help, buckets, labels))

    def render(self) -> str:
        return "".join(family.render() for family in self.families.values())

    def _add(self, family: F) -> F:
        if family.name in self.families:
            raise ValueError(f"metric {family.name} exists already")
        self.families[family.name] = family
        return family


def labelled(text: str, name: str, value: str) -> str:
    """Return metrics, as `MetricRegistry.render` writes them, with one more label on each."""
    label = f'{name}="{_escape(value)}"'
    lines: list[str] = []
    for line in text.splitlines():
        metric, brace, rest = line.partition("{")
        if line.startswith("#"):
            lines.append(line)
        elif brace:
            lines.append(f"{metric}{{{label},{rest}")
        else:
            lines.append(line.replace(" ", f"{{{label}}} ", 1))
    return "\n".join(lines) + "\n"


def merge(texts: Sequence[str], most: Iterable[str] = ()) -> str:
    """Add the metrics of several processes up into one text.

    Args:
        texts: each as `MetricRegistry.render` writes it.
        most: names whose largest value counts instead of the sum, such as every process's report of the same worker.
    """
    largest = frozenset(most)
    heads: dict[str, str] = {}
    samples: dict[str, dict[str, float]] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                heads.setdefault(name, line)
                samples.setdefault(name, {})
            elif line.startswith("# TYPE "):
                heads[name] = heads[name].split("\n")[0] + "\n" + line
            elif line:
                key, _, value = line.rpartition(" ")
                family = samples[name]
                if name in largest:
                    family[key] = max(family.get(key, float("-inf")), float(value))
                else:
                    family[key] = family.get(key, 0.0) + float(value)
    out: list[str] = []
    for name, head in heads.items():
        out.append(head)
        out += [f"{key} {_sample_value_text(value)}" for key, value in samples[name].items()]
    return "\n".join(out) + "\n"


def _label_set_text(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True)) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _sample_value_text(value: float) -> str:
    if not isfinite(value):
        return "NaN" if value != value else ("+Inf" if value > 0 else "-Inf")
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(float(value))
