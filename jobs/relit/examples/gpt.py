"""A byte-level GPT of about 120,000 parameters: the main job behind `make run`.

Nothing here knows about failures: the loop below is what an undisturbed run would look like, and
relit resumes it inside `run.backward` and `run.step`. The configuration (all keys but the two
paths have defaults, see `DEFAULTS`) names token shards made by `relit_storage.data.tokens`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from relit_storage.data.tokens import TokenDataset

if TYPE_CHECKING:
    from relit_platform.worker.context import RankContext

SHAPE: dict[str, Any] = {"width": 64, "layers": 2, "heads": 4, "context": 64}
TRAINING = {"global_batch": 32, "steps": 1500, "lr": 3e-3, "warmup": 100, "seed": 0}
DEFAULTS = SHAPE | TRAINING | {"prompt": "def ", "sample_bytes": 240}
NUM_HELD_OUT = 256  # rows that the validation loss is the mean of


class Block(nn.Module):
    """Causal self-attention and a four times wider MLP, each behind a norm and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same shape."""
        rows, time, width = x.shape
        split = self.qkv(self.norm_1(x)).view(rows, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, time, width))
        mlp: Tensor = self.mlp(self.norm_2(x))
        return x + mlp


class GPT(nn.Module):
    """Bytes in, logits over the next byte out; the embedding is tied to the output."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Integer tokens [batch, time <= context] to logits [batch, time, 256]."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte of the next bytes y, both [batch, time]."""
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: str, num_bytes: int, seed: int = 0) -> str:
    """Continue `prompt` by `num_bytes` bytes, drawn at temperature 0.8; a pure function."""
    source = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(num_bytes):
        logits = model(torch.tensor([tokens[-model.context :]]))[0, -1]
        chances = functional.softmax(logits / 0.8, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=source)))
    return bytes(tokens).decode(errors="replace")


def learning_rate(step: int, cfg: dict[str, Any]) -> float:
    """Linear warm-up, then a cosine to a tenth: a function of the step, so nothing to restore."""
    warm = min(1.0, (step + 1) / cfg["warmup"])
    return float(cfg["lr"] * warm * (0.55 + 0.45 * math.cos(math.pi * step / cfg["steps"])))


def train(run: RankContext, cfg: dict[str, Any]) -> dict[str, Any]:
    """The job. Returns the mean loss over held-out rows and a sample of generated text."""
    cfg = DEFAULTS | cfg
    torch.manual_seed(cfg["seed"])
    model = GPT(**{name: cfg[name] for name in SHAPE})
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=0.05)
    run.register(model=model, optimizer=optimizer)
    data = TokenDataset.open(cfg["data"])
    for batch in run.batches(data, global_batch=cfg["global_batch"], steps=cfg["steps"]):
        optimizer.param_groups[0]["lr"] = learning_rate(run.step_no, cfg)
        loss = model.loss(batch["x"], batch["y"])
        run.backward(loss)
        run.step(optimizer, loss=loss)
    sample = generate(model, cfg["prompt"], cfg["sample_bytes"], cfg["seed"])
    return {"val_loss": validate(model, cfg["val_data"]), "sample": sample}


@torch.no_grad()
def validate(model: GPT, location: str) -> float:
    """Mean loss over the first row group of a held-out token data set."""
    rows = torch.from_numpy(TokenDataset.open(location).read(0, np.arange(NUM_HELD_OUT)))
    return float(model.loss(rows[:, :-1].long(), rows[:, 1:].long()))
