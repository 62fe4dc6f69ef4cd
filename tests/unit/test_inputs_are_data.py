"""Recipes, indexes, headers and configurations are data: they run nothing.

Python's own audit events tell: a process reads hostile inputs, and each import, call of
`exec`, started program, connection or unpickled name in the meantime is listed.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from torch import nn

import deferred_init as di
from deferred_init.target import TargetError, load_target

ROOT = Path(__file__).resolve().parents[2]

_WATCHED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
import deferred_init as di
from deferred_init.sources import open_source
from deferred_init.target import load_target

events, watching = [], False
ALARMING = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen",
            "pickle.find_class", "socket.connect", "urllib.Request", "ctypes.dlopen")

def watch(event, arguments):
    if not watching:
        return
    name = str(arguments[0]) if arguments else ""
    if event in ALARMING or (event == "import" and name.startswith("trap")):
        events.append(f"{event} {name}")
    elif event == "open" and name.endswith("outside.safetensors"):
        events.append(f"open {name}")

sys.addaudithook(watch)
for read in (di.Recipe.load, open_source, load_target):
    for path in sys.argv[2:]:
        watching = True
        try:
            read(path)
        except (di.DeferredInitError, ValueError, TypeError):
            pass
        watching = False
print(sorted(set(events)))
if "--fire" in sys.argv:
    watching = True
    import trap_module
    open("../outside.safetensors").close()
    print(sorted(set(events)))
"""


def _hostile(folder: Path) -> list[Path]:
    """Write inputs that name code, a program, and a file beside their folder."""
    (folder.parent / "outside.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "trap_module.py").write_text("def build():\n    return 3\n")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        'name = "x"\n[te_recipe]\nname = "trap_module.build"\n'
        '[[init]]\nmatch = "*"\ndistribution = "trap_module:build()"\n'
        "scale_by = \"__import__('os').system('true')\"\n"
    )
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    config = folder / "config.json"
    maps = {"AutoConfig": "trap_module.build", "AutoModel": "trap_module.build"}
    config.write_text(
        json.dumps({"model_type": "no_such", "auto_map": maps, "architectures": ["x"]})
    )
    return [recipe, index, config]


def _events(top: Path, *extra: str) -> list[str]:
    folder = top / "given"
    folder.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _WATCHED,
            str(ROOT),
            *map(str, _hostile(folder)),
            *extra,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_hostile_inputs_import_start_and_open_nothing_that_they_name(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers", reason="reads a model's configuration")
    fired = "['import trap_module', 'open ../outside.safetensors']"
    assert _events(tmp_path, "--fire") == ["[]", fired]


def test_a_header_that_claims_ten_gigabytes_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 10 * 2**30) + b"{}")
    tracemalloc.start()
    with pytest.raises(di.PlanError, match="the header should have 10737418240 bytes"):
        di.materialize(nn.Linear(1, 1, device="meta"), "cpu", weights=path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_huge_recipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)  # sparse: takes no room on the disk
    tracemalloc.start()
    with pytest.raises(di.PlanError) as caught:
        di.Recipe.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value) == (
        f"the recipe file {path} has more than 1,000,000 bytes, which no recipe needs"
    )
    assert peak < 5_000_000


def test_a_recipe_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"name = \xff")
    with pytest.raises(di.PlanError, match=r"binary\.toml is not text: 'utf-8' codec"):
        di.Recipe.load(path)


def _config(folder: Path, content: str) -> Path:
    path = folder / "config.json"
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[" * 100_000, "is no model configuration"),
        ("[]", "is no model configuration"),
        ('{"model_type": "no_such"}', "is no model configuration"),
        ("{}" + " " * 10_000_000, "has more than 10,000,000 bytes"),
    ],
    ids=["deep", "list", "unknown", "huge"],
)
def test_a_hostile_configuration_is_refused_by_name(
    content: str, expected: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="reads a model's configuration")
    path = _config(tmp_path, content)
    with pytest.raises(TargetError) as caught:
        load_target(str(path))
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["pipeline", "GPT2Config", "__name__"])
def test_a_configuration_chooses_a_model_and_calls_nothing_else(
    name: str, tmp_path: Path
) -> None:
    """A name of anything else in transformers used to be called."""
    transformers = pytest.importorskip("transformers", reason="makes a model")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 9, "n_positions": 4}
    content = {"model_type": "gpt2", "architectures": [name], **sizes}
    build = load_target(str(_config(tmp_path, json.dumps(content))))
    assert type(build()) is transformers.GPT2Model
