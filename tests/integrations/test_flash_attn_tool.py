"""The sample of FlashAttention's tests that tools/flash_attn_tests.py draws, and what it tells of a case, by a file of made-up tests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.integrations import flash_attn
from tools import flash_attn_tests
from tools.flash_attn_tests import drawn_cases, functions, load, run
from tools.upstream_tests import Case, parameters, parts

FILE = """
import pytest
from flash_attn import flash_attn_func

@pytest.mark.parametrize("dtype", ["half", "bfloat"])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 2), (3, 4), (5, 6)])
def test_all(dtype, seqlen_q, seqlen_k):
    if seqlen_q == 3:
        pytest.skip("no room")
    if seqlen_q == 5:
        pytest.skip()
    assert dtype == "half", dtype

def helper():
    pass
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(flash_attn_tests, "_tests", None)
    path = tmp_path / "test_them.py"
    path.write_text(FILE)
    yield path
    flash_attn.uninstall()


def test_cases_are_those_of_the_file(file: Path) -> None:
    tests = load(file)
    assert tests.flash_attn_func is flash_attn.flash_attn_func
    assert functions(tests) == {"test_all": [(("seqlen_q", "seqlen_k"), [(1, 2), (3, 4), (5, 6)]), (("dtype",), ["half", "bfloat"])]}
    assert parameters(tests, Case("test_all", (1, 0))) == {"seqlen_q": 3, "seqlen_k": 4, "dtype": "half"}
    found = {(i, j): run(file, Case("test_all", (i, j)))[2:4] for i in range(3) for j in range(2)}
    assert found == {
        (0, 0): ("passed", ""),
        (0, 1): ("failed", 'AssertionError: bfloat at assert dtype == "half", dtype'),
        (1, 0): ("skipped", "no room"),
        (1, 1): ("skipped", "no room"),
        (2, 0): ("skipped", "the file skips this combination of parameters"),
        (2, 1): ("skipped", "the file skips this combination of parameters"),
    }


@pytest.mark.slow
def test_a_run_counts_what_becomes_of_cases(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash_attn_tests.main([str(file), "--cases", "9", "--seed", "3", "--processes", "1", "--parts", "0,1/2"]) == 1
    found = capsys.readouterr().out.splitlines()
    assert found[0] == "seed 3: 6 cases of 6 drawn, of 1 test functions"
    case = "{'seqlen_q': 1, 'seqlen_k': 2, 'dtype': 'bfloat'}"
    assert f'failed test_all {case} after 0 s: AssertionError: bfloat at assert dtype == "half", dtype' in found
    counts = [line.partition(", in ")[0] for line in found if line.startswith("passed")]
    assert counts == ["passed 1, failed 1, skipped 4, not begun 0"]
    assert {"  skipped 2: no room", "  skipped 2: the file skips this combination of parameters"} <= {*found}


def test_parts_are_every_so_many() -> None:
    assert parts("1,2,3/4") == ([1, 2, 3], 4)


def test_functions_have_equal_shares() -> None:
    sizes = {"large": [100, 100], "medium": [9, 9, 9], "small": [3, 2]}
    cases = drawn_cases(sizes, 100, 5)
    assert Counter(case.function for case in cases) == {"large": 47, "medium": 47, "small": 6}
    assert len({*cases}) == 100
    assert cases == drawn_cases(sizes, 100, 5) != drawn_cases(sizes, 100, 6)
    assert drawn_cases(sizes, 20, 5) == cases[:20]
    assert len(drawn_cases({"small": [3, 2]}, random.Random(1).randrange(7, 99), 5)) == 6
