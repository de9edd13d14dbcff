"""Stop strings in a text that comes bit by bit."""

from __future__ import annotations


class StopScanner:
    """Lets text through, but holds back what may be the beginning of a stop string.

    Matching goes character by character, so the result doesn't depend on where the text was cut:
    the stop string that is complete first ends it, the longest one if several are.
    """

    def __init__(self, stops: list[str]) -> None:
        self._starting: dict[str, list[str]] = {}
        for stop in stops:
            self._starting.setdefault(stop[0], []).append(stop)
        self._partial: list[tuple[str, int]] = []
        """Stop strings that the text's end may grow into, and how far they are."""
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text to release, and the stop string that ended it, if one did.

        A stop string that becomes complete while not `armed` is ordinary text.
        """
        if not self._starting:
            return text, None
        for place, char in enumerate(text, 1):
            complete = self._advance(char)
            if complete is not None and armed:
                whole = self._held + text[:place]
                self._held = ""
                return whole[: -len(complete)], complete
        return self._release(self._held + text), None

    def flush(self) -> str:
        """The end of the text: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        grown = [(stop, count + 1) for stop, count in self._partial if stop[count] == char]
        grown += [(stop, 1) for stop in self._starting.get(char, ())]
        self._partial = [(stop, count) for stop, count in grown if count < len(stop)]
        complete = [stop for stop, count in grown if count == len(stop)]
        return max(complete, key=len, default=None)

    def _release(self, text: str) -> str:
        keep = max((count for _, count in self._partial), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]
