"""Where results go."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from bench.load import options as load_options
from bench.parser import parser
from bench.results import Results

STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d{6}\.json")


@pytest.mark.parametrize("made", [parser(), load_options._parser()], ids=lambda p: p.prog)
def test_output_is_a_file_or_a_folder_for_one(
    made: argparse.ArgumentParser, tmp_path: Path
) -> None:
    def output(*given: str) -> Path:
        path = made.parse_args(["--output", *given]).output
        assert isinstance(path, Path)
        return path

    assert output(str(tmp_path / "r.json")) == tmp_path / "r.json"
    for folder in (str(tmp_path), f"{tmp_path}/", f"{tmp_path}/new/"):
        path = output(folder)
        assert path.parent == Path(folder)
        assert STAMPED.fullmatch(path.name)
    results = Results(output(f"{tmp_path}/new/"), {})
    results.add("part", 1)
    assert [file.name for file in (tmp_path / "new").iterdir()] == [results.path.name]
