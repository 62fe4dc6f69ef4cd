"""Print one of the README's marked commands, exactly as it stands there.

Usage: readme_commands.py NAME, where README.md has `<!-- command: NAME -->` right
before a fenced block of one line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"<!-- command: (\w+) -->\n```bash\n(.*?)\n```\n", re.DOTALL)


def commands(readme: str) -> dict[str, str]:
    """Find the marked commands by name; each must be a single line."""
    found = dict(BLOCK.findall(readme))
    long = [name for name, command in found.items() if "\n" in command]
    if long:
        raise SystemExit(f"more than one line in the README's commands: {long}")
    return found


if __name__ == "__main__":
    readme = Path(__file__).resolve().parent.parent / "README.md"
    known = commands(readme.read_text(encoding="utf-8"))
    name = sys.argv[1]
    if name not in known:
        raise SystemExit(f"README.md has no command {name!r}; it has {sorted(known)}")
    print(known[name])
