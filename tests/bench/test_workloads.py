"""Workloads: their shape, what options change, and the files that users bring."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from shutil import copy, copytree
from statistics import correlation, fmean

import pytest

from staffel.bench.presets import PRESETS, slo_preset
from staffel.bench.tables import TABLES, load
from staffel.bench.workload import Lengths, Workload, shortened_note
from staffel.bench.workload_files import read_trace
from staffel.bench.workloads import parse_workload
from staffel.config import SLO, ConfigError

ROOT = Path(__file__).parents[2]
SOURCES = ROOT.parent / "shared/data/workloads"


def drawn(workload: Workload, count: int = 20_000, seed: int = 1) -> list[Lengths]:
    return list(islice(workload.lengths(seed), count))


def prompts(asked: list[Lengths]) -> list[int]:
    return [lengths.prompt_tokens for lengths in asked]


def outputs(asked: list[Lengths]) -> list[int]:
    return [lengths.output_tokens for lengths in asked]


def source(name: str) -> list[Lengths]:
    """A published trace; the test is skipped where it isn't beside the repository."""
    path = SOURCES / name
    if not path.is_file():
        pytest.skip(f"{name} is not here")
    return drawn(parse_workload(str(path)), 10**6)


def distance(one: list[int], other: list[int]) -> float:
    """Kolmogorov and Smirnov's: the largest difference of both distribution functions."""
    mine, its = sorted(one), sorted(other)
    shares = (
        (bisect_right(mine, value) / len(mine), bisect_right(its, value) / len(its))
        for value in set(its)
    )
    return max(abs(one - other) for one, other in shares)


def ranks(values: list[int]) -> list[float]:
    """From 0; equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]


def rank_correlation(asked: list[Lengths]) -> float:
    """Spearman's, of prompt and output length."""
    return correlation(ranks(prompts(asked)), ranks(outputs(asked)))


def hit_rate(asked: list[Lengths]) -> float:
    """Share of prompt blocks that a prefix cache without bounds knows."""
    seen: set[int] = set()
    hits = 0
    for lengths in asked:
        hits += sum(key in seen for key in lengths.prefix)
        seen.update(lengths.prefix)
    return hits / sum(len(lengths.prefix) for lengths in asked)


# --- shapes ---


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure-code", "azure_code_2023.csv"),
        ("azure-conversation", "azure_conversation_2023.csv"),
        ("mooncake-conversation", "mooncake_conversation.jsonl"),
    ],
)
def test_a_table_has_the_shape_of_its_source(name: str, file: str) -> None:
    true, made = source(file), drawn(parse_workload(name), 60_000)
    for part in (prompts, outputs):
        assert fmean(part(made)) == pytest.approx(fmean(part(true)), rel=0.03)
        assert distance(part(made), part(true)) < 0.015
    assert rank_correlation(made) == pytest.approx(rank_correlation(true), abs=0.03)


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("chatbot", 755.5, 200.3), ("code", 171.3, 98.2), ("summarization", 1975, 90.7)],
)
def test_the_papers_workloads_have_the_papers_averages(
    name: str, prompt: float, output: float
) -> None:
    asked = drawn(parse_workload(name), 60_000)
    assert fmean(prompts(asked)) == pytest.approx(prompt, rel=0.02)
    assert fmean(outputs(asked)) == pytest.approx(output, rel=0.02)


def test_the_papers_workloads_keep_its_cuts() -> None:
    assert max(p.prompt_tokens + p.output_tokens for p in drawn(parse_workload("chatbot"))) < 2048
    asked = prompts(drawn(parse_workload("summarization")))
    assert min(asked) >= 1900
    assert max(asked) <= 2048


def test_long_prompts_of_chats_get_longer_replies_but_not_of_code_completion() -> None:
    """The dependence of both lengths is in the tables, not just each by itself."""
    chat, code = (drawn(parse_workload(name)) for name in ("chatbot", "azure-code"))
    assert rank_correlation(chat) > 0.4
    assert abs(rank_correlation(code)) < 0.05


def test_conversations_share_prefixes_as_in_the_source() -> None:
    true = source("mooncake_conversation.jsonl")
    for seed in range(3):
        made = drawn(parse_workload("mooncake-conversation"), len(true), seed)
        assert hit_rate(made) == pytest.approx(hit_rate(true), abs=0.04)
        assert hit_rate(made[:1000]) == pytest.approx(hit_rate(true[:1000]), abs=0.04)


def continued(asked: list[Lengths]) -> float:
    """Share of requests that have more than the system prompt in common with an earlier one."""
    seen: set[int] = set()
    count = 0
    for lengths in asked:
        count += any(key in seen for key in lengths.prefix[1:])
        seen.update(lengths.prefix)
    return count / len(asked)


