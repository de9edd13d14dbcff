"""The real server as a child process, seen from outside as its users see it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

STAFFEL = str(Path(sys.executable).with_name("staffel"))
START_S = 90
"""Patience with a start: for machines that do other things as well."""
KILL = signal.SIGKILL
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class InstanceState:
    """An instance as /metrics shows it."""

    ready: int = 0
    running: int = 0
    waiting: int = 0
    pinned: int = 0
    started: int = 0
    preemptions: int = 0
    restarts: int = 0
    copied_bytes: int = 0
    copied_seconds: float = 0.0
    free: int = 0
    cached: int = 0
    used: int = 0
    """What is neither free nor cached: with 0, free + cached == total."""

    @property
    def quiet(self) -> bool:
        return not (self.running or self.waiting or self.pinned or self.used)


class Server:
    """`staffel serve ARGS` on a port of its own. Leaving the context leaves no process."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        under: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        """`under` is a command that runs the server, such as prlimit; `env` goes on top."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*under, STAFFEL, "serve", *args, "--port", str(self.port)]
        self.environment = os.environ | (env or {})
        self._folder = folder
        self._seen: dict[int, psutil.Process] = {}
        """All children that it ever had."""
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.process: subprocess.Popen[bytes]

    # ---- life

    def launch(self) -> Server:
        """Start the process, and wait for nothing."""
        with (self._folder / "out").open("wb") as out, (self._folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                self._command, stdout=out, stderr=err, start_new_session=True, env=self.environment
            )
        return self

    def __enter__(self) -> Server:
        try:
            self.launch().wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def wait_ready(self) -> None:
        """Until /ready says 200."""
        until(lambda: self.status("/ready") == 200 or self.ended, START_S, "the server is ready")
        assert not self.ended, f"it ended with {self.process.returncode}:\n{self.log}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, by force if need be, with all that it started."""
        self.http.close()
        self.processes()
        if not self.ended:
            self.signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for process in self.left():
            process.kill()

    def signal(self, number: signal.Signals) -> None:
        """As a terminal does it: to the process group, in which the instances are not."""
        self.processes()
        os.killpg(self.process.pid, number)

    @property
    def memory(self) -> int:
        """Bytes of the server's own process, without its instances."""
        return psutil.Process(self.process.pid).memory_info().rss

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_ended(self, timeout: float) -> int:
        """The exit code; nothing that was ever started may be left then."""
        deadline = time.monotonic() + timeout
        code = self.process.wait(timeout)
        until(lambda: not self.left(), deadline - time.monotonic(), "no process is left")
        return code

    # ---- processes

    def processes(self) -> list[psutil.Process]:
        """The instances, in the order of the placement."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self._seen |= {child.pid: child for child in children}
        found = [child for child in children if _is_instance(child)]
        return sorted(found, key=lambda child: (child.create_time(), child.pid))

    def left(self) -> list[psutil.Process]:
        """Those ever seen that are running still."""
        return [process for process in self._seen.values() if _runs(process)]

    def kill_instance(self, name: str, number: signal.Signals = KILL) -> None:
        """kill -9, as the kernel does when memory runs out; or another signal."""
        [process] = [process for process in self.processes() if process.cmdline()[-1] == name]
        process.send_signal(number)

    def wait_back(self, name: str) -> None:
        """Until an instance is ready once more."""
        until(lambda: self.instances()[name].ready, START_S, f"{name} is back")

    # ---- talking to it

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def status(self, path: str) -> int:
        """The HTTP status; 0 where nobody answers."""
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def greedy(self, question: str, max_tokens: int = 16, **more: Any) -> str:
        """The likeliest answer to a chat message."""
        answer = self.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=max_tokens,
            **more,
        )
        return answer.choices[0].message.content or ""

    def instances(self) -> dict[str, InstanceState]:
        """By name, in the order of the placement."""
        fields: dict[str, dict[str, Any]] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if "instance" not in sample.labels:
                    continue
                name = sample.name.removeprefix("staffel_instance_").removesuffix("_total")
                field = sample.labels.get("state", name)
                value = sample.value if field.endswith("seconds") else int(sample.value)
                fields.setdefault(sample.labels["instance"], {})[field] = value
        return {name: InstanceState(**values) for name, values in fields.items()}

    def requests_over(self) -> int:
        """Client requests that have ended, in whatever way."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [s for family in families for s in family.samples]
        return int(sum(s.value for s in samples if s.name == "staffel_requests_total"))

    @property
    def quiet(self) -> bool:
        """Whether no instance has or keeps anything: free + cached == total, and no pin."""
        return all(state.quiet for state in self.instances().values())

    # ---- what it says

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def log(self) -> str:
        return (self._folder / "err").read_text()

    def entries(self) -> list[dict[str, Any]]:
        """The log's lines. Whatever is no JSON object on stderr is a fault."""
        return [msgspec.json.decode(line) for line in self.log.splitlines()]

    def errors(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries() if entry["level"] in ("error", "critical")]

    def summaries(self) -> list[dict[str, Any]]:
        """The router's line for each request that has ended."""
        return [entry for entry in self.entries() if entry["message"] == "request ended"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout: float, what: str) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout:.1f} s still not: {what}"
        time.sleep(0.02)


def run_cli(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A `staffel` command that is to end by itself."""
    return subprocess.run(
        [STAFFEL, *args], capture_output=True, text=True, timeout=timeout, check=False
    )


def _is_instance(process: psutil.Process) -> bool:
    try:
        return "staffel.runtime.instance" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
