"""A page of `docs/` whose blocks are pasted one after another, as its reader would."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from gva.cli import main

ROOT = Path(__file__).parents[1]


class Walk:
    """Takes the blocks of a page in their order, in a folder that holds the texts of a checkout and nothing else."""

    def __init__(self, page, folder, monkeypatch, capfd):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        self.blocks = re.findall(r"```(\w+)\n(.*?)```", text, flags=re.S)
        self.folder, self.capfd = folder, capfd
        (folder / "README.md").symlink_to(ROOT / "README.md")
        (folder / "docs").symlink_to(ROOT / "docs")
        monkeypatch.chdir(folder)
        self.environment = {**os.environ, "HF_HOME": str(folder / "home")}

    def next(self, begins):
        """The next block, whose text begins so: none is passed over."""
        _, code = self.blocks.pop(0)
        assert code.startswith(begins), code
        return code

    def take(self, begins, inside="."):
        """Do what the next block says and return what it printed. Commands of `gva` run in this process, to save the
        seconds in which each would load torch again."""
        language = self.blocks[0][0]
        code = self.next(begins)
        if language == "python":
            return self.run([sys.executable, "-c", code], inside)
        lines = code.splitlines()
        if not any(line.startswith("gva ") for line in lines):
            return self.run(["bash", "-ec", code], inside)
        self.capfd.readouterr()
        for line in lines:
            if line.startswith("gva "):
                assert main(shlex.split(line)[1:]) == 0, f"{line}\n{self.capfd.readouterr().err[-3000:]}"
            else:
                self.run(["bash", "-ec", line], inside)
        return self.capfd.readouterr().out

    def run(self, words, inside="."):
        place = {"cwd": self.folder / inside, "env": self.environment}
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, **place)
        assert done.returncode == 0, f"{words[-1]}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout
