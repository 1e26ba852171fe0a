"""Counters and histograms in plain numbers: an addition for the one thread that counts, rendered when a scrape asks."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counts(Collector):
    """A counter with a number for each combination of ``labels`` that has come up; ``name`` is without ``_total``."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, *labels: str, amount: float = 1) -> None:
        """Count ``amount`` more."""
        self._counts[labels] = self._counts.get(labels, 0) + amount

    def collect(self) -> Iterable[Metric]:
        """The counter as it stands."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        return (family,)


class Distribution(Collector):
    """A histogram over ascending ``bounds``, each the greatest value of its bucket."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The histogram as it stands."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return (HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum),)
