"""The pytest helper on the example of the documentation, and on kernels with line information."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa4tune.emulator.checks import KINDS, WAIVERS

DOCUMENT = Path(__file__).parents[1] / "docs" / "sanitizer.md"


def test_example_of_the_documentation_runs(tmp_path: Path) -> None:
    pytest.importorskip("cutlass.cute")
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code is not None
    script = tmp_path / "example.py"
    script.write_text(code[1])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "error: race" in done.stdout
    line = 1 + code[1][: code[1].index("target[thread] = tile")].count("\n")
    assert f"example.py:{line}" in done.stdout


def test_document_lists_every_kind_and_every_waiver() -> None:
    text = DOCUMENT.read_text()
    for name in (*KINDS, *WAIVERS):
        assert f"`{name}`" in text


def test_a_finding_fails_the_assertion() -> None:
    pytest.importorskip("cutlass.cute")
    import torch
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_compact_tensor

    from fa4tune.testing import assert_clean, compile_host
    from tests.checked_host import host

    vectors = [make_fake_compact_tensor(Float32, (128,)) for _ in range(2)]
    source, target = torch.arange(128.0), torch.zeros(128)
    reports = assert_clean(compile_host(host, *vectors, True, arch="sm_100a"), source, target, seeds=[3])
    assert [r.late for r in reports] == [None, 3]
    with pytest.raises(AssertionError, match=r"race[\s\S]*checked_host\.py:\d+"):
        assert_clean(compile_host(host, *vectors, False, arch="sm_100a"), source, target)
