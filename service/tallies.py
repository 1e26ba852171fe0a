"""Counters and histograms in plain numbers: an addition for the one thread that counts, rendered when a scrape asks."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

COUNTED_AT_ONCE = 256
"""Values that a histogram keeps before it looks for their buckets: all together they take as long as a few."""


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
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._uncounted: list[float] = []

    def observe(self, value: float) -> None:
        """Count one value."""
        self._uncounted.append(value)
        if len(self._uncounted) >= COUNTED_AT_ONCE:
            self._count()

    def _count(self) -> None:
        places = np.searchsorted(self._bounds, self._uncounted)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += sum(self._uncounted)
        self._uncounted.clear()

    def collect(self) -> Iterable[Metric]:
        """The histogram as it stands."""
        self._count()
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts.tolist()), strict=True))
        return (HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum),)
