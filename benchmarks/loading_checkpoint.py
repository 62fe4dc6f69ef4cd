"""Write a Llama checkpoint in the form of Hugging Face, by several threads."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_SHARD_BYTES = 4 * 10**9
_PIECE_BYTES = 1 << 24
_NUM_THREADS = 16

Shapes = dict[str, tuple[int, ...]]


def write_checkpoint(folder: Path, gigabytes: float) -> int:
    """Write a Llama-3-like checkpoint of about this size; return its bytes."""
    shapes = _shapes(folder, gigabytes)
    shards: list[Shapes] = [{}]
    for key, shape in shapes.items():
        if _num_bytes(shards[-1]) > _SHARD_BYTES:
            shards.append({})
        shards[-1][key] = shape
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
        where.update(dict.fromkeys(shard, name))
    total = _num_bytes(shapes)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _shapes(folder: Path, gigabytes: float) -> Shapes:
    from transformers import LlamaConfig, LlamaForCausalLM

    # Eight billion parameters are 16 GB; a third of the width below 4 GB.
    wide = gigabytes > 4
    width = 4096 if wide else 1024
    vocabulary = 128256 if wide else 32000
    head = 2 * 2 * width * vocabulary
    layer = 2 * (2.5 * width**2 + 3 * 3.5 * width**2)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=max(1, round((gigabytes * 1e9 - head) / layer)),
        num_attention_heads=width // 128,
        num_key_value_heads=width // 512,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def _num_bytes(shapes: Shapes) -> int:
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def _write_file(path: Path, shapes: Shapes) -> None:
    """Write a safetensors file of bfloat16 values that differ from place to place."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    block = torch.randn(1 << 23).mul_(0.02).bfloat16()
    values = memoryview(block.repeat(3).view(torch.uint8).numpy())
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.pwrite(descriptor, struct.pack("<Q", len(text)) + text, 0)
        os.truncate(descriptor, start + end)

        def write(piece: tuple[int, int]) -> None:
            offset, length = piece
            shift = offset // _PIECE_BYTES * 6074 % _PIECE_BYTES
            os.pwrite(descriptor, values[shift : shift + length], start + offset)

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(write, _pieces(end)))
    finally:
        os.close(descriptor)


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, num_bytes, _PIECE_BYTES):
        yield offset, min(_PIECE_BYTES, num_bytes - offset)
