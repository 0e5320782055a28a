"""Torch's private names in the package: every use of a name that torch does not document.

| file | subject |
|---|---|
| `tracing` | one call of a module, traced by Dynamo |
| `guards` | Dynamo's guards as places and facts |
| `profiling` | whether a profiler is on |
| `sizes` | sizes that depend on values |
| `graphs`, `registry` | the backend of `torch.compile` |

`Private:` in a docstring lists the names that a file uses, and `Without it:` says what is lost if torch moves them.
"""
