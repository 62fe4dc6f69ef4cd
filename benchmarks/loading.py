"""Load one Llama checkpoint with several loaders, side by side.

    python benchmarks/loading.py                          # small, on the CPU
    python benchmarks/loading.py --device cuda --gigabytes 9.1
    python benchmarks/loading.py --device cuda --gigabytes 9.1 --json loading.json

Writes a checkpoint in the form of Hugging Face, reads it once so that it is in the page
cache, and runs each loader in a process of its own: `--repeat` times, of which the
first counts as cold start and the best of the rest as the result. Seconds include
everything from a config to a model that is ready, values on the device. On the CPU
loaders may leave values in the file, so there is a second figure with every page
touched. Memory is the growth over what was in use before the first load.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LOADERS: dict[str, Callable[[Path, torch.device], Any]] = {}
_SHARD_BYTES = 4 * 10**9
_PAGE = 4096


def loader(name: str) -> Callable[[Any], Any]:
    def register(fn: Any) -> Any:
        LOADERS[name] = fn
        return fn

    return register


def empty_model(folder: Path) -> nn.Module:
    """Build the model of a folder's config on meta, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
    return model


@loader("deferred_init")
def load_ours(folder: Path, device: torch.device) -> nn.Module:
    import deferred_init as di

    model = empty_model(folder)
    report = di.materialize(model, device, weights=folder, missing="error")
    print(
        "   ",
        {name: round(value, 3) for name, value in report.seconds.items()},
        [(step.initializer, round(step.seconds, 3)) for step in report.steps[:6]],
        file=sys.stderr,
    )
    return model


@loader("deferred_init (copy)")
def load_ours_by_copy(folder: Path, device: torch.device) -> nn.Module:
    import deferred_init as di
    from deferred_init.sources import open_source

    model = empty_model(folder)
    weights = open_source(folder, mmap=False)
    di.materialize(model, device, weights=weights, missing="error")
    return model


@loader("transformers")
def load_transformers(folder: Path, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": str(device)}
    )
    return model


@loader("safetensors")
def load_safetensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state.update(load_file(path, device=str(device)))
    return state


@loader("accelerate")
def load_accelerate(folder: Path, device: torch.device) -> nn.Module:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    loaded: nn.Module = load_checkpoint_and_dispatch(
        model, folder, device_map={"": str(device)}, dtype=torch.bfloat16
    )
    return loaded


