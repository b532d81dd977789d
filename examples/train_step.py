"""Train a tiny Llama from scratch on one sentence of random ids until it knows it by heart."""

import torch

from astrai.config import ModelConfig
from astrai.models import get_model_class

torch.manual_seed(0)
config = ModelConfig(
    "llama",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
)
model = get_model_class("llama")(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
ids = torch.randint(0, config.vocab_size, (1, 32))

for step in range(31):
    logits = model.compute_logits(model(ids[:, :-1]))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
