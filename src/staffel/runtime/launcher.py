"""Starting and stopping instances: as processes, or as threads of this process.

Either way an instance holds the reading end of a pipe, its lifeline: when the writing end
closes, by intent or because the owner died, the instance frees everything and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from typing import Protocol

import msgspec

from staffel.runtime.instance import InstanceJob, run_instance
from staffel.threads import environment

log = logging.getLogger("staffel.launcher")

_GRACE_S = 2.0
"""How long a stopping instance may finish its step before it is killed."""


class Handle(Protocol):
    """A started instance."""

    async def wait(self) -> None:
        """Return when it has ended, for whatever reason."""

    async def stop(self) -> None:
        """End it, with force if it takes long."""

    def kill(self) -> None:
        """End it with force, now."""


class Launcher(Protocol):
    """Starts instances."""

    async def launch(self, job: InstanceJob) -> Handle: ...


class ProcessLauncher:
    """Each instance is a process of its own."""

    async def launch(self, job: InstanceJob) -> ProcessHandle:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "staffel.runtime.instance",
            job.name,  # for whoever looks at the list of processes
            stdin=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal is for the server, which then stops its instances.
            start_new_session=True,
            env=environment(job.threads),
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        await process.stdin.drain()
        return ProcessHandle(process)


class ProcessHandle:
    """A process and its lifeline."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> None:
        await self._process.wait()

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _GRACE_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class ThreadLauncher:
    """Each instance is a thread: for tests, and for embedding in another program."""

    async def launch(self, job: InstanceJob) -> ThreadHandle:
        return ThreadHandle(job)


class ThreadHandle:
    """A thread and its lifeline."""

    def __init__(self, job: InstanceJob) -> None:
        reading, self._writing = os.pipe()
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                run_instance(job, lifeline=reading)
            except Exception:
                log.exception("%s died", job.name)
            finally:
                os.close(reading)
                loop.call_soon_threadsafe(self._ended.set)

        threading.Thread(target=run, name=job.name, daemon=True).start()

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self) -> None:
        self.kill()
        await self._ended.wait()

    def kill(self) -> None:
        """Threads know no force: it ends when it comes to look at its lifeline."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1  # another file may get the number
