"""Prepares a deferred model on two ranks; prints one JSON line per case on rank 0.

Run under torchrun: `accelerate_ranks.py CASE`, as `test_accelerate.py` does.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import deferred_init as di
from deferred_init.integrations.accelerate_plugin import (
    Accelerator,
    DeferredInitPlugin,
)

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def build(tie: bool = True) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=tie))


def digest(tensors: dict[str, Any]) -> str:
    made = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        made.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return made.hexdigest()[:16]


def fsdp(ram_efficient: bool) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=ram_efficient,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )


def train(case: str, folder: str) -> dict[str, Any]:
    plugin = DeferredInitPlugin(seed=0)
    accelerator = Accelerator(cpu=True, deferred_init=plugin)
    if case.startswith("fsdp"):
        # Accelerate turns FSDP on for accelerators only; its code runs on CPUs too.
        accelerator.state.fsdp_plugin = fsdp("ram" in case)
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP
        assert accelerator.is_fsdp2
    model: Any = di.deferred_init(build, "untied" not in case)
    if case == "ddp_one_real" and accelerator.is_main_process:
        torch.manual_seed(0)
        model = build()
    frozen = model.model.norm.weight.requires_grad_(False)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1 and p is not frozen]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=1e-2
    )
    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randint(64, (16, 16)), batch_size=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, data, scheduler = accelerator.prepare(
        model, optimizer, data, scheduler
    )
    start = digest(accelerator.get_state_dict(model))
    groups = [len(group["params"]) for group in optimizer.param_groups]
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    strangers = held - {id(p) for p in model.parameters()}
    losses = []
    for batch in data:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    moved = digest(accelerator.get_state_dict(model))
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    accelerator.load_state(folder)
    again = digest(accelerator.get_state_dict(model))
    accelerator.save_model(model, os.path.join(folder, "model"))
    unwrapped = type(accelerator.unwrap_model(model)).__name__
    return {
        "start": start,
        "classes": sorted({type(p).__name__ for p in model.parameters()}),
        "groups": groups,
        "strangers": len(strangers),
        "losses": losses,
        "moved": moved,
        "again": again,
        "unwrapped": unwrapped,
        "reports_ok": [report.ok for report in accelerator.deferred_init_reports],
    }


def eager(tie: bool) -> str:
    torch.manual_seed(0)
    return digest(build(tie).state_dict())


def main() -> None:
    case = sys.argv[1]
    with tempfile.TemporaryDirectory() as own:
        folder: list[Any] = [own]
        dist.init_process_group("gloo")
        dist.broadcast_object_list(folder)
        result = train(case, folder[0])
        dist.barrier()
    if dist.get_rank() == 0:
        result["eager"] = eager("untied" not in case)
        sys.stdout.write(json.dumps(result) + "\n")
    gc.collect()  # a DDP left in a cycle may hang at exit, after its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