def write_checkpoint(folder: Path, gigabytes: float) -> int:
    """Write a Llama-3-like checkpoint of about this size; return its bytes."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    # Eight billion parameters are 16 GB; a third of the width below 1 GB.
    wide = gigabytes > 4
    width = 4096 if wide else 1024
    vocabulary = 128256 if wide else 32000
    head = 2 * 2 * width * vocabulary
    layer = 2 * (2.5 * width**2 + 3 * 3.5 * width**2)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=max(1, round((gigabytes * 1e9 - head) / layer)),
        num_attention_heads=width // 128,
        num_key_value_heads=width // 512,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in LlamaForCausalLM(config).state_dict().items()}
    block = torch.randn(1 << 22).mul_(0.02).bfloat16()
    shards: list[list[str]] = [[]]
    size = total = 0
    for key, shape in shapes.items():
        if size > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += 2 * shape.numel()
        total += 2 * shape.numel()
    where = {}
    for number, keys in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {key: _values(shapes[key], block) for key in keys},
            folder / name,
            metadata={"format": "pt"},
        )
        where.update(dict.fromkeys(keys, name))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _values(shape: torch.Size, block: Tensor) -> Tensor:
    count = shape.numel()
    start = int(torch.randint(0, 1 << 20, ()))
    repeats = (count + start) // block.numel() + 1
    return block.repeat(repeats)[start : start + count].view(shape)


def measure(
    name: str, folder: Path, device: torch.device, repeat: int
) -> dict[str, Any]:
    """Run one loader in this process."""
    warnings.simplefilter("ignore")
    _import_everything()
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # makes the context, which is nobody's doing
        torch.empty(1, device=device)
    seconds, touched = [], []
    gpu_bytes = host_bytes = 0
    for _ in range(repeat):
        with _host_peak() as peak:
            before = _gpu_in_use(device)
            start = time.perf_counter()
            loaded = LOADERS[name](folder, device)
            _finish(device)
            seconds.append(time.perf_counter() - start)
            gpu_bytes = max(gpu_bytes, _gpu_peak(device) - before)
        host_bytes = max(host_bytes, peak[0])
        if device.type == "cpu":
            _touch(loaded)
            touched.append(time.perf_counter() - start)
        _check(loaded, folder)
        del loaded
    best = min(seconds[1:] or seconds)
    return {
        "loader": name,
        "bytes": total,
        "cold_s": seconds[0],
        "best_s": best,
        "gigabytes_per_s": total / best / 1e9,
        "touched_s": min(touched[1:] or touched) if touched else None,
        "gpu_bytes_over_model": gpu_bytes - total if device.type == "cuda" else None,
        "host_bytes": host_bytes,
    }


def _set_options(readers: int | None, buffer_mib: int) -> None:
    from deferred_init.handlers import checkpoint
    from deferred_init.loading.engine_options import EngineOptions

    options = EngineOptions(num_readers=readers, buffer_bytes=buffer_mib << 20)
    checkpoint.EngineOptions = lambda: options  # type: ignore[assignment, misc]


def _import_everything() -> None:
    """Import beforehand what loaders import, so that none pays for it."""
    import accelerate  # noqa: F401
    import transformers
    from safetensors.torch import load_file  # noqa: F401

    import deferred_init  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpu_in_use(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _gpu_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _tensors(loaded: Any) -> dict[str, Tensor]:
    return dict(loaded if isinstance(loaded, dict) else loaded.state_dict())


def _touch(loaded: Any) -> None:
    """Read one byte of every page."""
    for tensor in _tensors(loaded).values():
        tensor.detach().reshape(-1).view(torch.uint8)[::_PAGE].sum()


def _check(loaded: Any, folder: Path) -> None:
    """Compare some tensors with the file, bit by bit."""
    from safetensors import safe_open

    state = _tensors(loaded)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys = list(file.keys())
            for key in keys[:: max(1, len(keys) // 8)]:
                expected = file.get_tensor(key)
                assert torch.equal(state[key].cpu(), expected), key


@contextmanager
def _host_peak() -> Iterator[list[int]]:
    """Sample this process's memory that is no file; yield a list with the growth."""
    start = _anonymous_bytes()
    grown = [0]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            grown[0] = max(grown[0], _anonymous_bytes() - start)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield grown
    finally:
        done.set()
        thread.join()
        grown[0] = max(grown[0], _anonymous_bytes() - start)


def _anonymous_bytes() -> int:
    total = 0
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(("RssAnon", "RssShmem")):
                total += 1024 * int(line.split()[1])
    return total


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Write the checkpoint, warm the page cache, run every loader."""
    total = write_checkpoint(folder, arguments.gigabytes)
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    print(f"{total / 1e9:.2f} GB in {folder}, device {arguments.device}")
    results = []
    for name in arguments.loaders or LOADERS:
        if arguments.device != "cpu" and name == "deferred_init (copy)":
            continue
        command = [sys.executable, __file__, "--one", name, "--folder", str(folder)]
        command += ["--device", arguments.device, "--repeat", str(arguments.repeat)]
        if arguments.readers:
            command += ["--readers", str(arguments.readers)]
        command += ["--buffer-mib", str(arguments.buffer_mib)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{name} failed with exit status {done.returncode}")
            continue
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(_row(results[-1]), flush=True)
    return results


def _row(result: dict[str, Any]) -> str:
    touched, extra = result["touched_s"], result["gpu_bytes_over_model"]
    text = (
        f"{result['loader']:<21} {result['best_s']:8.3f} s "
        f"{result['gigabytes_per_s']:8.2f} GB/s  cold {result['cold_s']:7.3f} s  "
        f"host +{result['host_bytes'] / 1e6:.0f} MB"
    )
    if touched is not None:
        text += f"  touched {touched:.3f} s"
    if extra is not None:
        text += f"  GPU +{extra / 1e6:.0f} MB over the model"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--loaders", nargs="*", choices=list(LOADERS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--readers", type=int, help="threads of deferred_init")
    parser.add_argument("--buffer-mib", type=int, default=16, help="of deferred_init")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--one", choices=list(LOADERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        _set_options(arguments.readers, arguments.buffer_mib)
        device = torch.device(arguments.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", 0)
        print(
            json.dumps(
                measure(arguments.one, arguments.folder, device, arguments.repeat)
            )
        )
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        results = run(arguments, folder)
    finally:
        shutil.rmtree(folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
