"""Trains the model with torch.optim. Prints losses, norms, and the logits of the first batch in eval mode.

argv: the optimizer, batches of an update, and the learning rate of each update.
"""

import json
import sys

import torch
from model import load
from torch import nn

kind, count, rates = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(number * 8, number * 8 + 8)
    ids = torch.stack([(rows * 7 + 3) % 31, (rows * 5 + 1) % 31], 1)
    return ids, (ids[:, 0] * 3 + ids[:, 1]) % 31


model = load().train()
params = list(model.parameters())
if kind == "adamw":
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
else:
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
losses, norms = [], []
for step, rate in enumerate(rates):
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    for part in range(count):
        given = batch(step * count + part)
        loss = model.loss(*given)[0] if kind == "adamw" else model.steady_loss(*given)
        (loss / count).backward()
        losses.append(loss.item())
    clip = 1.0 if kind == "adamw" else float("inf")
    norms.append(nn.utils.clip_grad_norm_(params, clip).item())
    optimizer.step()
model.eval()
with torch.no_grad():
    logits = model(batch(0)[0]).flatten().tolist()
    loss = (model.loss(*batch(0))[0] if kind == "adamw" else model.steady_loss(*batch(0))).item()
print(json.dumps({"losses": losses, "norms": norms, "logits": logits, "eval": loss}))
