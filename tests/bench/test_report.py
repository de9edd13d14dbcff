"""Pages, tables, the quiet line, and comparisons."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from staffel.bench.compare import comparison
from staffel.bench.report import result_tables, write_comparison, write_report
from staffel.bench.results import Generator, Interference, Interval
from staffel.bench.summary import attainment_at_scales, in_flight, percentile, quiet_line
from staffel.config import SLO, ConfigError
from tests.bench.examples import OF, probe, result


class Page(HTMLParser):
    """The words of a page, and what it would load from elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.words = ""
        self.loads: list[str] = []
        self.pictures = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.pictures += tag == "svg"
        found = dict(attrs)
        links = [found.get(name) for name in ("src", "href", "xlink:href")]
        self.loads += [link for link in links if link and not link.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_page_says_it_all_and_loads_nothing(tmp_path: Path) -> None:
    page = Page(write_report(result("1P1D", notes=["<odd & true>"]), tmp_path / "new" / "folder"))
    assert page.loads == []
    assert page.pictures == 5
    for text in ("1P1D: goodput", "18 req/s", "9 req/s", "<odd & true>", "staffel bench goodput"):
        assert text in page.words


def test_pages_of_other_kinds(tmp_path: Path) -> None:
    rows = [
        Interference(
            prompt_tokens=128, streams=8, ttft=0.4, itl_alone=0.05, itl_during=0.1, itl_worst=0.2
        )
    ]
    disturbed = result("d", None, kind="interference", slo=None, interference=rows)
    page = Page(write_report(disturbed, tmp_path))
    assert page.pictures == 1
    assert "2.00" in page.words
    scaled = result("s", None, kind="slo-scale", scales=[(0.5, 0.2), (1.0, 0.9)])
    assert "90.0%" in Page(write_report(scaled, tmp_path)).words


def test_a_page_without_any_request(tmp_path: Path) -> None:
    page = Page(write_report(result("empty", None, probes=[], interrupted=True), tmp_path))
    assert "interrupted" in page.words


def test_a_search_that_was_interrupted_shows_no_other_figure_as_the_answer(tmp_path: Path) -> None:
    ended = result("early", None, probes=[probe(10)], interrupted=True)
    page = Page(write_report(ended, tmp_path))
    assert "no goodput found" in page.words
    assert "attainment (target" not in page.words
    assert result_tables(ended)[0] == ("early: no goodput found (interrupted)", [])
    assert quiet_line(ended) == "no goodput found (interrupted)"


def test_tables_for_a_terminal() -> None:
    titles = [title for title, _ in result_tables(result("1P1D"))]
    assert titles[0].startswith("1P1D: 18 req/s goodput (17 to 19)")
    assert titles[1:] == ["Attainment against rate", "At 15 requests/s, ms"]


def test_the_quiet_line() -> None:
    assert quiet_line(result("x")) == "goodput=18 low=17 high=19 per_device=9"
    assert quiet_line(result("x", None)).startswith("goodput=nan")
    line = quiet_line(result("x", None, kind="run", probes=[probe(5)]))
    assert line.startswith("rate=5 attainment=")
    assert " ttft_p90=" in line
    assert " tpot_p90=0.02 " in line


def test_comparison_is_per_device_and_relative_to_the_first() -> None:
    rows = comparison([result("a"), result("b", Interval(9.0, 8.0, 10.0), devices=1)])
    assert [row.per_device.value for row in rows] == [9.0, 9.0]
    assert rows[1].ratio == Interval(1.0, 8.0 / 9.5, 10.0 / 8.5)
    assert comparison([result("a"), result("none", None)])[1].ratio is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slo": SLO(ttft=9.0)}, "SLOs"),
        ({"workload": "fixed:1,1"}, "workloads"),
        ({"target": 0.5}, "targets"),
        ({"arrivals": "constant"}, "arrival"),
        ({"kind": "sweep"}, "kinds"),
    ],
)
def test_what_was_measured_differently_is_not_compared(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        comparison([result("a"), result("b", **change)])


def test_comparison_page(tmp_path: Path) -> None:
    page = Page(write_comparison([result("1P1D"), result("2C", Interval(9, 8, 10))], tmp_path))
    assert page.pictures == 1
    assert "1P1D" in page.words
    assert "0.50 (0.421 to 0.588)" in page.words


LATE = Generator(lateness_p99=1, cpu_share=1, processes=1, kept_up=False, trouble="ran 1 s behind")


def test_a_generator_that_could_not_keep_up_is_noted(tmp_path: Path) -> None:
    bad = msgspec.structs.replace(probe(5), generator=LATE)
    assert "could not keep up" in Page(write_report(result("x", probes=[bad]), tmp_path)).words


def test_only_figures_that_rest_on_a_late_generator_are_spoiled() -> None:
    bad = msgspec.structs.replace(probe(5), generator=LATE)
    assert result("x", goodput=None, probes=[probe(5), bad]).spoiled == "ran 1 s behind"
    assert result("x", goodput=None, probes=[probe(5)]).spoiled is None
    assert result("x", probes=[probe(5), bad]).spoiled is None  # the search did without it


def test_looser_slos_are_met_by_more() -> None:
    shares = [share for _, share in attainment_at_scales(probe(15), OF, [0.3, 0.6, 1, 2, 9])]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0


def test_in_flight_counts_up_and_down() -> None:
    times, counts = in_flight(probe(15).records)
    assert times == sorted(times)
    assert min(counts) >= 0
    assert counts[-1] == 0


def test_percentiles_are_times_that_really_were() -> None:
    assert percentile([1.0, 2.0, 10.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([], 90) is None
