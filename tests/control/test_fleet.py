"""Which instances there should be: starts, losses, restarts, hangs; with a made-up clock."""

from __future__ import annotations

import pytest

from staffel.control.fleet import FleetActions, FleetConfig, FleetCore, Life
from staffel.control.journal import record, replay
from staffel.control.messages import Beat, Hello, KvRegion, Unable

SECOND = 10**9
REGION = KvRegion(
    kind="shm", pid=0, fd=0, size=0, slots=1, num_blocks=1, layers=1, block_size=4, kv_heads=1,
    k_width=1, v_width=1, dtype="float32",
)  # fmt: skip
ROLES = {"prefill-0": "prefill", "decode-0": "decode"}


class Fleet:
    """A core, and a shell that does what it says and keeps what it said."""

    def __init__(self, hang_timeout: float = 10, **config: int) -> None:
        self.now = 0
        self.core = FleetCore(
            FleetConfig(
                members=[*ROLES.items()],
                incarnation=100,
                hang_timeout_ns=int(hang_timeout * SECOND),
                **config,
            )
        )
        self.running: dict[str, Life] = {}
        self.launched: list[tuple[int, Life]] = []
        """With the second of their launch."""
        self.killed: list[Life] = []
        self.joined: list[Life] = []
        self.lost: list[Life] = []
        self.notes: list[str] = []
        self.failed: str | None = None

    def do(self, actions: FleetActions) -> None:
        for life in actions.launches:
            self.running[life.instance] = life
            self.launched.append((self.now // SECOND, life))
        self.killed += actions.kills
        self.joined += [Life(hello.instance, hello.incarnation) for hello in actions.joined]
        self.lost += actions.lost
        self.notes += actions.notes
        self.failed = self.failed or actions.failed

    def start(self) -> Fleet:
        self.do(self.core.start(self.now))
        return self

    def serving(self) -> Fleet:
        self.start()
        for name in ROLES:
            self.hello(name)
        return self

    def hello(self, name: str, incarnation: int | None = None) -> None:
        given = self.running[name].incarnation if incarnation is None else incarnation
        hello = Hello(instance=name, incarnation=given, role=ROLES[name], region=REGION)
        self.do(self.core.hello(hello, self.now))

    def ended(self, name: str, life: Life | None = None) -> None:
        life = life or self.running[name]
        self.do(self.core.ended(name, life.incarnation, self.now))

    def beat(self, name: str, turns: int) -> None:
        beat = Beat(name, self.running[name].incarnation, turns)
        self.do(self.core.beat(beat, self.now))

    def wait(self, seconds: float, *, beating: bool = True) -> None:
        """Time passes in ticks; what is ready shows progress."""
        end = self.now + int(seconds * SECOND)
        while self.now < end:
            self.now += SECOND // 4
            for name in ROLES if beating else ():
                self.beat(name, self.now)
            self.do(self.core.tick(self.now))

    def state(self, name: str) -> str:
        return next(member.state for member in self.core.members if member.name == name)


def test_a_start_launches_all_and_has_begun_with_the_last_hello() -> None:
    fleet = Fleet().start()
    assert [life.instance for _, life in fleet.launched] == [*ROLES]
    assert len({life.incarnation for _, life in fleet.launched}) == 2
    fleet.hello("decode-0")
    assert not fleet.core.begun
    fleet.hello("prefill-0")
    assert fleet.core.begun
    assert len(fleet.joined) == 2


def test_a_first_start_that_fails_says_why() -> None:
    fleet = Fleet().start()
    life = fleet.running["decode-0"]
    fleet.do(fleet.core.unable(Unable("decode-0", life.incarnation, "no memory"), 0))
    assert fleet.failed == "no memory"


@pytest.mark.parametrize("was_ready", [False, True])
def test_a_first_start_that_fails_without_a_word(was_ready: bool) -> None:
    fleet = Fleet().start()
    if was_ready:
        fleet.hello("decode-0")
    fleet.ended("decode-0")
    fleet.wait(1)
    assert fleet.failed is None, "its reason may still come"
    fleet.wait(2)
    assert "decode-0 ended before" in fleet.failed
    assert len(fleet.launched) == 2
    assert len(fleet.lost) == was_ready


def test_the_reason_may_come_after_the_end() -> None:
    fleet = Fleet().start()
    life = fleet.running["decode-0"]
    fleet.ended("decode-0")
    fleet.do(fleet.core.unable(Unable("decode-0", life.incarnation, "no memory"), 0))
    fleet.wait(5)
    assert fleet.failed == "no memory"


def test_a_lost_instance_comes_back_as_a_new_incarnation() -> None:
    fleet = Fleet().serving()
    old = fleet.running["decode-0"]
    fleet.ended("decode-0")
    assert fleet.lost == [old]
    assert not fleet.core.serves(old.instance, old.incarnation)
    fleet.wait(2)
    new = fleet.running["decode-0"]
    assert new.incarnation > max(life.incarnation for _, life in fleet.launched[:2])
    fleet.hello("decode-0", old.incarnation)
    assert fleet.state("decode-0") == "starting", "a hello of the dead says nothing"
    fleet.hello("decode-0")
    assert fleet.core.serves("decode-0", new.incarnation)
    assert fleet.state("prefill-0") == "ready"


def test_pauses_double_up_to_a_limit_and_then_it_is_given_up() -> None:
    fleet = Fleet(longest_pause_ns=5 * SECOND).serving()
    for _ in range(5):
        fleet.ended("decode-0")
        fleet.wait(6)
    seconds = [second for second, life in fleet.launched if life.instance == "decode-0"]
    assert seconds == [0, 1, 8, 16, 23, 29]
    fleet.ended("decode-0")
    fleet.wait(1000)
    assert fleet.state("decode-0") == "given up"
    assert "stays down" in fleet.notes[-1]
    assert len(fleet.launched) == 7


def test_failures_are_forgotten_once_it_has_settled() -> None:
    fleet = Fleet().serving()
    for _ in range(20):
        fleet.wait(70)
        fleet.ended("decode-0")
        fleet.wait(2)
        fleet.hello("decode-0")
    assert fleet.state("decode-0") == "ready"
    assert [member.restarts for member in fleet.core.members] == [0, 20]


def test_a_later_start_that_fails_is_told_with_its_reason() -> None:
    fleet = Fleet().serving()
    fleet.ended("decode-0")
    fleet.wait(2)
    life = fleet.running["decode-0"]
    fleet.do(fleet.core.unable(Unable("decode-0", life.incarnation, "no memory"), fleet.now))
    fleet.ended("decode-0")
    assert "no memory" in fleet.notes[-1]
    assert fleet.failed is None


# ---- hangs


def test_one_that_says_nothing_is_killed_and_replaced() -> None:
    fleet = Fleet(hang_timeout=10).serving()
    fleet.wait(9, beating=False)
    assert not fleet.killed
    fleet.beat("prefill-0", 1)
    fleet.wait(2, beating=False)
    hung = fleet.running["decode-0"]
    assert fleet.killed == fleet.lost == [hung]
    assert "says nothing" in fleet.notes[-1]
    assert not fleet.core.serves("decode-0", hung.incarnation)
    fleet.wait(8)
    assert len(fleet.launched) == 2, "its process isn't gone yet"
    fleet.ended("decode-0")
    fleet.wait(2)
    assert len(fleet.launched) == 3
    assert fleet.lost == [hung], "it is lost once"


def test_one_that_beats_and_stands_still_is_killed() -> None:
    fleet = Fleet(hang_timeout=10).serving()
    for _ in range(48):
        fleet.wait(0.25, beating=False)
        fleet.beat("decode-0", 7)
        fleet.beat("prefill-0", fleet.now)
    assert fleet.killed == [fleet.running["decode-0"]]
    assert "no progress" in fleet.notes[0]


def test_a_loading_instance_is_never_taken_for_hung() -> None:
    fleet = Fleet(hang_timeout=10).start()
    fleet.wait(1000, beating=False)
    assert not fleet.killed


def test_nobody_hangs_where_the_time_out_is_off() -> None:
    fleet = Fleet(hang_timeout=0).serving()
    fleet.wait(1000, beating=False)
    assert not fleet.killed


def test_when_the_server_itself_stood_still_nobody_is_killed_for_it() -> None:
    """A laptop that slept, or a process that was stopped."""
    fleet = Fleet(hang_timeout=10).serving()
    fleet.wait(5)
    fleet.now += 3600 * SECOND
    fleet.wait(3)
    assert not fleet.killed
    fleet.wait(12, beating=False)
    assert len(fleet.killed) == 2


# ---- the end, and the journal


def test_nothing_starts_while_the_server_ends() -> None:
    fleet = Fleet().serving()
    fleet.ended("decode-0")
    fleet.do(fleet.core.drain(fleet.now))
    fleet.ended("prefill-0")
    fleet.wait(100)
    assert len(fleet.launched) == 2


def test_unknown_ones_change_nothing() -> None:
    fleet = Fleet().serving()
    fleet.do(fleet.core.ended("decode-0", 1, 0))
    fleet.do(fleet.core.ended("nobody", 100, 0))
    fleet.do(fleet.core.unable(Unable("nobody", 100, "?"), 0))
    fleet.do(fleet.core.beat(Beat("nobody", 100, 1), 0))
    fleet.do(fleet.core.hello(Hello(instance="x", incarnation=1, role="decode", region=REGION), 0))
    assert not fleet.lost
    assert {member.state for member in fleet.core.members} == {"ready"}


def test_it_is_replayed() -> None:
    lines: list[bytes] = []
    fleet = Fleet()
    record(fleet.core, "fleet", "fleet", lines.append)
    fleet.serving()
    fleet.ended("decode-0")
    fleet.wait(3)
    fleet.hello("decode-0")
    fleet.wait(20, beating=False)
    assert fleet.killed
    assert replay(lines).mismatch is None
