"""Prints the tokens that eager generates greedily, and the logits of each step, as JSON: generate.py PROMPT STEPS."""

import json
import sys

import torch
from model import load

prompt, steps = json.loads(sys.argv[1]), int(sys.argv[2])
model = load().eval()
tokens, logits = [], []
with torch.inference_mode():
    given, at = torch.tensor([prompt]), torch.arange(len(prompt))
    for _ in range(steps):
        last = model(given, at)[0, -1]
        tokens.append(int(last.argmax()))
        logits.append(last.tolist())
        given, at = torch.tensor([tokens[-1:]]), at[-1:] + 1
print(json.dumps({"tokens": tokens, "logits": logits}))
