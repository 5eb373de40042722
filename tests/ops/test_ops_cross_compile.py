"""Every kernel family compiles for GPUs that are not here; its resources are recorded and bounded."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from ops_cases import needs_triton

pytestmark = needs_triton
SHARED_LIMIT = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "hip:gfx942": 64 * 1024}


@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_compiles(target, record_property):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(pathlib.Path(__file__).with_name("ops_cross_compile.py")), target],
                         capture_output=True, text=True, env=environment, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) >= 8
    for row in found:
        record_property(f"{target} {row['family']}", json.dumps(row))
        print(row)
        assert row["shared"] <= SHARED_LIMIT[target], row
        assert row.get("stack", 0) <= 512, row
