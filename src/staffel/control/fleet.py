"""FleetCore: which instances there should be, and what each of them is up to.

The shell starts and kills processes, and tells what it sees: `hello`, `unable`, `ended`, `beat`
and `tick`; each returns `FleetActions`. An instance's life: starting -> ready -> (lost ->) starting
as a new incarnation, after a pause that doubles with each failure; one that fails again and again
is given up. The first start is different: whatever fails there ends the server, with the reason.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from staffel.config import Role
from staffel.control.messages import Beat, Hello, Unable

SECOND = 10**9

LAST_WORDS_NS = 2 * SECOND
"""How long the reason of an instance that has ended may still be on its way."""

_AWAY_NS = 5 * SECOND
"""A tick that comes later than that says that this very process stood still, or that the clock
jumped; it says nothing about the instances."""

MemberState = Literal["starting", "ready", "ended", "waiting", "killed", "given up"]
"""ended: before it was ready, its reason may still come; waiting: for its next start; killed: it
hung, and its process isn't gone yet."""


class FleetConfig(Struct, frozen=True, kw_only=True):
    """Everything that a FleetCore decides by."""

    members: list[tuple[str, Role]]
    """Names and roles."""
    incarnation: int
    """The first one; they count up from there."""
    hang_timeout_ns: int
    """Without a sign of progress for so long, an instance is killed; 0: never."""
    first_pause_ns: int = 1 * SECOND
    """Before the first restart; it doubles with each failure in a row."""
    longest_pause_ns: int = 60 * SECOND
    settled_ns: int = 60 * SECOND
    """One that was ready for so long has no failures in a row."""
    most_failures: int = 6
    """In a row; then it is given up."""


class Life(Struct, frozen=True, array_like=True):
    """One incarnation of one instance."""

    instance: str
    incarnation: int


class FleetActions(Struct, frozen=True):
    """What the shell is to do."""

    launches: list[Life]
    kills: list[Life]
    joined: list[Hello]
    """Tell the router that they serve."""
    lost: list[Life]
    """Tell the router that they don't any more."""
    notes: list[str]
    """For the log: what is wrong, and what is done about it."""
    failed: str | None = None
    """The first start can't succeed; the text is for the user."""


class Member(Struct):
    """An instance as the fleet knows it."""

    name: str
    role: Role
    incarnation: int = 0
    state: MemberState = "waiting"
    since: int = 0
    """When it came into this state."""
    until: int = 0
    """Of "ended" and "waiting": when something is to happen."""
    failures: int = 0
    """In a row."""
    restarts: int = 0
    reason: str = ""
    """Why it isn't ready, where that is known."""
    turns: int = 0
    heard_at: int = 0
    moved_at: int = 0
    """When `turns` last rose."""


