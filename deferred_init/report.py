"""The report: what was done, where the bytes went, and what the audit found."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deferred_init.report_html import report_html
from deferred_init.report_plot import save_plot
from deferred_init.report_text import report_text

if TYPE_CHECKING:
    from deferred_init.handlers.protocol import Step

__all__ = ["Finding", "Report", "ReportStep", "usable_report_file"]

Severity = Literal["error", "warning"]
_ENDINGS = (".html", ".json", ".txt", ".png")
_PACKAGES = ("deferred_init", "transformer_engine", "transformers", "accelerate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the audit found wrong.

    Attributes:
        code: Stable name of the kind of fault; see `deferred_init.audit.EXPLANATIONS`.
        fqn: The place: a qualified name, or `optimizers[0]`.
        message: What was expected, what was found, and what to do.
        severity: `"error"`, or `"warning"` for what need not be wrong.
    """

    code: str
    fqn: str
    message: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"`{self.fqn or '(root)'}` [{self.code}] {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStep:
    """What was done for one module.

    Attributes:
        fqn: The module's qualified name.
        module_class: Name of its class.
        initializer: Who did it: `torch.nn`, `te.ops`.
        source: Where the values came from: `Linear.reset_parameters`.
        num_tensors: How many tensors got memory.
        num_bytes: Their bytes on the device.
        seconds: Host seconds; CUDA work is not waited for.
        bytes_by_format: The bytes by dtype, or by recipe where stored quantized.
    """

    fqn: str
    module_class: str
    initializer: str
    source: str = ""
    num_tensors: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    bytes_by_format: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: Step,
        *,
        seconds: float = 0.0,
        bytes_by_format: Mapping[str, int] | None = None,
    ) -> ReportStep:
        """Return the row of a step of a plan."""
        return cls(
            fqn=step.site.fqn,
            module_class=type(step.site.module).__name__,
            initializer=step.initializer.name,
            source=step.claim.source,
            num_tensors=len(step.claim.slots),
            num_bytes=step.num_bytes,
            seconds=seconds,
            bytes_by_format=bytes_by_format or {},
        )


def _versions() -> dict[str, str]:
    """Versions of what took part; only packages that are imported already."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `materialize`, and of `audit`, which makes nothing.

    Attributes:
        findings: What the audit found; empty if all is well.
        device: Where the tensors were made; None in the report of an audit alone.
        recipe: Name of the recipe.
        rng: The RNG policy.
        steps: One row per module that was given something.
        notes: Remarks of the plan and of those who made the tensors.
        assumptions: What had to be assumed about values or order; none for recordings.
        rebound: Names whose tensor could not stay the same object.
        final_bytes: Bytes of everything that was made.
        peak_bytes: Measured peak above the start; None where nobody counts it.
        predicted_peak_bytes: What the plan had said.
        seconds: By stage.
        versions: Of Python, torch and the packages that took part.
    """

    findings: tuple[Finding, ...] = ()
    device: str | None = None
    recipe: str | None = None
    rng: str | None = None
    steps: tuple[ReportStep, ...] = ()
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()
    final_bytes: int = 0
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=_versions)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings do not count."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data; `ok` comes first."""
        data = asdict(self)
        for name in ("findings", "steps", "notes", "assumptions", "rebound"):
            data[name] = list(data[name])
        return {"ok": self.ok, **data}

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the report as JSON; `Report.from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Make the report that `to_dict` came from.

        Raises:
            ValueError: If `data` has keys that a report does not have.
        """
        known = {each.name for each in fields(cls)}
        values = {key: value for key, value in data.items() if key != "ok"}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ValueError(f"a report has no {unknown}; expected {sorted(known)}")
        for name in ("notes", "assumptions", "rebound"):
            values[name] = tuple(values.get(name, ()))
        values["findings"] = tuple(Finding(**f) for f in values.get("findings", ()))
        values["steps"] = tuple(ReportStep(**s) for s in values.get("steps", ()))
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Make the report that `to_json` wrote.

        Raises:
            ValueError: If the text is not JSON, or not that of a report.
        """
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, found {type(data).__name__}")
        return cls.from_dict(data)

    def to_html(self) -> str:
        """Return one HTML page: nothing else is needed to look at it."""
        return report_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report in the format that the ending of the path names.

        Args:
            path: Ends in `.html`, `.json`, `.txt`, or `.png` for the curve of bytes
                over time, which needs matplotlib. A file that is there is replaced.

        Raises:
            ValueError: Another ending, or a picture of a report without steps.
            ImportError: A picture without matplotlib.
        """
        target = Path(path)
        if target.suffix == ".png":
            save_plot(self, target)
            return
        writers = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__}
        _check_ending(target)
        writer = writers[target.suffix]
        target.write_text(f"{writer()}\n", encoding="utf-8")

    def __str__(self) -> str:
        """Return a text of at most 100 columns, findings first."""
        return report_text(self)


def usable_report_file(path: str | os.PathLike[str], *, also_in: Path) -> None:
    """Check, before any work, that `Report.save` can write to a file.

    Args:
        path: The file.
        also_in: A folder that will be there by then.

    Raises:
        ValueError: Another ending, a folder, in none, or a picture without matplotlib.
    """
    target = Path(path)
    _check_ending(target)
    if target.is_dir():
        raise ValueError(f"a report is saved in a file, and {str(path)!r} is a folder")
    folder = target.parent
    if not folder.is_dir() and folder.resolve() != also_in.resolve():
        raise ValueError(
            f"there is no folder {str(folder)!r} for the report {str(path)!r}; make it"
        )
    if target.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "a picture needs matplotlib, which is not installed; install it with "
            'pip install "deferred-init[report]"'
        )


def _check_ending(path: Path) -> None:
    if path.suffix not in _ENDINGS:
        raise ValueError(
            f"a report is saved as .html, .json, .txt or .png, found {str(path)!r}"
        )
