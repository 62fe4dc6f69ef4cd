"""Load one Llama checkpoint with several loaders, side by side.

    python benchmarks/loading.py                          # small, on the CPU
    python benchmarks/loading.py --device cuda --gigabytes 9.1 --json loading.json
    python benchmarks/loading.py --device cuda --gigabytes 9.1 --together \
        --limits --variants readers=8 kib=4096 readers=12,buffers=3

Writes a checkpoint in the form of Hugging Face, which leaves it in the page cache, and
runs each loader in a process of its own, or all in this one with `--together`:
`--repeat` times, of which the first counts as cold start and the best of the rest as
the result. Seconds include everything from a config to a model that is ready, values on
the device. On the CPU loaders may leave values in the file, so there is a second figure
with every page touched. `--variants` runs deferred_init with other options as well,
and `--limits` measures what the machine allows.

Host memory is the growth of the process's anonymous and shared memory
(`RssAnon` + `RssShmem` of `/proc/self/status`) during the first run, after everything
has been imported. Pages of the checkpoint that a loader maps are the page cache's and
not counted: they are there without it, and the kernel drops them at need.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loading_checkpoint import write_checkpoint
from loading_limits import limits
from loading_meters import make_context, measure, row, timelines
from loading_ways import LOADERS, import_everything, variant

OURS = "deferred_init"


def main(arguments: argparse.Namespace) -> None:
    start = time.perf_counter()
    if arguments.one:
        import_everything(arguments.folder)
        make_context(_device(arguments))
        print(json.dumps(measured(arguments.one, arguments.folder, arguments)))
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        total = write_checkpoint(folder, arguments.gigabytes)
        text = f"{total / 1e9:.2f} GB in {folder}, device {arguments.device}"
        print(text, f"({time.perf_counter() - start:.1f} s)", flush=True)
        results = []
        for result in (together if arguments.together else apart)(folder, arguments):
            results.append(result)
            print(row(result), flush=True)
            for line in result.get("timelines", [])[-2:]:
                print("   ", line)
    finally:
        shutil.rmtree(folder)
    for line in compared(results):
        print(line)
    print(f"{time.perf_counter() - start:.1f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def apart(folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run every loader in a process of its own."""
    for name in chosen(arguments):
        command = [sys.executable, __file__, "--one", name, "--folder", str(folder)]
        command += ["--device", arguments.device, "--repeat", str(arguments.repeat)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{name} failed with exit status {done.returncode}")
            continue
        yield json.loads(done.stdout.splitlines()[-1])


def together(folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run every loader in this process, which takes fewer starts."""
    import_everything(folder)
    device = _device(arguments)
    make_context(device)
    for name in chosen(arguments):
        yield measured(name, folder, arguments)
        gc.collect()
    if arguments.limits:
        for line in limits(max(folder.glob("*.safetensors"), key=_size), device):
            print("limit:", line, flush=True)


def chosen(arguments: argparse.Namespace) -> Sequence[str]:
    """Return the loaders and variants to run, ours first: its memory is watched."""
    names = list(arguments.loaders or LOADERS)
    if arguments.device != "cpu":
        names = [name for name in names if name != "deferred_init (copy)"]
    return names + [f"{OURS} {options}" for options in arguments.variants]


def measured(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a loader, or ours with the options after its name."""
    key = name if name in LOADERS else OURS
    device = _device(arguments)
    load = partial(LOADERS[key], folder, device)
    options = "" if key == name else name.removeprefix(OURS).strip()
    with variant(options), timelines() as said:
        result = measure(load, folder, device, arguments.repeat)
    return {"name": name, **result, "timelines": said}


def compared(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say how many times as fast ours is as each of the others."""
    by_name = {result["name"]: result for result in results}
    if (ours := by_name.get(OURS)) is None:
        return
    for name, result in by_name.items():
        if not name.startswith(OURS):
            yield f"{result['best_s'] / ours['best_s']:.2f} x as fast as {name}"


def _size(path: Path) -> int:
    return path.stat().st_size


def _device(arguments: argparse.Namespace) -> torch.device:
    device = torch.device(arguments.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    return device


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--loaders", nargs="*", choices=list(LOADERS))
    parser.add_argument("--variants", nargs="*", default=[], metavar="OPTION=N,...")
    parser.add_argument("--together", action="store_true", help="in one process")
    parser.add_argument("--limits", action="store_true", help="with --together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
