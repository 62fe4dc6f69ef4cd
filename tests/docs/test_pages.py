"""The documentation: its code runs, its links lead somewhere, nothing is stale."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from findings_page import PAGE, page_text

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
_BLOCK = re.compile(r"(?:<!-- needs: ([\w ]+) -->\n)?```python\n(.*?)```", re.DOTALL)


class _Block(NamedTuple):
    number: int
    needs: tuple[str, ...]
    code: str


def _blocks(page: Path) -> list[_Block]:
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        _Block(number, tuple(needs.split()), code)
        for number, (needs, code) in enumerate(found, start=1)
    ]


def _lacking(need: str) -> str | None:
    """Say what a block needs that is not here; None if it is."""
    if need == "gpu":
        return None if torch.cuda.is_available() else "a GPU"
    if need == "te":
        try:
            import transformer_engine.pytorch  # noqa: F401
        except (ImportError, OSError):
            return "Transformer Engine"
        return None
    if need == "ranks":
        return "several ranks; see examples/fsdp2_torchrun.py"
    raise AssertionError(f"no block can need {need!r}")


def _unmarked(page: Path) -> list[_Block]:
    return [block for block in _blocks(page) if not block.needs]


@pytest.fixture
def quiet_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty current folder, and generators and rules as they were afterwards."""
    from deferred_init.handlers import registry

    rules = dict(registry._user_rules)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield
    registry._user_rules.clear()
    registry._user_rules.update(rules)
    registry._asked.clear()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if _unmarked(page)], ids=lambda page: page.stem
)
def test_the_python_blocks_of_a_page_run_in_order(
    page: Path, quiet_folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": f"docs_{page.stem}"}
    if page.stem in ("accelerate", "coming_from"):
        pytest.importorskip("transformers", reason="needs transformers and accelerate")
        pytest.importorskip("accelerate", reason="needs transformers and accelerate")
    for block in _unmarked(page):
        exec(compile(block.code, f"{page.name}[{block.number}]", "exec"), names)


# Transformer Engine warns of its own doings, of models built on a GPU as well.
@pytest.mark.filterwarnings("ignore::Warning:transformer_engine")
@pytest.mark.parametrize(
    ("page", "block"),
    [(page, block) for page in PAGES for block in _blocks(page) if block.needs],
    ids=lambda value: value.stem if isinstance(value, Path) else str(value.number),
)
def test_a_block_with_needs_runs_where_they_are_met(
    page: Path, block: _Block, quiet_folder: None
) -> None:
    lacking = [what for need in block.needs if (what := _lacking(need))]
    if lacking:
        compile(block.code, page.name, "exec")
        pytest.skip(f"{page.name}[{block.number}] needs {' and '.join(lacking)}")
    names: dict[str, Any] = {"__name__": "docs_block"}
    exec("import torch\nimport deferred_init as di", names)
    exec(compile(block.code, f"{page.name}[{block.number}]", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_navigation_and_the_other_way_round() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w]+\.md", config))
    assert named == {page.name for page in PAGES}


def test_the_findings_page_is_that_of_the_explanations() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text()


def test_every_command_of_the_documentation_parses() -> None:
    from deferred_init.cli import _parser

    found = []
    for page in PAGES:
        for fence in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            lines = fence.replace("\\\n", " ").splitlines()
            found += [line for line in lines if line.startswith("deferred-init ")]
    assert len(found) >= 5
    for line in found:
        words = line.partition("#")[0].split()
        assert _parser().parse_args(words[1:]).command == words[1]


def test_every_name_on_the_api_page_exists() -> None:
    for path in re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), re.M):
        module, _, name = path.rpartition(".")
        if importlib.util.find_spec(path.partition(".")[0]) and module:
            try:
                found = getattr(importlib.import_module(module), name)
            except AttributeError:
                found = importlib.import_module(path)
            assert found.__doc__, path


def test_every_public_name_is_on_the_api_page() -> None:
    import deferred_init

    text = (DOCS / "api.md").read_text()
    assert [name for name in deferred_init.__all__ if name not in text] == []


def test_the_architecture_says_where_every_module_and_folder_stands() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "deferred_init"
    files = {path.name for path in package.glob("[!_]*.py")}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert {name for name in files | folders if f"`{name}" not in text} == set()