def test_as_many_requests_continue_a_conversation_as_in_the_source() -> None:
    """Few at first: those that began before the start count as new."""
    true = source("mooncake_conversation.jsonl")
    made = drawn(parse_workload("mooncake-conversation"), len(true))
    assert continued(made) == pytest.approx(continued(true), abs=0.03)
    assert continued(made[:500]) == pytest.approx(continued(true[:500]), abs=0.06)


def test_conversations_share_leading_blocks_and_nothing_else() -> None:
    seen: set[int] = set()
    for lengths in drawn(parse_workload("mooncake-conversation"), 3000):
        known = [key in seen for key in lengths.prefix]
        assert known == sorted(known, reverse=True)
        assert len(lengths.prefix) == math.ceil(lengths.prompt_tokens / lengths.block)
        assert lengths.prefix[0] == 0
        seen.update(lengths.prefix)


def test_fixed_is_fixed() -> None:
    assert set(drawn(parse_workload("fixed:150,60"), 100)) == {Lengths(150, 60)}


def test_lognormal_has_the_means_and_variations_asked_for() -> None:
    asked = drawn(parse_workload("lognormal:200,1.5,100,0.5"), 100_000)
    for values, mean, variation in ((prompts(asked), 200, 1.5), (outputs(asked), 100, 0.5)):
        found = fmean(values)
        deviation = math.sqrt(fmean((value - found) ** 2 for value in values))
        assert found == pytest.approx(mean, rel=0.03)
        assert deviation / found == pytest.approx(variation, rel=0.06)


@pytest.mark.parametrize("name", [*TABLES, "lognormal:200,1.5,100,0.5"])
def test_a_seed_repeats_and_another_differs(name: str) -> None:
    workload = parse_workload(name)
    assert drawn(workload, 50, seed=7) == drawn(parse_workload(name), 50, seed=7)
    assert drawn(workload, 50, seed=7) != drawn(workload, 50, seed=8)


# --- options ---


def test_scaling_shrinks_both_lengths_and_keeps_the_shape() -> None:
    plain, small = parse_workload("chatbot"), parse_workload("chatbot", scale_lengths=0.1)
    for before, after in zip(drawn(plain, 500), drawn(small, 500), strict=True):
        assert after.prompt_tokens == max(1, round(before.prompt_tokens * 0.1))
        assert after.output_tokens == max(1, round(before.output_tokens * 0.1))
    assert small.name == "chatbot scale=0.1"


def test_scaling_leaves_at_least_one_token() -> None:
    assert drawn(parse_workload("fixed:3,2", scale_lengths=0.01), 1) == [Lengths(1, 1, block=5)]


def test_scaling_keeps_what_conversations_share() -> None:
    plain = parse_workload("mooncake-conversation")
    small = parse_workload("mooncake-conversation", scale_lengths=0.125)
    assert drawn(small, 1)[0].block == 64
    assert hit_rate(drawn(small, 3000)) == pytest.approx(hit_rate(drawn(plain, 3000)), abs=0.01)


def test_a_shared_prefix_comes_on_top() -> None:
    workload = parse_workload("fixed:100,10", shared_prefix=64)
    assert drawn(workload, 1) == [Lengths(164, 10, shared=64)]
    assert workload.name == "fixed:100,10 shared=64"


def test_what_is_too_long_is_shortened_in_proportion_and_counted() -> None:
    asked = drawn(parse_workload("azure-conversation", max_model_len=1000), 1000)
    plain = drawn(parse_workload("azure-conversation"), 1000)
    for before, after in zip(plain, asked, strict=True):
        if before.prompt_tokens + before.output_tokens <= 1000:
            assert after == before
            continue
        assert after.shortened
        assert after.prompt_tokens + after.output_tokens == 1000
        share = before.prompt_tokens / (before.prompt_tokens + before.output_tokens)
        assert after.prompt_tokens / 1000 == pytest.approx(share, abs=0.002)
    count = sum(lengths.shortened for lengths in asked)
    assert shortened_note(asked) == (
        f"{count} of 1000 requests were shortened to fit the model's context"
    )


def test_a_limit_that_cuts_nothing_leaves_the_name_alone() -> None:
    """The same requests on servers with different limits are the same workload."""
    workload = parse_workload("fixed:100,50", max_model_len=150)
    assert workload.name == "fixed:100,50"
    assert shortened_note(drawn(workload, 10)) is None
    assert parse_workload("fixed:100,50", max_model_len=149).name == "fixed:100,50 max=149"


