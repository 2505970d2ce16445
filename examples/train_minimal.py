"""A minimal training script to start from: stage 2, gradient clipping, checkpoints, and resuming.

torchrun --standalone --nproc-per-node 2 examples/train_minimal.py
"""

import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint

STEPS = 200

dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model=model, stage=2)

newest = latest("run", group=dist.group.WORLD)
first = 0 if newest is None else load_checkpoint(newest, model, optimizer)["step"]
for step in range(first, STEPS):
    numbers = torch.Generator().manual_seed(step * ranks + rank)  # Each rank has its own share of the batch.
    x = torch.randn(32, 8, generator=numbers).to(device)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 50 == 0:
        save_checkpoint(f"run/step-{step + 1}", model, optimizer, extra={"step": step + 1}, keep=2)
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
dist.destroy_process_group()
