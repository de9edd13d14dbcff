"""Text to make prompts of: plain sentences, and small Python functions with their docstrings.

All pieces of a style begin in the same way and end in the same kind of character, so that they
can be joined in any order and each is tokenised as it is alone.
"""

from __future__ import annotations

from random import Random

from staffel.bench.workload import Style

_WORDS = """
able area army back ball band bank base bath bear been bell best bird blue boat body bone book born
both bowl busy cake call came camp card care case city club coal coat cold come cook cool corn cost
crew dark date dawn days deal deep desk door down draw drop dust east edge face fact fair fall farm
fast fear feel feet file film find fine fire fish five flat food foot form four free full game gift
girl give goal gold good gray grow half hall hand hard have head hear heat held help here high hill
hold home hope hour idea iron item join jump just keep kind king knew lady lake land last late lead
left less life line list live long look
"""
WORDS = tuple(_WORDS.split())
"""One token each, with the space before it, in nearly all tokenizers. 128 of them."""

_ADJECTIVES = "old new long quiet early final large small clear local heavy common simple whole"
_NOUNS = (
    "report engine garden market letter river station winter teacher window island machine council "
    "village harbor student picture journey measure question history kitchen library factory"
)
_VERBS = "changed reached followed described crossed improved opened watched carried finished"
_PLACES = "near behind before after beside without through under"
_ACTIONS = (
    ("sum", "the sum of", "total += value", "total"),
    ("count", "how many there are of", "total += 1", "total"),
    ("largest", "the largest of", "total = max(total, value)", "total"),
    ("product", "the product of", "total = (total or 1) * value", "total"),
    ("squares", "the sum of the squares of", "total += value * value", "total"),
    ("distance", "the sum of the distances from zero of", "total += abs(value)", "total"),
)
_FILTERS = (
    ("even", "the even numbers", "value % 2 == 0"),
    ("odd", "the odd numbers", "value % 2 == 1"),
    ("positive", "the numbers above zero", "value > 0"),
    ("small", "the numbers below the limit", "value < limit"),
    ("large", "the numbers above the limit", "value > limit"),
    ("divisible", "the multiples of the limit", "limit and value % limit == 0"),
)
_THINGS = "orders prices scores visits weights points steps marks shares heights ages delays"


def pieces(style: Style) -> list[str]:
    """The pool that bodies of prompts are made of, always the same."""
    return _functions() if style == "code" else _sentences()


def opening(style: Style, *, first: bool) -> str:
    """What stands before the word that begins a part of a prompt (`first`: all of the prompt)."""
    if style == "code":
        return "# " if first else "\n# "
    return "" if first else " "


def _sentences(count: int = 200) -> list[str]:
    rng = Random("sentences")
    adjectives, nouns, verbs, places = (
        words.split() for words in (_ADJECTIVES, _NOUNS, _VERBS, _PLACES)
    )
    return [
        f" The {rng.choice(adjectives)} {rng.choice(nouns)} {rng.choice(verbs)} "
        f"the {rng.choice(nouns)} {rng.choice(places)} the {rng.choice(adjectives)} "
        f"{rng.choice(nouns)}."
        for _ in range(count)
    ]


def _functions() -> list[str]:
    return [
        _function(action, chosen, thing)
        for number, thing in enumerate(_THINGS.split())
        for place, action in enumerate(_ACTIONS)
        for chosen in _FILTERS[(number + place) % 2 :: 2]
    ]


def _function(action: tuple[str, str, str, str], chosen: tuple[str, str, str], thing: str) -> str:
    name, what, update, result = action
    kind, which, condition = chosen
    return (
        f"\n\n\ndef {name}_of_{kind}_{thing}({thing}: list[int], limit: int = 10) -> int:\n"
        f'    """Return {what} {which} in {thing}.\n'
        f"    >>> {name}_of_{kind}_{thing}([])\n"
        "    0\n"
        '    """\n'
        "    total = 0\n"
        f"    for value in {thing}:\n"
        f"        if {condition}:\n"
        f"            {update}\n"
        f"    return {result}"
    )
