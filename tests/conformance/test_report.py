"""The report: it shows the results of the run in every format, and no text of it becomes markup."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

import slm_conformance
from slm_conformance.report import check_paths
from slm_conformance.report.badge import svg_badge
from slm_conformance.report.data import json_data
from slm_conformance.report.page import html_page
from slm_conformance.report.record import Report, Result, Run, Scenario, Section, one_line
from slm_conformance.suite import meta, scenarios
from slm_conformance.suite.hints import HINTS
from slm_conformance.suite.meta import Verdict
from slm_conformance.suite.subject import ModelUnderTest, Subject
from slm_core.errors import InvalidOption

pytest_plugins = ["pytester"]

PLUGIN = ("--disable-plugin-autoload", "-p", "slm_conformance.pytest_plugin")
"""Each run of pytester would import other plugins again."""

ADOPTION = """
from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *

class Fixtures(BackendFixtures):
    backend = "slm_conformance.{}"
    models = ("llama-f32",)
    kv_types = ("f32",)
"""
GOOD, CLAMPING = ADOPTION.format("toy:ToyBackend"), ADOPTION.format("mutants.edits:TruncateClamps")
PAST_THE_END = "TestTruncate::test_past_the_end"
VOID = {"meta", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """A page as a browser parses it: elements, their attributes, and the text of each row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"unclosed elements: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        is_row = "row" in (dict(attrs).get("class") or "").split()
        if is_row:
            self.rows.append("")
        if tag not in VOID:
            self._open.append((tag, is_row))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if any(is_row for _, is_row in self._open):
            self.rows[-1] += data + " "

    def row(self, test: str) -> str:
        """The text of the only row of a test."""
        (text,) = [row for row in self.rows if row.split()[:1] == [test]]
        return text


@pytest.fixture
def report_on(pytester: pytest.Pytester):
    """A function that runs pytest on modules that adopt the suite, and returns the result and the report as JSON."""

    def run(modules: dict[str, str], *args: str) -> tuple[pytest.RunResult, dict]:
        pytester.makepyfile(**modules)
        reports = [f"--slm-report=out{suffix}" for suffix in (".html", ".json", ".svg")]
        options = ("--import-mode=importlib", "-p", "no:cacheprovider", "-o", "xfail_strict=true")
        result = pytester.runpytest_inprocess(*PLUGIN, *options, *reports, *args)
        out = pytester.path / "out.json"
        return result, json.loads(out.read_text()) if out.exists() else {}

    return run


def cells(document: dict, run: int = 0) -> dict[str, tuple[str, str]]:
    """The verdict and reason of each scenario, for a run with one model in its own chat format."""
    rows = [row for section in document["sections"] for row in section["scenarios"]]
    results = {
        row["name"]: [cell for cell in row["results"] if cell["run"] == run and "+" not in cell["model"]]
        for row in rows
    }
    others = ("TestMeaning", "TestModelBased", "TestMtp")  # they run on other models, or on several
    assert all(len(of_run) == 1 for name, of_run in results.items() if not name.startswith(others))
    return {name: (of_run[0]["verdict"], of_run[0]["reason"]) for name, of_run in results.items()}


def test_exactly_the_failing_scenarios_are_shown_as_failing(report_on, pytester):
    modules = {"test_good": GOOD, "test_clamps": CLAMPING}
    result, document = report_on(modules, "-k", "TestTruncate or TestDeclarations")
    reason = "truncate(21) of 20 tokens: accepted, but the contract says InvalidPosition"
    assert result.parseoutcomes()["failed"] == 1
    labels = [run["label"] for run in document["runs"]]
    assert labels == ["toy (test_clamps)", "toy (test_good)"]
    broken, good = cells(document, 0), cells(document, 1)
    assert {name: cell for name, cell in broken.items() if cell[0] == "FAILS"} == {PAST_THE_END: ("FAILS", reason)}
    ran = {name for name in good if name.startswith(("TestTruncate", "TestDeclarations"))}
    assert {good[name] for name in ran} == {("holds", "")}
    assert {good[name] for name in set(good) - ran} == {("not run", "")}
    assert document["summary"]["holds"] == result.parseoutcomes()["passed"] == 2 * len(ran) - 1
    page = Page((pytester.path / "out.html").read_text())
    assert [row for row in page.rows if "FAILS" in row] == [page.row("test_past_the_end")]
    assert reason in page.row("test_past_the_end")
    assert "1  FAIL" in " ".join(page.rows).replace(" FAIL", "  FAIL")
    badge = ET.fromstring((pytester.path / "out.svg").read_text())
    assert badge.findtext("{http://www.w3.org/2000/svg}title").startswith(
        f"conformance: 1 FAIL, {2 * len(ran) - 1} hold"
    )


