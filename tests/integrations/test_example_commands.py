"""Every example and every configuration of accelerate, by the command in its header."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SHIM = Path(__file__).parent / "cpus_as_accelerators"
NEEDS_OTHER_HARDWARE = 77

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.hf, pytest.mark.distributed, pytest.mark.slow]


def _header(file: Path) -> str:
    text = file.read_text()
    if file.suffix == ".py":
        return text.partition('"""')[2].partition('"""')[0]
    lines = text.splitlines()
    return "\n".join(line[2:] for line in lines if line.startswith("#"))


def _commands(file: Path) -> list[str]:
    """Return the indented commands of a header, each in one line."""
    joined = re.sub(r"\\\n\s+", "", _header(file))
    indented = re.findall(r"^ {4}(\S.*)$", joined, re.M)
    starts = r"(?:[A-Z_]+=\S+ )*(?:python|torchrun|accelerate) "
    return [line for line in indented if re.match(starts, line)]


FILES = sorted(
    file
    for file in (*EXAMPLES.rglob("*.py"), *EXAMPLES.rglob("*.yaml"))
    if file.name not in ("__init__.py", "run.py")  # what the others share
)
COMMANDS = sorted({line for file in FILES for line in _commands(file)})
SEVERAL_NODES = [line for line in COMMANDS if "$" in line]
SHOWS_THE_FAILURE = [line for line in COMMANDS if "--plain" in line]
# Products and weights in FP8 exist on GPUs only.
ON_A_GPU = [line for line in COMMANDS if re.search(r"--recipe fp8\w+$", line)]
# Accelerate shards on accelerators only; see the shim.
SHARDED = re.compile(r"^accelerate .*(ddp|fsdp1|fsdp2|tp)\.yaml")


def _name(command: str) -> str:
    return re.sub(r"examples/|accelerate launch|--config_file|python ", "", command)


def test_every_example_and_configuration_has_a_command_that_starts_it() -> None:
    assert len(FILES) >= 15
    for file in FILES:
        name = str(file.relative_to(ROOT))
        assert any(name in line for line in _commands(file)), name


def _case(command: str) -> Any:
    needs_te = re.search(r"te\.py|te_ops|--recipe fp8", command)
    marks = [pytest.mark.te] if needs_te else []
    return pytest.param(command, marks=marks, id=_name(command))


@pytest.mark.parametrize("command", [_case(command) for command in COMMANDS])
def test_the_command_in_the_header_runs(command: str, tmp_path: Path) -> None:
    if command in SEVERAL_NODES:
        pytest.skip("needs several nodes")
    if command in ON_A_GPU and not torch.cuda.is_available():
        pytest.skip("FP8 needs a GPU")
    path = [str(ROOT)]
    if SHARDED.search(command) and not torch.cuda.is_available():
        path.insert(0, str(SHIM))
    done = subprocess.run(
        ["bash", "-c", command.replace("/tmp/seed", str(tmp_path / "seed"))],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "PET_STANDALONE": "1",  # for torchrun: a free port
        },
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    output = done.stdout[-3000:] + done.stderr[-4000:]
    if _status(done) == NEEDS_OTHER_HARDWARE:
        assert _lacks_what_it_names(done.stdout), output
        pytest.skip(done.stdout.splitlines()[-1])
    assert (done.returncode != 0) == (command in SHOWS_THE_FAILURE), output
    if "train.py" in command and "fsdp1" not in command:
        assert "Materialized: ready" in done.stdout


def _status(done: subprocess.CompletedProcess[str]) -> int:
    """Return the status of the script; torchrun only writes it into its report."""
    reported = {int(code) for code in re.findall(r"exitcode\s*: (\d+) ", done.stderr)}
    return reported.pop() if len(reported) == 1 else done.returncode


def _lacks_what_it_names(printed: str) -> bool:
    """Whether what a script says that it needs is missing here indeed."""
    if "CUDA" in printed or "GPU" in printed:
        return not torch.cuda.is_available()
    packages = {"Transformer Engine": "transformer_engine", "lightning": "lightning"}
    needed = [package for name, package in packages.items() if name in printed]
    return any(importlib.util.find_spec(package) is None for package in needed)