class FleetCore:
    """The state machine of all instances of a server."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self._members = {name: Member(name, role) for name, role in config.members}
        self._last_incarnation = config.incarnation - 1
        self._begun = False
        """Whether all have been ready once."""
        self._ending = False
        self._last_tick = 0
        self._launches: list[Life] = []
        self._kills: list[Life] = []
        self._joined: list[Hello] = []
        self._lost: list[Life] = []
        self._notes: list[str] = []
        self._failed: str | None = None

    # ---- what the shell calls

    def start(self, now: int) -> FleetActions:
        """Start all."""
        self._last_tick = now
        for member in self._members.values():
            self._launch(member, now)
        return self._actions()

    def hello(self, hello: Hello, now: int) -> FleetActions:
        """One is ready. Of another incarnation than the one that is starting, it is too late."""
        member = self._members.get(hello.instance)
        if (
            member is not None
            and member.incarnation == hello.incarnation
            and member.state == "starting"
        ):
            self._enter(member, "ready", now)
            member.reason = ""
            member.heard_at = member.moved_at = now
            self._joined.append(hello)
            self._begun = self._begun or all(m.state == "ready" for m in self._members.values())
        return self._actions()

    def unable(self, message: Unable, now: int) -> FleetActions:
        """One can't start, and says why; its end follows, or came before."""
        member = self._members.get(message.instance)
        if member is not None and member.incarnation == message.incarnation:
            member.reason = message.message
            if not self._begun:
                self._failed = message.message
        return self._actions()

    def ended(self, instance: str, incarnation: int, now: int) -> FleetActions:
        """A process is gone, for whatever reason."""
        member = self._members.get(instance)
        if member is None or member.incarnation != incarnation or member.state == "given up":
            return self._actions()
        if member.state == "ready":
            self._lost.append(Life(instance, incarnation))
            member.reason = "its process ended"
        if self._begun:
            self._fail(member, now)
        else:
            self._enter(member, "ended", now, until=now + LAST_WORDS_NS)
        return self._actions()

    def beat(self, beat: Beat, now: int) -> FleetActions:
        """A sign of life."""
        member = self._members.get(beat.instance)
        if member is not None and member.incarnation == beat.incarnation:
            member.heard_at = now
            if beat.turns != member.turns:
                member.turns, member.moved_at = beat.turns, now
        return self._actions()

    def tick(self, now: int) -> FleetActions:
        """Time passes. Several times a second."""
        away = now - self._last_tick > _AWAY_NS
        self._last_tick = now
        for member in self._members.values():
            if away:
                member.heard_at = member.moved_at = now
            self._pass_time(member, now)
        return self._actions()

    def drain(self, now: int) -> FleetActions:
        """The server is ending: nothing is started any more."""
        self._ending = True
        return self._actions()

    # ---- what others ask

    @property
    def begun(self) -> bool:
        """Whether all have been ready at the same time once."""
        return self._begun

    @property
    def members(self) -> list[Member]:
        """All, in the order of the placement; to be read only."""
        return list(self._members.values())

    def serves(self, instance: str, incarnation: int) -> bool:
        """Whether what this incarnation says is to be taken."""
        member = self._members.get(instance)
        return member is not None and member.incarnation == incarnation and member.state == "ready"

    # ---- decisions

    def _pass_time(self, member: Member, now: int) -> None:
        if member.state == "ended" and now >= member.until:
            if not self._begun:
                self._failed = f"{member.name} ended before it was ready; its log says why"
        elif member.state == "waiting" and now >= member.until and not self._ending:
            member.restarts += 1
            self._launch(member, now)
        elif member.state == "ready":
            if now - member.since >= self.config.settled_ns:
                member.failures = 0
            self._check_hang(member, now)

    def _check_hang(self, member: Member, now: int) -> None:
        limit = self.config.hang_timeout_ns
        if not limit or now - member.moved_at < limit:
            return
        silent = now - member.heard_at >= limit
        what = "says nothing" if silent else "makes no progress"
        member.reason = f"it {what} for {limit / SECOND:g} s (--hang-timeout)"
        self._notes.append(f"{member.name} is killed: {member.reason}")
        self._enter(member, "killed", now)
        self._kills.append(Life(member.name, member.incarnation))
        self._lost.append(Life(member.name, member.incarnation))

    def _fail(self, member: Member, now: int) -> None:
        """It is gone: try again later, or never."""
        member.failures += 1
        why = f": {member.reason}" if member.reason else ""
        if member.failures >= self.config.most_failures:
            self._enter(member, "given up", now)
            self._notes.append(
                f"{member.name} has failed {member.failures} times in a row and stays down{why}"
            )
            return
        pause = self.config.first_pause_ns << (member.failures - 1)
        pause = min(pause, self.config.longest_pause_ns)
        self._enter(member, "waiting", now, until=now + pause)
        if not self._ending:
            self._notes.append(
                f"{member.name} is lost and starts again in {pause / SECOND:g} s{why}"
            )

    def _launch(self, member: Member, now: int) -> None:
        self._last_incarnation += 1
        member.incarnation = self._last_incarnation
        member.turns = 0
        self._enter(member, "starting", now)
        self._launches.append(Life(member.name, member.incarnation))

    def _enter(self, member: Member, state: MemberState, now: int, until: int = 0) -> None:
        member.state, member.since, member.until = state, now, until

    def _actions(self) -> FleetActions:
        actions = FleetActions(
            self._launches, self._kills, self._joined, self._lost, self._notes, self._failed
        )
        self._launches, self._kills, self._joined, self._lost, self._notes = [], [], [], [], []
        self._failed = None
        return actions
