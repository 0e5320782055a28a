"""The record of a program: all that its answer depends on beside its inputs and its weights.

Dynamo says which values of a module, of its classes, of modules of Python and of closures a trace has read
(`torch_private.guards`). A record has a fact about each of them, and about the code of each function that was followed.
It is kept with the release. A later process evaluates it, without a trace: where all facts hold, the program answers
for the module.

| file | holds |
|---|---|
| `values` | values as text that is equal in every process |
| `code` | digests of the code of functions |
| `places` | paths to values, and the reads on the way |
| `facts` | kinds of facts |
| `record` | the record: its facts as JSON, their evaluation |
| `watch` | the native check of a call: that nothing which was read has changed since the evaluation |

```text
trace ──▶ Record.of ──▶ JSON in the release ──▶ Record.differs (once) ──▶ Watch (each call)
```
"""
