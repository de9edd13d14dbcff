"""The router's queue: first come, first served among client requests, and fair between them.

A client request may have many choices, each a job of its own. Client requests take turns, one
choice at a time, so that whoever comes after one with a thousand doesn't wait for all of them. What
goes through prefill again comes before everything else, in order of arrival.
"""

from __future__ import annotations

from collections import OrderedDict

from staffel.control.jobs import Job


class FairQueue:
    """Jobs that wait for an instance."""

    def __init__(self) -> None:
        self._again: dict[int, Job] = {}
        """Those that were on their way already, by number."""
        self._groups: OrderedDict[str, OrderedDict[int, Job]] = OrderedDict()
        """New ones by client request, the one whose turn it is first."""
        self._new = 0

    def __len__(self) -> int:
        return len(self._again) + self._new

    def __contains__(self, job: Job) -> bool:
        return job.number in self._again or job.number in self._groups.get(job.group, ())

    @property
    def first(self) -> Job | None:
        """Whose turn it is."""
        if self._again:
            return self._again[min(self._again)]
        for jobs in self._groups.values():
            return next(iter(jobs.values()))
        return None

    @property
    def jobs(self) -> list[Job]:
        """All."""
        new = (job for jobs in self._groups.values() for job in jobs.values())
        return [*self._again.values(), *new]

    def add(self, job: Job) -> None:
        """A new one, behind those of its client request."""
        self._groups.setdefault(job.group, OrderedDict())[job.number] = job
        self._new += 1

    def add_again(self, job: Job) -> None:
        """One that has to go through prefill once more."""
        self._again[job.number] = job

    def serve(self, job: Job) -> None:
        """It is sent off: the turn of the next client request."""
        self.remove(job)
        if job.group in self._groups:
            self._groups.move_to_end(job.group)

    def remove(self, job: Job) -> None:
        """Nothing if it isn't there."""
        if self._again.pop(job.number, None) is not None or job not in self:
            return
        jobs = self._groups[job.group]
        del jobs[job.number]
        self._new -= 1
        if not jobs:
            del self._groups[job.group]
