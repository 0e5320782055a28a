"""Torch's private names in the package: every use of a name that torch does not document.

| file | subject |
|---|---|
| `modules` | tables and calls of modules, hooks and versions of tensors, operators |
| `hooks` | a submodule's own hooks |
| `tracing` | one call of a module, traced by Dynamo |
| `guards` | Dynamo's guards as places and facts |
| `modes` | the modes of torch |
| `profiling` | whether a profiler is on |
| `sharding` | parameters that FSDP2 shards |
| `sizes` | sizes that depend on values |
| `graphs` | graphs that Dynamo hands over to the backend of `torch.compile` |
| `registry` | the name of that backend |
| `draws` | random operations as inputs (a link to the worker's file, as the next three) |
| `partition` | a training step as two programs |
| `saved` | what the backward program reads |
| `widening` | computations with more digits |

`Private:` in a docstring lists the names that a file uses, and `Without it:` says what is lost if torch moves them.
"""
