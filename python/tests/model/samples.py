"""Sample inputs of the model, for the module whose inputs nest."""

import torch


def nested(batch: int = 4) -> dict:
    x = torch.arange(3.0).repeat(batch, 1)
    return {"x": x, "pair": (x + 1, x - 1), "scale": torch.full((1,), 2.0)}
