"""The table of cases says what the tests are, and every test says which report it is about."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
THEMES = {"JSL": 7, "PQT": 3, "TAR": 6, "IMG": 6, "VLM": 3, "TXT": 4, "PCK": 4, "MIX": 4, "RSM": 5, "ELA": 5, "HNG": 4}
THEMES["RES"] = 4


def test_every_case_has_a_row_and_every_test_stands_in_one() -> None:
    tests = [
        node
        for path in sorted(HERE.glob("test_*_cases.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    rows = [
        line.split("|") for line in (HERE / "README.md").read_text().splitlines() if re.match(r"\| [A-Z]{3}-\d", line)
    ]
    assert [row[1].strip() for row in rows] == [
        f"{theme}-{i + 1}" for theme, count in THEMES.items() for i in range(count)
    ]
    assert sum(THEMES.values()) == 55
    assert sorted(re.findall(r"`(test_\w+)`", " ".join(row[-2] for row in rows))) == sorted(test.name for test in tests)
    for test in tests:
        assert "https://github.com/" in (ast.get_docstring(test) or ""), test.name
