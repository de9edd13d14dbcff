"""Prompts: as long as meant, unlike each other where they should be, alike where they should."""

from __future__ import annotations

import ast
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from staffel.bench import corpus
from staffel.bench.encoders import Encode, approximate_tokens, folder_encode, server_encode
from staffel.bench.prompts import PromptMaker
from staffel.bench.workload import Ask, Lengths, Style
from staffel.bench.workloads import parse_workload
from staffel.config import ConfigError

STYLES: list[Style] = ["prose", "code"]


@pytest.fixture(scope="module")
def encode(real_model: Path) -> Encode:
    return folder_encode(real_model)


def of_characters(*, special: bool = False) -> Encode:
    """A tokenizer without words; with `special`, one that adds a token in front."""
    alphabet = {chr(code): place for place, code in enumerate([10, *range(32, 127)])}
    tokenizer = Tokenizer(models.WordLevel({**alphabet, "?": 31, "<s>": 200}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if special:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 200)])
    return lambda text: tokenizer.encode(text).ids


def common(one: list[int], other: list[int]) -> int:
    """Leading tokens that both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def tokens(encode: Encode, ask: Ask) -> list[int]:
    return encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt


# --- lengths ---


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_is_as_long_as_meant(encode: Encode, style: Style, as_ids: bool) -> None:
    maker = PromptMaker(encode, style=style, as_ids=as_ids)
    for index, length in enumerate([*range(1, 200), 1000, 3000]):
        ask = maker.ask(index, Lengths(length, 7))
        assert len(tokens(encode, ask)) == ask.prompt_tokens == length
        assert ask.output_tokens == 7
    assert maker.notes == ()


@pytest.mark.parametrize("as_ids", [False, True])
def test_blocks_and_shared_tokens_are_part_of_the_length(encode: Encode, as_ids: bool) -> None:
    workload = parse_workload("mooncake-conversation", scale_lengths=0.03, shared_prefix=33)
    asked = list(islice(workload.lengths(0), 200))
    made = PromptMaker(encode, as_ids=as_ids).asks(asked)
    meant = [lengths.prompt_tokens for lengths in asked]
    assert [len(tokens(encode, ask)) for ask in made] == meant


def test_what_the_server_adds_is_part_of_the_length(encode: Encode) -> None:
    """A chat template of 30 tokens."""
    ask = PromptMaker(encode, extra_tokens=30).ask(0, Lengths(100, 1))
    assert len(tokens(encode, ask)) == 70
    assert ask.prompt_tokens == 100


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_special_token_in_front_is_part_of_the_length(as_ids: bool) -> None:
    encode = of_characters(special=True)
    ask = PromptMaker(encode, as_ids=as_ids).ask(0, Lengths(500, 1))
    assert tokens(encode, ask)[0] == 200
    assert len(tokens(encode, ask)) == ask.prompt_tokens
    if as_ids:
        assert ask.prompt_tokens == 500


def test_ids_are_exact_with_a_tokenizer_that_has_no_words() -> None:
    encode = of_characters()
    maker = PromptMaker(encode, as_ids=True)
    assert [len(maker.ask(n, Lengths(n, 1)).prompt) for n in range(1, 400)] == [*range(1, 400)]


def test_text_that_cannot_be_exact_is_noted() -> None:
    maker = PromptMaker(of_characters())
    assert "too short" in maker.notes[0]
    ask = maker.ask(0, Lengths(500, 1))
    assert len(str(ask.prompt)) == ask.prompt_tokens
    assert 490 < ask.prompt_tokens <= 500


def test_a_tokenizer_that_joins_pieces_is_noted() -> None:
    """Its counts of pieces don't add up: pairs of words are one token."""

    def encode(text: str) -> list[int]:
        return [0] * -(-len(text.split()) // 2)

    assert "differ from the meant ones" in PromptMaker(encode).notes[0]


@pytest.mark.parametrize("style", STYLES)
def test_without_a_tokenizer_lengths_are_near_and_noted(encode: Encode, style: Style) -> None:
    maker = PromptMaker(None, style=style)
    assert "approximations" in maker.notes[0]
    assert len(encode(str(maker.ask(0, Lengths(1000, 1)).prompt))) == pytest.approx(1000, rel=0.15)


def test_the_approximation_is_near_for_other_texts(encode: Encode) -> None:
    for file in ("README.md", "docs/api.md"):
        text = (Path(__file__).parents[2] / file).read_text()
        assert approximate_tokens(text) == pytest.approx(len(encode(text)), rel=0.2)


def test_ids_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        PromptMaker(None, as_ids=True)


def test_a_thousand_long_prompts_are_made_at_once(encode: Encode) -> None:
    maker = PromptMaker(encode)
    start = time.perf_counter()
    assert len(maker.asks([Lengths(1000, 10)] * 1000)) == 1000
    assert time.perf_counter() - start < 1


# --- alike and unlike ---


@pytest.mark.parametrize("style", STYLES)
def test_no_two_prompts_begin_alike(encode: Encode, style: Style) -> None:
    """Of one run or of two: a prefix cache with blocks of 16 tokens finds nothing."""
    makers = [PromptMaker(encode, seed=seed, style=style) for seed in (1, 2)]
    made = [
        tuple(tokens(encode, maker.ask(index, Lengths(64, 1))))
        for maker in makers
        for index in (*range(100), *range(10_000, 10_010))
    ]
    assert len({ids[:16] for ids in made}) == len(made)
    assert len({ids[16:] for ids in made}) == len(made)


def test_a_seed_repeats(encode: Encode) -> None:
    one, same, other = (
        PromptMaker(encode, seed=seed).asks([Lengths(50, 1, (0,), 20)] * 5) for seed in (3, 3, 4)
    )
    assert one == same
    assert all(mine.prompt != its.prompt for mine, its in zip(one, other, strict=True))


@pytest.mark.parametrize("style", STYLES)
def test_shared_tokens_are_equal_for_all_and_no_more_is(encode: Encode, style: Style) -> None:
    made = PromptMaker(encode, style=style).asks([Lengths(300, 1, shared=100)] * 20)
    first, *rest = (tokens(encode, ask) for ask in made)
    # "# " begins every comment of code, the first of a prompt's own text too.
    assert all(100 <= common(first, ids) <= (102 if style == "code" else 100) for ids in rest)


@pytest.mark.parametrize("as_ids", [False, True])
def test_equal_ids_are_equal_text_and_unequal_ones_are_not(encode: Encode, as_ids: bool) -> None:
    prefixes = [(0, 1, 2), (0, 1, 3), (0, 4, 2), (5, 1, 2)]
    maker = PromptMaker(encode, as_ids=as_ids)
    first, *rest = (
        tokens(encode, ask) for ask in maker.asks(Lengths(250, 1, ids, 64) for ids in prefixes)
    )
    assert [common(first, ids) for ids in rest] == [128, 64, 0]


def test_a_prompt_of_blocks_alone_is_the_same_for_every_request(encode: Encode) -> None:
    """As traces have it: the last block's id stands for the prompt's end as well."""
    made = PromptMaker(encode).asks([Lengths(100, 1, (0, 1), 64)] * 2)
    assert made[0].prompt == made[1].prompt


def test_code_is_code() -> None:
    for piece in corpus.pieces("code"):
        ast.parse(piece)
    prompt = str(PromptMaker(None, style="code").ask(0, Lengths(400, 1)).prompt)
    assert prompt.startswith("# ")
    assert "def " in prompt


# --- texts of a file ---

STORY = "Once upon a time there was a runner who dropped the baton. " * 5


def test_a_text_is_sent_as_it_is(encode: Encode) -> None:
    count = len(encode(STORY))
    ask = PromptMaker(encode).ask(0, Lengths(count, 9, text=STORY))
    assert ask == Ask(STORY, 9, count)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_text_is_cut_where_less_is_wanted(encode: Encode, as_ids: bool) -> None:
    ask = PromptMaker(encode, as_ids=as_ids).ask(0, Lengths(20, 9, text=STORY))
    assert len(tokens(encode, ask)) == ask.prompt_tokens == 20
    assert encode(STORY)[:20] == tokens(encode, ask)


def test_a_text_comes_behind_the_shared_tokens(encode: Encode) -> None:
    count = len(encode(STORY)) + 40
    maker = PromptMaker(encode)
    asks = [maker.ask(n, Lengths(count, 1, shared=40, text=f"{n} {STORY}")) for n in range(2)]
    one, other = (tokens(encode, ask) for ask in asks)
    assert common(one, other) >= 40
    assert "0 Once upon a time" in str(asks[0].prompt)
    assert all(ask.prompt_tokens <= count for ask in asks)


# --- tokenizers ---


class _Server(BaseHTTPRequestHandler):
    """/tokenize of two dialects: by character, of the field that the dialect has."""

    protocol_version = "HTTP/1.1"
    field = "prompt"
    closes = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = [ord(character) for character in body.get(self.field, "")]
        answer = json.dumps({"tokens": found, "count": len(found)}).encode()
        known = self.path == "/base/tokenize"
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(answer) if known else 2))
        self.end_headers()
        self.wfile.write(answer if known else b"no")
        self.close_connection = self.closes

    def log_message(self, *_: object) -> None:
        """Not to the test's output."""


@pytest.fixture
def server() -> Iterator[tuple[type[_Server], str]]:
    handler = type("_Own", (_Server,), {})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield handler, f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.parametrize("field", ["prompt", "content"])
@pytest.mark.parametrize("closes", [False, True])
def test_a_server_counts(server: tuple[type[_Server], str], field: str, closes: bool) -> None:
    handler, url = server
    handler.field, handler.closes = field, closes
    counted = server_encode(f"{url}/base/v1", model="m")
    assert counted("abc") == [97, 98, 99]
    assert counted("de") == [100, 101]


def test_a_server_without_tokenize_is_told(server: tuple[type[_Server], str]) -> None:
    with pytest.raises(ConfigError, match=r"has no /tokenize .* give the model's folder"):
        server_encode(f"{server[1]}/v1", model="m")


def test_no_server_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer: 127\.0\.0\.1"):
        server_encode("http://127.0.0.1:9", model="m")


def test_a_folder_without_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        folder_encode(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        folder_encode(tmp_path)
