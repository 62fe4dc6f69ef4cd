"""Prepares a deferred model on two ranks; prints one JSON line per case on rank 0.

Run under torchrun: `accelerate_ranks.py CASE...`, as `test_accelerate_ranks.py` does.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, is_compiled_module
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
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


def build(case: str) -> nn.Module:
    model = LlamaForCausalLM(
        LlamaConfig(**CONFIG, tie_word_embeddings="untied" not in case)
    )
    if "buffer" in case:
        model.register_buffer("noise", torch.rand(3))  # persistent
    return model


def digest(tensors: dict[str, Any]) -> str:
    made = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        made.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return made.hexdigest()[:16]


def values(accelerator: Accelerator, model: Any) -> str:
    """Hash all values of a model, whole."""
    if isinstance(model, FullyShardedDataParallel):
        # With parameters on the CPU torch's own way to a full state dict crashes.
        with FullyShardedDataParallel.summon_full_params(model):
            return digest(
                {
                    name.replace("_fsdp_wrapped_module.", ""): value.clone()
                    for name, value in model.named_parameters(remove_duplicate=False)
                }
            )
    return digest(accelerator.get_state_dict(model))


def names(accelerator: Accelerator, model: Any) -> list[str]:
    """Return the names under which accelerate keeps a model's values."""
    if isinstance(model, FullyShardedDataParallel):
        return []  # see `values`
    return sorted(accelerator.get_state_dict(model))


def fsdp(case: str) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=1 if "fsdp1" in case else 2,
        cpu_ram_efficient_loading="ram" in case,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        **({"use_orig_params": True} if "fsdp1" in case else {}),
    )


def accelerator_for(case: str) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    options = {"dynamo_backend": "eager"} if "compiled" in case else {}
    plugin = DeferredInitPlugin(
        seed=None if "fsdp1" in case else 0,
        recipe="fp8_current" if "_te" in case else None,
    )
    accelerator = Accelerator(cpu=True, deferred_init=plugin, **options)
    # Accelerate turns these on for accelerators only; its code runs on CPUs too.
    if case.startswith("tp"):
        config = ParallelismConfig(tp_size=2)
        accelerator.state.parallelism_config = config
        accelerator.state.device_mesh = config.get_device_mesh("cpu")
    if "fsdp" in case:
        PartialState().device = torch.device("cpu")  # without the index, for FSDP1
        accelerator.state.device = torch.device("cpu")
        accelerator.state.fsdp_plugin = fsdp(case)
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP
        assert accelerator.is_fsdp2 == ("fsdp2" in case)
    return accelerator


def split(model: Any, mesh: Any) -> None:
    """Apply tensor parallelism, as Hugging Face's plan for a Llama does."""
    styles = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj"), ColwiseParallel()),
        **dict.fromkeys(("self_attn.v_proj", "mlp.gate_proj"), ColwiseParallel()),
        "mlp.up_proj": ColwiseParallel(),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel()),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, styles)
    model.config.distributed_config = {"tp_size": mesh.size()}


def train(case: str, folder: str) -> dict[str, Any]:
    accelerator = accelerator_for(case)
    torch.manual_seed(0)  # FSDP1 goes on with the generator
    model: Any = di.deferred_init(build, case)
    if case == "tp_by_hand":
        split(model, accelerator.torch_device_mesh["tp"])
    if "one_real" in case and accelerator.is_main_process:
        torch.manual_seed(0)
        model = build(case)
    frozen = model.model.norm.weight.requires_grad_(False)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1 and p is not frozen]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=1e-2
    )
    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randint(64, (16, 16)), batch_size=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    parts = (model, optimizer, data, scheduler)
    if "apart" in case:
        model, optimizer, data, scheduler = map(accelerator.prepare, parts)
    else:
        model, optimizer, data, scheduler = accelerator.prepare(*parts)
    if "_te" in case:  # which computes on GPUs only
        return converted(accelerator, model, optimizer)
    start = values(accelerator, model)
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
    result = {
        "start": start,
        "tied": model_head(model) is model_embedding(model),
        "classes": sorted({type(p).__name__ for p in model.parameters()}),
        "names": names(accelerator, model),
        "groups": groups,
        "stepped": len(optimizer.optimizer.state),
        "strangers": len(strangers),
        "losses": losses,
        "moved": values(accelerator, model),
        "compiled": is_compiled_module(model),
        "unwrapped": type(
            accelerator.unwrap_model(model, keep_torch_compile=False)
        ).__name__,
        "reports_ok": [report.ok for report in accelerator.deferred_init_reports],
    }
    if not case.startswith("tp"):  # accelerate cannot save what only tp shards
        result["again"] = saved_and_loaded(accelerator, model, folder)
    return result


def converted(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, Any]:
    """Say what `prepare` made of a model that was converted first."""
    bare = getattr(model, "module", model)
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        "start": values(accelerator, model)
        if isinstance(model, FullyShardedDataParallel)
        else digest(dict(bare.named_parameters(remove_duplicate=False))),
        "computes": hasattr(bare.forward, "_deferred_init_bare"),
        "tied": model_head(model) is model_embedding(model),
        "classes": sorted({type(p).__name__ for p in model.parameters()}),
        "layers": sum(
            type(m).__module__.startswith("transformer_engine") or _is_te_shard(m)
            for m in model.modules()
        ),
        "held": held == {id(p) for p in trained},
        "reports_ok": [report.ok for report in accelerator.deferred_init_reports],
    }


def _is_te_shard(module: nn.Module) -> bool:
    """Whether FSDP2 has put a class of its own in front of Transformer Engine's."""
    return type(module).__name__.startswith("FSDP") and any(
        cls.__module__.startswith("transformer_engine") for cls in type(module).__mro__
    )


def saved_and_loaded(accelerator: Accelerator, model: Any, folder: str) -> str:
    """Save, forget everything, load."""
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    accelerator.load_state(folder)
    again = values(accelerator, model)
    if not isinstance(model, FullyShardedDataParallel):
        accelerator.save_model(model, os.path.join(folder, "model"))
    return again


def model_head(model: Any) -> Any:
    return getattr(model, "module", model).get_output_embeddings().weight


def model_embedding(model: Any) -> Any:
    return getattr(model, "module", model).get_input_embeddings().weight


def eager(case: str) -> str:
    torch.manual_seed(0)
    return digest(build(case).state_dict())


def main() -> None:
    dist.init_process_group("gloo")
    for case in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as own:
            folder: list[Any] = [own]
            dist.broadcast_object_list(folder)
            result = train(case, folder[0])
            dist.barrier()
        if dist.get_rank() == 0:
            result.update(case=case, eager=eager(case))
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
        gc.collect()  # a DDP left in a cycle may hang at exit, after its process group
    dist.barrier()
    time.sleep(0.1)  # as at the end of examples/trainer_torchrun.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
