"""A host whose cores are the instances', and what everybody else's work there costs them."""

from __future__ import annotations

from collections.abc import Iterable


class Host:
    """Knows which instances are at work, and owes them the time that was taken from them.

    Others (the server, clients) run on an idle instance's cores, at nobody's cost; where all are
    at work, each gives an equal part, by which its next step is longer.
    """

    def __init__(self, instances: Iterable[str]) -> None:
        self._owed = dict.fromkeys(instances, 0.0)
        self._idle = set(self._owed)

    def work(self, instance: str) -> None:
        self._idle.discard(instance)

    def rest(self, instance: str) -> None:
        self._idle.add(instance)

    def spend(self, seconds: float) -> None:
        """Somebody else needs a core for so long."""
        if self._idle:
            return
        part = seconds / len(self._owed)
        for instance in self._owed:
            self._owed[instance] += part

    def collect(self, instance: str) -> float:
        """What the instance has given since it was asked last, in seconds."""
        owed, self._owed[instance] = self._owed[instance], 0.0
        return owed
