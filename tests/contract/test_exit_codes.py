"""Exit codes: the tables of the pages, the classes of errors and what the command line prints say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vorox.cli.launch.restarts import FINAL_EXIT_CODES, JOB_FINAL_EXIT_CODES
from vorox.core import errors
from vorox.core.errors import INTERRUPTED_EXIT_CODE, KILLED_EXIT_CODE, DataError, Preempted, VoroxError, exit_code_of

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    table = next(block for block in section.split("\n\n") if block.lstrip().startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().split("\n")[2:]]


def kinds(of: type[VoroxError] = VoroxError) -> Iterator[type[VoroxError]]:
    """The errors that ``core/errors.py`` gives a kind of their own."""
    if "kind" in vars(of):
        yield of
    for one in of.__subclasses__():
        yield from kinds(one)


def test_the_page_has_every_code_with_its_kind() -> None:
    meanings = {int(code): meaning for code, meaning in rows("reliability.md", "Exit codes")}
    codes = {error.exit_code for error in kinds()}
    assert set(meanings) == {0, *codes, INTERRUPTED_EXIT_CODE, KILLED_EXIT_CODE}
    for error in kinds():
        assert re.search(rf"(^|; ){error.kind}\b", meanings[error.exit_code]), error


def test_the_page_about_jobs_has_the_codes_that_end_them() -> None:
    listed = [cells[0] for cells in rows("clusters.md", "Restarts")]
    assert listed == ["0", str(Preempted.exit_code), ", ".join(map(str, JOB_FINAL_EXIT_CODES)), "any other"]
    assert list(JOB_FINAL_EXIT_CODES) == sorted({*FINAL_EXIT_CODES, DataError.exit_code}), "the reason is stated"


def test_an_error_with_a_code_of_its_own_has_a_kind() -> None:
    declared = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, VoroxError)]
    assert all("kind" in vars(one) for one in declared if "exit_code" in vars(one))


@pytest.mark.parametrize(
    ("error", "code"),
    [(DataError("gone"), 4), (KeyboardInterrupt(), INTERRUPTED_EXIT_CODE), (ZeroDivisionError(), VoroxError.exit_code)],
)
def test_every_exception_has_a_code(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code