@pytest.mark.parametrize("name", TABLES)
def test_all_options_together_fit_the_model(name: str) -> None:
    workload = parse_workload(name, scale_lengths=0.5, shared_prefix=500, max_model_len=512)
    for lengths in drawn(workload, 500):
        assert lengths.prompt_tokens + lengths.output_tokens <= 512
        assert lengths.prompt_tokens > lengths.shared == 500
        assert lengths.output_tokens >= 1


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("chatbt", {}, "'chatbt' is no workload and no file; give one of chatbot"),
        ("file:/nowhere.csv", {}, "no file /nowhere.csv"),
        ("fixed:100", {}, "write it as fixed:IN,OUT"),
        ("fixed:100,0", {}, "at least 1"),
        ("fixed:1.5,2", {}, "whole tokens"),
        ("lognormal:1,2,3", {}, "write it as lognormal:IN_MEAN,IN_CV,OUT_MEAN,OUT_CV"),
        ("lognormal:100,-1,100,1", {}, "CVs at least 0"),
        ("lognormal:100,nan,100,1", {}, "write it as"),
        ("chatbot", {"scale_lengths": 0}, "--scale-lengths"),
        ("chatbot", {"scale_lengths": math.inf}, "--scale-lengths"),
        ("chatbot", {"shared_prefix": -1}, "--shared-prefix"),
        ("chatbot", {"shared_prefix": 511, "max_model_len": 512}, "give at most 510"),
    ],
)
def test_wrong_use_is_told_with_the_way_out(text: str, options: dict, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_workload(text, **options)
    assert told in str(caught.value)


# --- files ---

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:10.0000000,12,5
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
46,GPT-4,50,0,50,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]}
{"timestamp": 2500, "input_length": 600, "output_length": 8, "hash_ids": [0, 2]}
"""
SHARE_GPT = json.dumps(
    [
        {
            "id": "a",
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "What is a relay race?"},
                {"from": "gpt", "value": "Runners who pass a baton."},
            ],
        },
        {"id": "b", "conversations": [{"from": "human", "value": "Anybody?"}]},
    ]
)
OWN = """{"prompt_tokens": 100, "output_tokens": 10, "at": 3.5}
{"prompt": "Tell me a story.", "output_tokens": 20, "at": 4}
"""


def written(folder: Path, text: str, name: str = "trace") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def words(text: str) -> list[int]:
    return [0] * len(text.split())


def test_an_azure_csv(tmp_path: Path) -> None:
    workload = parse_workload(written(tmp_path, AZURE))
    assert drawn(workload) == [Lengths(374, 44), Lengths(396, 109), Lengths(12, 5)]
    assert workload.arrivals() == pytest.approx([0, 4.314579, 23.31941])


def test_a_burstgpt_csv_leaves_out_failed_requests_and_says_so(tmp_path: Path) -> None:
    workload = parse_workload("file:" + written(tmp_path, BURST))
    assert drawn(workload) == [Lengths(472, 18), Lengths(1087, 230)]
    assert workload.arrivals() == [0, 40]
    assert workload.notes == (
        "1 of the file's 3 records left out: failed requests, with no tokens",
    )


def test_a_mooncake_jsonl_with_its_prefix_blocks(tmp_path: Path) -> None:
    workload = parse_workload(written(tmp_path, MOONCAKE))
    assert drawn(workload) == [Lengths(700, 9, (0, 1)), Lengths(600, 8, (0, 2))]
    assert workload.arrivals() == [0, 1.5]
    small = parse_workload(written(tmp_path, MOONCAKE), max_model_len=400)
    assert drawn(small)[0].prefix == (0,)


def test_share_gpt_asks_what_a_person_first_said(tmp_path: Path) -> None:
    workload = parse_workload(written(tmp_path, SHARE_GPT), encode=words)
    assert drawn(workload) == [Lengths(5, 5, text="What is a relay race?")]
    assert workload.arrivals() is None
    assert "1 of the file's 2 records left out" in workload.notes[0]


def test_texts_without_a_tokenizer_are_noted_as_approximate(tmp_path: Path) -> None:
    workload = parse_workload(written(tmp_path, SHARE_GPT))
    assert any("approximations" in note for note in workload.notes)


def test_own_jsonl(tmp_path: Path) -> None:
    workload = parse_workload(written(tmp_path, OWN), encode=words)
    assert drawn(workload) == [Lengths(100, 10), Lengths(4, 20, text="Tell me a story.")]
    assert workload.arrivals() == [0, 0.5]


def test_a_gzipped_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert len(drawn(parse_workload(str(path)))) == 3


def test_texts_come_once_each_in_an_order_of_the_seed(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"Question {n}?", "output_tokens": 5}) for n in range(50)]
    workload = parse_workload(written(tmp_path, "\n".join(rows)))
    one, other = drawn(workload, seed=1), drawn(workload, seed=2)
    assert len({lengths.text for lengths in one}) == len(one) == 50
    assert one == drawn(workload, seed=1)
    assert one != other


def test_lengths_without_times_go_on_for_ever(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt_tokens": n, "output_tokens": 5}) for n in range(1, 11)]
    asked = prompts(drawn(parse_workload(written(tmp_path, "\n".join(rows))), 30))
    assert sorted(asked) == sorted([*range(1, 11)] * 3)


def test_another_content_is_another_workload(tmp_path: Path) -> None:
    """`compare` must not take two traces of one file name for the same."""
    one = parse_workload(written(tmp_path, AZURE)).name
    other = parse_workload(written(tmp_path, AZURE.replace("374", "375"))).name
    assert one.startswith("file:trace#")
    assert one != other


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (AZURE.replace("396", "many"), "trace: line 3: ContextTokens: 'many' is not a number"),
        (AZURE.replace("396", "-1"), "trace: line 3: ContextTokens: '-1' must be a number"),
        (AZURE.replace(",109", ""), "trace: line 3: GeneratedTokens: None is not a number"),
        (AZURE.replace("2023-11-16 18:15:50", "noon"), "trace: line 3: TIMESTAMP: 'noon"),
        (AZURE.replace("18:16:10", "18:14:10"), "request 3 comes before the one above it"),
        (BURST.replace("230", "2.5"), "trace: line 3: Response tokens: '2.5' must be whole"),
        (MOONCAKE.replace("[0, 2]", '"x"'), "trace: line 2: hash_ids: must be a list"),
        (MOONCAKE.replace("600", "null"), "trace: line 2: input_length: None is not a number"),
        (MOONCAKE + "{broken\n", "trace: line 3: JSON is malformed"),
        (SHARE_GPT.replace('"Anybody?"}]', '"x"}, 7]'), "record 2: conversations: must be"),
        (SHARE_GPT[:-3], "trace: "),
        ("[1, 2]", "record 1: is no JSON object"),
        (OWN.replace("100", '"?"'), "trace: line 1: prompt_tokens: '?' is not a number"),
        (OWN.replace("20", "0"), "trace: line 2: output_tokens: 0 must be whole tokens, 1 or"),
        (OWN.replace(', "at": 4', ""), "at: give it for all requests or for none"),
        (OWN.replace('"at": 4', '"att": 4'), "line 2: att: is unknown; there are at, output_"),
        (OWN.replace('"prompt":', '"prompt_tokens": 3, "prompt":'), "line 2: prompt_tokens: goes"),
        ("a,b\n1,2\n", "line 2: fields a, b are of no known format (Azure CSV: ContextTokens"),
        ("", "has no record"),
        (BURST[: BURST.index("5,Chat")] + "46,GPT-4,50,0,50,API log\n", "no request in it"),
    ],
)
def test_a_broken_file_is_told_by_line_and_field(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        drawn(parse_workload(path))
    assert told in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00binary", gzip.compress(b"x" * 99)[:-12]])
def test_a_file_that_is_no_text_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_trace(path)


@pytest.mark.parametrize(
    ("file", "count"),
    [
        ("azure_code_2023.csv", 8819),
        ("azure_conversation_2023.csv", 19_366),
        ("mooncake_conversation.jsonl", 12_031),
        ("humaneval.jsonl.gz", 164),
    ],
)
def test_published_files_are_read_whole(file: str, count: int) -> None:
    assert len(source(file)) == count


# --- what is shipped ---


@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_its_source_and_how_far_it_is_from_it(name: str) -> None:
    table = load(name)
    assert table.name == name
    assert table.source
    assert table.licence in ("CC BY 4.0", "MIT", "Apache-2.0")
    for error in (table.fidelity.prompt, table.fidelity.output):
        assert max(abs(error.mean), abs(error.p50)) < 0.02
        assert max(abs(error.p90), abs(error.p99)) < 0.05


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy, since a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copytree(ROOT / "src", folder / "src", ignore=lambda *_: ["staffel.egg-info", "__pycache__"])
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, folder)
    build = "from setuptools.build_meta import build_wheel; build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    with zipfile.ZipFile(next((folder / "out").glob("*.whl"))) as archive:
        yield archive


def test_the_tables_are_installed_and_small(wheel: zipfile.ZipFile) -> None:
    for name in TABLES:
        assert 1000 < wheel.getinfo(f"staffel/bench/data/{name}.json").file_size < 20_000


def test_workloads_start_without_torch() -> None:
    code = (
        "import sys, staffel.bench.workloads, staffel.bench.prompts; print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "False"


def test_presets_are_the_published_bounds() -> None:
    assert slo_preset("paper:opt-13b-chatbot") == SLO(ttft=0.25, tpot=0.1)
    assert slo_preset("paper:opt-66b-summarization") == SLO(ttft=15, tpot=0.15)
    assert slo_preset("blog:opt-66b-chatbot") == SLO(ttft=0.4, tpot=0.1)
    assert len(PRESETS) == 9
    with pytest.raises(ConfigError, match="there are paper:opt-13b-chatbot, "):
        slo_preset("paper:opt-30b-chatbot")
