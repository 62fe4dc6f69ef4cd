"""The private names of other packages: all there, all listed, none listed in vain."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import deferred_init
from deferred_init.private_names import PRIVATE_NAMES, PrivateName, missing_names

TEXT = "\n".join(
    path.read_text()
    for path in Path(deferred_init.__file__).parent.rglob("*.py")
    if path.parent.name != "private_names"
)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("name", PRIVATE_NAMES, ids=lambda name: name.path)
def test_a_private_name_that_is_relied_on_exists(name: PrivateName) -> None:
    package = name.module.partition(".")[0]
    if not _installed(package):
        pytest.skip(f"{package} is not installed")
    if name.only_in and not name.exists():
        pytest.skip(f"only in {name.only_in}")
    assert name.exists(), (
        f"this release has no `{name.path}`, which is used to {name.purpose}. "
        f"Without it: {name.fallback}"
    )


def test_nothing_is_missing_in_what_is_imported() -> None:
    assert missing_names() == ()


def test_a_name_that_disappears_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils._device, "_device_constructors")
    assert [name.path for name in missing_names()] == [
        "torch.utils._device._device_constructors"
    ]


def test_a_module_that_disappears_is_reported() -> None:
    gone = PrivateName(module="torch.no_such", name="x", purpose="p", fallback="f")
    assert not gone.exists()


@pytest.mark.parametrize("name", PRIVATE_NAMES, ids=lambda name: name.path)
def test_every_listed_name_is_used_and_explained(name: PrivateName) -> None:
    last = name.name.split(".")[-1]
    used = re.search(rf"\b{last}\b", TEXT)
    assert used, f"`{name.path}` is used nowhere: take it off the list"
    assert name.purpose
    assert name.fallback


def test_an_attribute_that_only_instances_have_is_found_in_the_source() -> None:
    def name(last: str) -> PrivateName:
        path = f"nn.RNNBase.{last}"
        return PrivateName(module="torch", name=path, purpose="p", fallback="f")

    assert not hasattr(torch.nn.RNNBase, "_flat_weights")
    assert name("_flat_weights").exists()
    assert name("_modules").exists()  # stored by a base, in another file
    assert not name("_flat_weight").exists()
    assert not name("_flat_weights._flat_weights").exists()
