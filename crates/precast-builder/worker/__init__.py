"""Precast's worker: captures and compiles PyTorch modules for `precast`, one JSON document per line.

Only the standard library and torch are imported. `serve` imports the modules that need torch after it was found, so
that a machine without it gets an answer and not a traceback. `wire` is the protocol, `serve` the requests; the package
`torch_private` has every private name of torch.
"""