def test_absent_expected_and_stale_failures_are_distinguished(report_on):
    expected = "    expected_failures = {'TestTruncate::test_past_the_end': 'it clamps', %r: 'repaired'}\n"
    source = CLAMPING + expected % "TestTruncate::test_at_zero" + "    load_options = {'edit_level': 'truncate'}\n"
    _, document = report_on({"test_clamps": source}, "-k", "past_the_end or at_zero or of_a_span")
    results = cells(document)
    assert results[PAST_THE_END] == ("expected to fail", "it clamps")
    assert results["TestTruncate::test_at_zero"] == ("FAILS", "[XPASS(strict)] repaired")
    assert results["TestCut::test_of_a_span"] == ("declared absent", "the edit level is TRUNCATE, this needs CUT")


def test_deselected_scenarios_are_counted(report_on):
    _, document = report_on({"test_good": GOOD}, "-k", "test_at_zero")
    collected = sum(len(row["results"]) for section in document["sections"] for row in section["scenarios"])
    assert document["summary"]["holds"] == 1
    assert document["summary"]["not run"] == collected - 1 > 100


def test_a_run_of_one_test_by_its_node_id(report_on):
    _, document = report_on({"test_good": GOOD}, "test_good.py::TestTruncate::test_at_zero")
    verdicts = [cell[0] for cell in cells(document).values()]
    assert (verdicts.count("holds"), verdicts.count("not run")) == (1, len(verdicts) - 1)


def test_a_crash_of_the_backend_is_named(report_on):
    broken = "    load_options = {'edit_level': 'sideways'}\n"
    _, document = report_on({"test_bad": GOOD + broken}, "-k", "test_at_zero")
    message = "InvalidOption: edit_level='sideways' (accepted: replay, truncate, cut)"
    assert cells(document)["TestTruncate::test_at_zero"] == ("FAILS", message)
    assert document["runs"][0]["models"][0]["problem"] == "cannot be loaded: " + message.partition(": ")[2]


OWN = '''
import pytest
from slm_conformance.suite.scenarios.base import Scenarios

class TestOurs(Scenarios):
    """Our own."""

    def test_it(self, bench):
        """Clause 99: something more."""
        {}

    def teardown_method(self):
        {}
'''


@pytest.mark.parametrize(
    ("call", "teardown", "cell"),
    [
        ("pass", "pass", ("holds", "")),
        ("pytest.exit('stop')", "pass", ("not run", "")),
        ("pass", "raise OSError('leak')", ("FAILS", "OSError: leak")),
        ("assert not bench, 'first'", "raise OSError('leak')", ("FAILS", "first")),
        ("pytest.skip('no reference')", "pass", ("not run", "no reference")),
        ("raise RuntimeError", "pass", ("FAILS", "RuntimeError")),
    ],
)
def test_every_phase_of_a_scenario_counts(report_on, call, teardown, cell):
    _, document = report_on({"test_good": GOOD + OWN.format(call, teardown)}, "-k", "TestOurs")
    assert cells(document)["TestOurs::test_it"] == cell


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("out.txt", "unknown report format '.txt' of 'out.txt' (accepted: .html, .json, .svg)"),
        ("out", "unknown report format '' of 'out' (accepted: .html, .json, .svg)"),
        ("nowhere/out.html", "cannot be written: "),
        ("folder.html", "cannot be written: "),
    ],
)
def test_an_unwritable_report_is_refused_before_the_run(report_on, pytester, path, message):
    pytester.mkdir("folder.html")
    result, document = report_on({"test_good": GOOD}, "--slm-report", path)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()
    assert not document
    assert not (pytester.path / "out.txt").exists()


def test_a_run_without_scenarios_is_refused(report_on):
    result, document = report_on({"test_other": "def test_it():\n    pass\n"})
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert not document
    result.stderr.fnmatch_lines(["*--slm-report: no module of this run adopts the suite*"])


