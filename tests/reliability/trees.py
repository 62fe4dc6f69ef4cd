"""Random module trees: a program of small actions, and what they build.

A program is a tuple of actions `(name, a, b, c)`; the integers choose modules, tensors
and variants modulo what there is, so that any tuple is a program, and a part of a
program too: that is what lets hypothesis shrink a failure to its smallest input.
"""

from __future__ import annotations

from hypothesis import strategies as st
from torch import nn

from tests.reliability.tally import tally
from tests.reliability.tree_actions import ACTIONS, CONVENTIONAL, Tree
from tests.reliability.tree_parts import Raising

__all__ = ["ACTIONS", "CONVENTIONAL", "Program", "Raising", "build", "programs"]

Action = tuple[str, int, int, int]
Program = tuple[Action, ...]


def programs(names: tuple[str, ...] = tuple(ACTIONS)) -> st.SearchStrategy[Program]:
    """Return the strategy of programs that use some actions."""
    number = st.integers(0, 99)
    # Without children there is little for the others to act on.
    weighted = [*names, "child", "child", "child"]
    action = st.tuples(st.sampled_from(weighted), number, number, number)
    return st.lists(action, min_size=4, max_size=16).map(_counted)


def _counted(actions: list[Action]) -> Program:
    tally["random trees"] += 1
    return tuple(actions)


def build(program: Program, conventional: bool = False) -> nn.Module:
    """Run a program and return the root of its tree.

    A conventional tree is finished depth first: what is constructed before another
    module also stands before it, so that the tree tells the order.
    """
    tree = Tree(conventional)
    for name, a, b, c in program:
        ACTIONS[name](tree, a, b, c)
    return tree.root
