"""JSON schemas for fuzz_http.py: of all keywords that the grammar library knows, at any value.

Most are small and of ordinary values, because the interesting ones are costly: a grammar over which
the compiling process is lost takes a second, and one that is given up takes five.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = Any
"""Mostly an object; true, false and what is no schema at all come up as well."""

EDGES = [
    sign * (2**power) + step
    for power in (31, 32, 53, 63, 64)
    for sign in (1, -1)
    for step in (-1, 0, 1, 2)
] + [10**30, -(10**30), 10**400]
"""Integers around which number types end."""
FLOATS = [-0.0, 0.1, 0.5, 1.5, -2.5, 5e-324, 1e-300, 1e-7, 1e16, 1e21, 1e308, -1e308, 0.1 + 0.2]
SPECIAL = ["<|im_end|>", "<|endoftext|>", "<|im_start|>assistant\n", "a<|im_end|>b", "<|im_end|"]
"""Text that the tokenizer would take for special tokens."""
WORDS = ["", "a", "yes", "no", "red", "hello world", "x y z", "name", "0", "null", "-1"]
ODD_TEXTS = [
    "\x00", "\n", "\r\n\t", '"', "\\", '\\"', "/", "\x7f", "é", "e\u0301", "漢字", "\N{PARROT}",
    "\u2028", "\ufeff", "\ufffd", "\u202eabc", "a" * 300, "%json {}", "start: /a/", "$ref", "#",
    "x-guidance", "__proto__", "</s>", "{{x}}", "\ud83d",
]  # fmt: skip
PATTERNS = [
    "^a$", "a+", "[a-z]{1,3}", "^\\d{2}$", "", ".", ".*", "^(a|b)*c$", "\\w+", "\\p{L}", "é",
    "(?i)ab", "[^\\x00-\\x7f]", "^$", "a{0}", "\\u0041", "^\\N$", "(", "[", "*", "a**", "\\",
    "(?=a)b", "(?!a)b", "(?<=a)b", "(a)\\1", "\\bword\\b", "a{3,2}", "^^a$$", "a|", "(?P<x>a)",
    "<\\|im_end\\|>",
]  # fmt: skip
CATASTROPHIC = [
    "(a+)+$", "(a|a)*b", "(a|aa)+$", "(x+x+)+y", "^(([a-z])+.)+[A-Z]([a-z])+$", "(.*)*(.*)*x",
    "(a{50}){50}", "a{1000}", "[ab]*a[ab]{12}", "[\\s\\S]{0,3000}", "\\d{1,100000}",
    "(a?){64}a{64}", "((((a*)*)*)*)*", "a{4294967296}", "(" * 200 + "a" + ")" * 200,
    ".*a.{20}", "|".join(f"w{i}x*" for i in range(300)),
]  # fmt: skip
FORMATS = [
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "regex", "json-pointer", "unknown", "",
]  # fmt: skip
TYPES = ["string", "number", "integer", "boolean", "null", "object", "array"]
KEYWORDS = [
    "$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "definitions", "enum",
    "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maximum",
    "maxProperties", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not",
    "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames",
    "required", "type", "uniqueItems", "if", "then", "else", "contains", "dependentRequired",
    "unevaluatedProperties", "x-guidance", "$schema", "$id", "$anchor", "title", "description",
]  # fmt: skip


def chance(draw: random.Random, share: float) -> bool:
    return draw.random() < share


def an_integer(draw: random.Random) -> int:
    return draw.choice(EDGES) if chance(draw, 0.1) else draw.randint(-3, 20)


def a_count(draw: random.Random) -> Any:
    """For minItems and its like."""
    if chance(draw, 0.04):
        return draw.choice([*EDGES, -1, 1000, 10**6, 1.5, 1e300, "1", None, True])
    return draw.randint(0, 4)


def a_number(draw: random.Random) -> int | float:
    return draw.choice(FLOATS) if chance(draw, 0.25) else an_integer(draw)


def a_text(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.7:
        return draw.choice(WORDS)
    return draw.choice(SPECIAL if kind < 0.85 else ODD_TEXTS)


def a_value(draw: random.Random, depth: int = 2) -> Any:
    """Any JSON value."""
    kind = draw.randrange(9 if depth else 7)
    if kind == 7:
        return [a_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if kind == 8:
        return {a_text(draw): a_value(draw, depth - 1) for _ in range(draw.randint(0, 3))}
    if kind >= 4:
        return a_text(draw)
    return draw.choice([None, True, False]) if kind == 0 else a_number(draw)


# ---- schemas of one kind


def _string(draw: random.Random, depth: int) -> Schema:
    schema: dict[str, Any] = {"type": "string"}
    if chance(draw, 0.35):
        bad = chance(draw, 0.04)
        schema["pattern"] = draw.choice(CATASTROPHIC if bad else PATTERNS)
    if chance(draw, 0.15):
        schema["format"] = draw.choice(FORMATS)
    for keyword in ("minLength", "maxLength"):
        if chance(draw, 0.3):
            schema[keyword] = a_count(draw)
    return schema


def _number(draw: random.Random, depth: int) -> Schema:
    schema: dict[str, Any] = {"type": draw.choice(["number", "integer"])}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if chance(draw, 0.25):
            schema[keyword] = a_number(draw)
    return schema


def _object(draw: random.Random, depth: int) -> Schema:
    names = [a_text(draw) for _ in range(draw.randint(0, 4))]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: a_schema(draw, depth - 1) for name in names},
    }
    if chance(draw, 0.6):
        schema["required"] = [name for name in names if chance(draw, 0.7)]
    if chance(draw, 0.1):
        schema.setdefault("required", []).append(a_text(draw))
    if chance(draw, 0.4):
        schema["additionalProperties"] = chance(draw, 0.3) and a_schema(draw, depth - 1)
    if chance(draw, 0.1):
        schema["patternProperties"] = {draw.choice(PATTERNS): a_schema(draw, depth - 1)}
    for keyword in ("minProperties", "maxProperties"):
        if chance(draw, 0.05):
            schema[keyword] = a_count(draw)
    return schema


def _array(draw: random.Random, depth: int) -> Schema:
    schema: dict[str, Any] = {"type": "array"}
    if chance(draw, 0.8):
        schema["items"] = a_schema(draw, depth - 1)
    if chance(draw, 0.2):
        schema["prefixItems"] = [a_schema(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    for keyword in ("minItems", "maxItems"):
        if chance(draw, 0.35):
            schema[keyword] = a_count(draw)
    if chance(draw, 0.05):
        schema["uniqueItems"] = True
    return schema


def _constant(draw: random.Random, depth: int) -> Schema:
    if chance(draw, 0.5):
        return {"const": a_value(draw)}
    return {"enum": [a_value(draw, 1) for _ in range(draw.randint(0, 5))]}


def _choice(draw: random.Random, depth: int) -> Schema:
    keyword = draw.choice(["anyOf", "oneOf", "allOf"])
    return {keyword: [a_schema(draw, depth - 1) for _ in range(draw.randint(0, 3))]}


def _reference(draw: random.Random, depth: int) -> Schema:
    usual = ["#/$defs/node", "#/$defs/leaf", "#"]
    odd = ["#/$defs/none", "#/$defs/self", "#/properties", "", "#/%", "http://localhost/x", "#/a/0"]
    return {"$ref": draw.choice(odd if chance(draw, 0.2) else usual)}


def _type_only(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice([*TYPES, draw.sample(TYPES, 2), []])}


def _wrong(draw: random.Random, depth: int) -> Schema:
    """Keywords with values that they can't have."""
    count = draw.randint(1, 3)
    return {name: a_value(draw) for name in draw.sample(KEYWORDS, count)}