def test_a_full_disk_is_reported_and_fails_the_run(report_on, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("slm_conformance.report.write", full)
    result, _ = report_on({"test_good": GOOD}, "-k", "test_at_zero")
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.fnmatch_lines(["slm-conformance: the report *out.html* was not written: no space left"])


def test_checking_a_path_keeps_the_old_file(tmp_path: Path) -> None:
    old = tmp_path / "old.html"
    old.write_text("old")
    assert check_paths([old, tmp_path / "NEW.SVG"]) == (old, tmp_path / "NEW.SVG")
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


def test_run_refuses_a_report_before_it_looks_for_the_backend() -> None:
    with pytest.raises(InvalidOption, match=r"accepted: \.html, \.json, \.svg"):
        slm_conformance.run("no_such_backend", reports=["x.pdf"])


EVIL = "</div><script>alert(1)</script>\" onload='x' &lt; ]]> \x00\x1b[31m\ud800\u202e"


def evil_report() -> Report:
    """A report with only hostile texts."""
    model = ModelUnderTest(EVIL, "", EVIL, EVIL, EVIL, (EVIL,))
    subject = Subject(EVIL, EVIL, (EVIL,), (model,))
    runs = (
        Run(EVIL, subject, {EVIL: {EVIL: Result(Verdict.FAILS, EVIL), "": Result(Verdict.EXPECTED, EVIL)}}),
        Run("two", Subject(EVIL, problem=EVIL)),
    )
    return Report(EVIL, runs, (Section(EVIL, EVIL, EVIL, (Scenario(EVIL, EVIL, EVIL),)),), {EVIL: EVIL})


def test_texts_never_become_markup() -> None:
    text = html_page(evil_report())
    page = Page(text)
    known = "html head meta title style body h1 h2 p b ul li code a span div details summary"
    assert set(page.tags) <= {*known.split()}
    assert {name for name, _ in page.attributes} == {
        "lang",
        "charset",
        "name",
        "content",
        "class",
        "style",
        "id",
        "href",
        "open",
    }
    assert [value for name, value in page.attributes if name == "href" and not value.startswith("#")] == []
    assert all(char.isprintable() or char == "\n" for char in text)
    text.encode()


def test_hostile_texts_survive_as_data() -> None:
    document = json.loads(json_data(evil_report()).encode())
    assert document["sections"][0]["scenarios"][0]["results"][0]["reason"] == EVIL


def test_the_page_loads_nothing_from_other_hosts() -> None:
    text = html_page(evil_report())
    assert not re.search(r"https?:|url\(|@import|src=", text)


@pytest.mark.parametrize(
    ("verdicts", "message", "colour"),
    [
        ({"holds": 371, "declared absent": 2}, "371 hold, 2 declared absent", "#2f7d32"),
        ({"holds": 1, "FAILS": 2}, "2 FAIL, 1 hold", "#b3261e"),
        ({"holds": 1, "expected to fail": 1}, "1 hold, 1 expected to fail", "#8a6100"),
        ({"holds": 1, "not run": 3}, "1 hold, 3 not run", "#8a6100"),
        ({"declared absent": 3}, "3 declared absent", "#8a6100"),
    ],
)
def test_a_badge_is_green_only_if_everything_passes(verdicts: dict[str, int], message: str, colour: str) -> None:
    every = [Result(Verdict(verdict)) for verdict, n in verdicts.items() for _ in range(n)]
    run = Run("m", Subject("b"), {"T::t": {str(i): result for i, result in enumerate(every)}})
    section = Section("T", "", "", (Scenario("T::t", "", ""),))
    svg = ET.fromstring(svg_badge(Report("", (run,), (section,), {})))
    title, background = (svg.find(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "rect"))
    assert title is not None and title.text == f"conformance: {message}"
    assert background is not None and background.get("fill") == colour


def test_every_class_has_a_hint_and_every_hint_a_class() -> None:
    assert sorted(HINTS) == sorted(scenarios.__all__)
    assert [name for name, hint in HINTS.items() if not 20 <= len(hint) <= 300] == []


def test_every_scenario_has_a_row(report_on) -> None:
    _, document = report_on({"test_good": GOOD}, "-k", "test_at_zero")
    expected = [f"{name}::{test}" for name in scenarios.__all__ for test in meta.tests_of(getattr(scenarios, name))]
    assert sorted(cells(document)) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb", "a"),
        ("\n  \n a b \n", "a b"),
        ("\x1b[31mred\x00", r"\x1b[31mred\x00"),
        ("", ""),
        ("x" * 600, "x" * 499 + "…"),
    ],
)
def test_a_reason_is_one_printable_line(text: str, line: str) -> None:
    assert one_line(text) == line
