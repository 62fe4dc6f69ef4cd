"""Which rank of a node reads what is shared."""

from __future__ import annotations

import torch
from torch import nn

from deferred_init.inventory import take_inventory
from deferred_init.loading.matching import Load
from deferred_init.loading.sharing import _shared
from deferred_init.loading.targets import Target


def test_the_rank_with_the_fewest_bytes_reads_next() -> None:
    model = nn.ParameterList(
        nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        for shape, dtype in (
            ((200, 100), torch.float64),
            ((400, 100), torch.float16),
            ((100, 400), torch.float16),
        )
    )
    inventory = take_inventory([model])
    loads = []
    for slot in inventory.slots:
        shape, dtype = tuple(slot.tensor.shape), slot.tensor.dtype
        target = Target(slot=slot, names=(slot.fqn,), shape=shape, dtype=dtype)
        loads.append(Load(target=target, pieces=()))
    shared = _shared(inventory, (0, 1), [loads])
    assert [shared[id(load)].reader for load in loads] == [0, 1, 1]
