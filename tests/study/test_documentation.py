"""Commands and files shown in docs/comparing.md are ones that `gva` takes."""

import re
import shlex
from pathlib import Path

import pytest

from gva.cli import COMMANDS
from gva.cli.parser import Parser
from gva.study.matrix import read_matrix
from gva.study.reports import read_reports

PAGE = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


@pytest.mark.parametrize("command", [line for block in blocks("bash") for line in block.splitlines()])
def test_commands_are_understood(command):
    parser = Parser(prog="gva")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in COMMANDS:
        module.add(commands)
    words = shlex.split(command)
    assert words[0] == "gva"
    assert parser.parse_args(words[1:]).command == words[1]


def test_the_matrix_file_is_one(tmp_path):
    text, *_ = blocks("toml")
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    matrix = read_matrix(path)
    assert [row.name for row in matrix.rows] == ["gqa", "gqa-half", "gva-far"]


def test_the_list_of_reports_is_one(tmp_path):
    *_, text = blocks("toml")
    for folder in ("3-rates", "1-seeds/runs/gqa/seed-1"):
        (tmp_path / folder).mkdir(parents=True)
    path = tmp_path / "reports.toml"
    path.write_text(text)
    assert [folder.name for folder in read_reports(path)["rates"].folders] == ["3-rates", "seed-1"]
