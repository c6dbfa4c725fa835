"""Train a language model on a batch that is accumulated, as nanoGPT's train.py."""

import math
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# The configuration: overridden by --name=value, as nanoGPT's configurator does it.
max_iters, eval_interval, eval_iters = 6, 2, 2
warmup_iters, lr_decay_iters, learning_rate, min_lr = 2, 6, 1e-2, 1e-3
gradient_accumulation_steps, batch_size, block_size = 4, 4, 16
n_embd, vocab_size, grad_clip = 32, 64, 1.0
timeout_s = 600
for argument in sys.argv[1:]:
    name, value = argument.removeprefix("--").split("=")
    globals()[name] = type(globals()[name])(value)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(vocab_size, n_embd),
            nn.Embedding(block_size, n_embd),
        )
        self.norm = nn.LayerNorm(n_embd)
        self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.places(torch.arange(idx.size(1)))
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        x = x + self.down(F.gelu(self.up(x)))
        logits = x @ self.tokens.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size

torch.manual_seed(0)
text = torch.cumsum(torch.randint(1, 4, (2000,)), 0) % vocab_size
data = {"train": text[:1600], "val": text[1600:]}
model = GPT()
torch.manual_seed(1337 + ddp_rank)


def get_batch(split):
    starts = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in starts])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in starts])
    return x, y


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in data:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
model = DistributedDataParallel(model)
raw_model = model.module
best_val_loss, iter_num, t0 = 1e9, 0, time.time()
x, y = get_batch("train")
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.5f}, val {losses['val']:.5f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {"model": raw_model.state_dict(), "iter_num": iter_num}
                torch.save(checkpoint, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(x, y)
        loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    lossf = loss.item() * gradient_accumulation_steps
    if master_process:
        print(f"iter {iter_num}: loss {lossf:.5f}")
    iter_num += 1
    if iter_num > max_iters:
        break
print(f"rank {ddp_rank} is done: {sum(p.sum().item() for p in model.parameters()):.5f}")
dist.destroy_process_group()
