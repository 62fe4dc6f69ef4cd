"""Build Transformer Engine in an environment that has torch, for tests on a CPU.

As pip builds it, the PyTorch part takes a quarter of an hour and more. Here all its
sources are one translation unit without optimization: half the time, and the same
Python names. Its kernels are those of the released library.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

NAME = "transformer_engine_torch"
# What the PyTorch part and the Python files import; the headers' versions are added.
NEEDED = (
    *("setuptools", "wheel", "pybind11", "packaging", "numpy", "pydantic"),
    *("importlib-metadata", "einops", "onnx", "onnxscript", "nvdlfw-inspect"),
)
ASK = """
import json, sysconfig, torch
from torch.utils.cpp_extension import include_paths, library_paths
print(json.dumps({
    "cuda": torch.version.cuda or "",
    "site": sysconfig.get_path("purelib"),
    "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "headers": [*include_paths(), sysconfig.get_path("include")],
    "libraries": library_paths(),
}))
"""


class CannotBuildError(RuntimeError):
    """Something that the machine or the package index lacks."""


@dataclass(frozen=True)
class Layout:
    """What the environment's Python says of itself.

    Attributes:
        cuda: `major.minor` that torch was built for, or "".
        site: Where packages lie.
        suffix: How the file of an extension ends.
        headers: Folders with the headers of torch and Python.
        libraries: Folders with the libraries of torch.
    """

    cuda: str
    site: str
    suffix: str
    headers: list[str]
    libraries: list[str]


def layout(python: Path) -> Layout:
    """Ask an environment where its things lie."""
    return Layout(**json.loads(subprocess.check_output([python, "-c", ASK])))


def variables(site: Path) -> dict[str, str]:
    """Return the variables with which Transformer Engine finds CUDA's libraries.

    Args:
        site: The folder of an environment's packages.
    """
    nvidia = site / "nvidia"
    libraries = [str(each) for each in sorted(nvidia.glob("*/lib"))]
    toolkits = [each for each in sorted(nvidia.glob("cu[0-9]*")) if each.is_dir()]
    found = {"LD_LIBRARY_PATH": os.pathsep.join(libraries)} if libraries else {}
    if (nvidia / "cudnn").is_dir():
        found["CUDNN_HOME"] = str(nvidia / "cudnn")
    if toolkits:
        found["CUDA_HOME"] = str(toolkits[-1])
    return found


def install(python: Path, version: str) -> None:
    """Add a release of Transformer Engine to an environment that has torch.

    Raises:
        CannotBuildError: There is no compiler, no CUDA build of torch, or a package
            cannot be had.
    """
    where = layout(python)
    if not where.cuda:
        raise CannotBuildError("torch was installed without CUDA")
    pip = [str(python), "-m", "pip"]
    add = [*pip, "install", "--no-cache-dir", "--quiet"]
    major = where.cuda.partition(".")[0]
    headers = [
        f"nvidia-cuda-{name}=={where.cuda}.*" for name in ("crt", "cccl", "nvrtc")
    ]
    _run([*add, *NEEDED, *headers])
    released = [f"transformer-engine{end}=={version}" for end in ("", f"-cu{major}")]
    _run([*add, "--no-deps", *released])
    with tempfile.TemporaryDirectory() as folder:
        get = [*pip, "download", "--quiet", "--no-deps", "--no-build-isolation"]
        one = ["--no-binary", ":all:", "--dest", folder, f"{NAME}=={version}"]
        toolkit = _toolkit_that_tells_its_version(Path(folder, "toolkit"), where.cuda)
        _run([*get, *one], {"CUDA_HOME": str(toolkit)})
        (packed,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
        compile_in_one(Path(folder, packed.name.removesuffix(".tar.gz")), where)


def _toolkit_that_tells_its_version(folder: Path, cuda: str) -> Path:
    """Make what pip needs to read the sources' metadata: they ask nvcc who it is.

    Nothing is compiled by it, since the PyTorch part has no kernels.
    """
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho release {cuda}\n")
    nvcc.chmod(0o755)
    return folder


def compile_in_one(sources: Path, where: Layout) -> None:
    """Compile the unpacked PyTorch part and put it where packages lie."""
    files = sorted(each.relative_to(sources) for each in sources.glob("csrc/**/*.cpp"))
    unit = sources / "all_in_one.cpp"
    unit.write_text("".join(f'#include "{each}"\n' for each in files))
    common = ("", "common_headers", "common_headers/common")
    own = [sources / each for each in (*common, "common_headers/common/include")]
    nvidia = sorted(Path(where.site, "nvidia").glob("*/include"))
    folders = [*own, sources / "csrc", *where.headers, *nvidia]
    folders += [each / "cccl" for each in nvidia if (each / "cccl").is_dir()]
    flags = ["-O0", "-g0", "-w", "-fPIC", "-std=c++17", "-fvisibility=hidden"]
    defined = ["NDEBUG", "TORCH_API_INCLUDE_EXTENSION_H"]
    defined.append(f"TORCH_EXTENSION_NAME={NAME}")
    compiler = os.environ.get("CXX", "g++")
    _run(
        [compiler, *flags, *(f"-D{each}" for each in defined)]
        + [f"-I{each}" for each in folders]
        + ["-c", str(unit), "-o", str(unit.with_suffix(".o"))]
    )
    linked = [f"-l{each}" for each in ("c10", "torch", "torch_cpu", "torch_python")]
    extension = Path(where.site, NAME + where.suffix)
    _run(
        [compiler, "-shared", str(unit.with_suffix(".o"))]
        + [f"-L{each}" for each in where.libraries]
        + [*linked, "-o", str(extension)]
    )


def _run(command: list[str], extra: dict[str, str] | None = None) -> None:
    build = {
        # No constraints: neither the lock of CI nor what a machine prefers.
        "PIP_CONSTRAINT": os.devnull,
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        "NVTE_WITH_NCCL_EP": "0",
    }
    environment = {**os.environ, **build, **(extra or {})}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CannotBuildError(f"there is no {command[0]}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if "error" in line.lower()]
        said = errors[-1] if errors else " ".join(lines[-2:])
        raise CannotBuildError(f"{' '.join(command[:4])} ...: {said}")
