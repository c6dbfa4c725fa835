"""Shard a small transformer by FSDP2, as PyTorch's distributed/FSDP2 example."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, vocab_size=32, dim=16, heads=2, n_layers=3):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(n_layers))
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, tokens):
        h = self.embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


class Checkpointer:
    def __init__(self, path):
        self.path = path

    def save(self, model):
        state = {}
        for name, shard in model.state_dict().items():
            full = shard.full_tensor()
            if dist.get_rank() == 0:
                state[name] = full.cpu()
        if dist.get_rank() == 0:
            torch.save(state, self.path)


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    model = Transformer()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    checkpointer = Checkpointer("model_state_dict.pt")
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(3):
        tokens = torch.randint(32, (4, 9))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        print(f"rank {rank} step {step}: loss {loss.item():.5f} norm {norm.item():.5f}")
        optim.step()
        optim.zero_grad()
    checkpointer.save(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
