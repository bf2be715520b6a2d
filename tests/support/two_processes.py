"""Training steps of a small model in two processes, as DDP and FSDP2 make them: by flashgen's attention and by PyTorch's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import flashgen

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
WORDS = 32
RATE = 5e-4  # of learning: at 2e-3 what bf16 rounds grows from step to step


def flashgen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flashgen.attention(q, k, v, causal=True, layout="bhsd")


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS = (("flashgen", flashgen_attention, True), ("torch", torch_attention, True), ("fp32", torch_attention, False))


class Block(nn.Module):
    """Attention of two heads and an MLP, each behind a norm; attention may be computed again in the backward pass."""

    def __init__(self, width: int, attention: Attention, recomputed: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.attention, self.recomputed = attention, recomputed

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        return self.out(self.attention(q, k, v).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (checkpoint(self.attend, x, use_reentrant=False) if self.recomputed else self.attend(x))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two blocks between an embedding of WORDS words and the scores of the next one."""

    def __init__(self, width: int, attention: Attention, recomputed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width, attention, recomputed) for _ in range(2)])
        self.scores = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.scores(x)  # type: ignore[no-any-return]


def losses(way: str, attention: Attention, sixteen_bits: bool, device: torch.device, steps: int, width: int, length: int) -> torch.Tensor:
    """Of each step, the mean over the processes.

    way: "ddp" with autocast to bf16, or "fsdp2" with parameters of bf16 and recomputed attention; all is fp32 without `sixteen_bits`
    """
    torch.manual_seed(0)  # the same model in each process
    model: Any = Model(width, attention, recomputed=way == "fsdp2").to(device)
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if sixteen_bits else None, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    words = torch.randint(WORDS, (2, length + 1), generator=torch.Generator().manual_seed(1 + distributed.get_rank())).to(device)
    found = []
    for _ in range(steps):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=sixteen_bits and way == "ddp"):
            loss = cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        found.append(mean / distributed.get_world_size())
    return torch.stack(found).cpu()


def _process(rank: int, folder: str, backend: str, device_type: str, of_losses: dict[str, Any]) -> None:
    devices = torch.cuda.device_count() if device_type == "cuda" else 1
    device = torch.device(device_type, rank % devices) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        for way in ("ddp", "fsdp2"):
            for name, attention, bits in ATTENTIONS:
                found = losses(way, attention, bits, device, **of_losses)
                if rank == 0:
                    torch.save(found, Path(folder) / f"{way}_{name}.pt")
    finally:
        distributed.destroy_process_group()


def losses_of_two_processes(backend: str, device_type: str, **of_losses: Any) -> dict[tuple[str, str], torch.Tensor]:
    """The losses by way ("ddp", "fsdp2") and name of ATTENTIONS. of_losses: `steps`, `width` and `length` of `losses`."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (folder, backend, device_type, of_losses), nprocs=2)
        return {(way, name): torch.load(Path(folder) / f"{way}_{name}.pt") for way in ("ddp", "fsdp2") for name, *_ in ATTENTIONS}