def _no_schema(draw: random.Random, depth: int) -> Schema:
    return draw.choice([True, False, {}, None, 1, "string", [], [{}]])


_LEAVES: dict[Callable[[random.Random, int], Schema], int] = {
    _string: 4, _number: 4, _constant: 5, _type_only: 3, _wrong: 1, _no_schema: 1,
}  # fmt: skip
_BRANCHES = {**_LEAVES, _object: 9, _array: 5, _choice: 4, _reference: 2}


def a_schema(draw: random.Random, depth: int) -> Schema:
    kinds = _BRANCHES if depth > 0 else _LEAVES
    [make] = draw.choices(list(kinds), list(kinds.values()))
    return make(draw, depth)


# ---- large ones


def _large(draw: random.Random) -> Schema:
    size = draw.choice([50, 300, 3000])
    kind = draw.randrange(8)
    if kind == 0:
        return {"enum": [f"{a_text(draw)}{i}" for i in range(size)]}
    if kind == 1:
        names = [f"p{i}" for i in range(size)]
        required = names if chance(draw, 0.5) else []
        properties = {name: {"type": "string"} for name in names}
        return {"type": "object", "properties": properties, "required": required}
    if kind == 2:
        return {"type": "array", "items": a_schema(draw, 1), "minItems": size * 100}
    if kind == 3:
        return {"type": "string", "minLength": size, "maxLength": size * 100}
    if kind == 4:
        return {"anyOf": [{"const": i} for i in range(size)]}
    if kind == 5:
        return {"allOf": [{"minimum": i, "type": "integer"} for i in range(size)]}
    if kind == 6:
        return _deep(draw, min(size, 300))
    return {"const": "x" * size * 100 + draw.choice(SPECIAL)}


def _deep(draw: random.Random, levels: int) -> Schema:
    schema: Schema = {"type": "null"}
    wrap = draw.choice(
        [
            lambda inner: {"type": "array", "items": inner},
            lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
            lambda inner: {"anyOf": [inner, {"type": "null"}]},
            lambda inner: {"allOf": [inner]},
        ]
    )
    for _ in range(levels):
        schema = wrap(schema)
    return schema


# ---- a whole one


def whole_schema(draw: random.Random) -> Schema:
    """A schema as a request brings it: its references lead somewhere, as a rule."""
    if chance(draw, 0.008):
        return _large(draw)
    if chance(draw, 0.15):
        return _constant(draw, 0)
    schema = a_schema(draw, draw.choice([0, 1, 1, 2, 2, 3]))
    if not isinstance(schema, dict):
        return schema
    if "$ref" in repr(schema) and chance(draw, 0.9):
        schema["$defs"] = _definitions(draw)
    if chance(draw, 0.03):
        schema["x-guidance"] = draw.choice(
            [{"whitespace_flexible": True}, {"item_separator": "<|im_end|>"}, {}, 1, {"a": []}]
        )
    return schema


def _definitions(draw: random.Random) -> dict[str, Schema]:
    """Of which some contain themselves."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {}}}
    nested = {"type": "array", "items": {"$ref": "#/$defs/node"}}
    return {
        "node": draw.choice([node, nested, {"anyOf": [{"$ref": "#/$defs/node"}, {"const": 1}]}]),
        "leaf": a_schema(draw, 0),
        "self": {"$ref": "#/$defs/self"},
    }
