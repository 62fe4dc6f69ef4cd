"""Files of torch that would run code, or are damaged: refused, and no code runs."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import deferred_init as di
from deferred_init.sources import open_source


class Evil:
    """Runs code when it is unpickled."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Evil, "ran", True)


def test_code_in_a_torch_file_never_runs(tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"a": torch.ones(1), "b": Evil()}, path)
    with pytest.raises(di.PlanError, match="holds objects other than tensors and"):
        open_source(path)
    assert not Evil.ran


@pytest.mark.parametrize("keep", [0, 10, 500, -200])
def test_a_torch_file_that_is_cut_off_is_named(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(di.PlanError, match=r"is not a usable file of `torch\.save`"):
        open_source(path)


def test_a_torch_file_without_tensors_is_named(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "a.pt")
    with pytest.raises(di.PlanError, match="holds no tensors"):
        open_source(tmp_path / "a.pt")
    torch.save([torch.ones(1)], tmp_path / "b.pt")
    with pytest.raises(di.PlanError, match="holds a list, expected a mapping"):
        open_source(tmp_path / "b.pt")


def save_dcp(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(3), "b": torch.zeros(2)}, checkpoint_id=folder)
    return folder


def test_code_in_the_metadata_of_a_dcp_folder_never_runs(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(di.PlanError, match=r"it names builtins\.setattr"):
        open_source(folder)
    assert not Evil.ran
    for content, text in (
        (b"nonsense", "is not usable metadata of a DCP folder"),
        (pickle.dumps({}), "holds a dict, expected DCP metadata"),
    ):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(di.PlanError, match=text):
            open_source(folder)


@pytest.mark.parametrize("home", ["pathlib", "pathlib._local"])
def test_a_dcp_folder_that_any_release_of_python_wrote_is_read(
    home: str, tmp_path: Path
) -> None:
    """Python 3.13 pickles paths as `pathlib._local.PosixPath`, the others do not."""
    folder = save_dcp(tmp_path / "dcp")
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta.checkpoint_id = folder
    # Protocol 2 spells names out, with no lengths that would have to agree.
    written = pickle.dumps(metadata, protocol=2)
    ours = f"c{type(folder).__module__}\nPosixPath\n".encode()
    assert ours in written
    path.write_bytes(written.replace(ours, f"c{home}\nPosixPath\n".encode()))
    assert sorted(open_source(folder).tensors) == ["a", "b"]


def test_a_dcp_folder_with_missing_or_cut_files_is_refused(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "dcp")
    (data,) = folder.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-10])
    with pytest.raises(di.PlanError, match="is cut off: it has"):
        open_source(folder)
    data.unlink()
    with pytest.raises(
        di.PlanError, match=r"1 of 1 files are not there: `__0_0\.distcp`"
    ):
        open_source(folder)


def test_a_chunk_of_a_dcp_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """What DCP raises then is no Exception, and would pass every handler of them."""
    folder = save_dcp(tmp_path / "dcp")
    [file] = folder.glob("*.distcp")
    file.write_bytes(b"\0" * file.stat().st_size)
    model = torch.nn.ParameterDict({"a": torch.empty(3, device="meta")})
    with pytest.raises(di.MaterializeError, match=r"`a`"):
        di.materialize(model, "cpu", weights=folder)
    assert model["a"].is_meta
