"""Torch's private names: every use of a name that torch does not document, in functions with a documented interface.

| file | subject |
|---|---|
| `versions` | the versions of torch: features that are off, options that are gone |
| `pytrees` | nested arguments and results, as torch.export flattens them |
| `exported` | exported programs: their inputs, their bounds, copies of their graphs |
| `archives` | archives of torch.export, made from parts |
| `drafts` | breaks of a capture, and the sizes that it decides on |
| `recompiles` | torch.compile: graphs of a call, breaks, guards that fail |
| `tracing` | a function with its backward pass as one graph |
| `widening` | operators that compute with more digits |
| `partition` | a training step, cut into a forward and a backward program |
| `saved` | the values that the backward program reads |
| `draws` | random operations of a training step |
| `fake` | fake tensors: shapes, strides and shared memory without data |
| `storages` | memory of tensors: whether something still uses it |
| `symbols` | symbolic sizes |
| `overloads` | operators: schemas, names, kernels |
| `modules` | tables of parameters and buffers; the mark of `torch.compiler.disable` |
| `errors` | errors of torch.export and of the compiler |
| `forks` | workers as forks of a process that has imported torch and the compiler |
| `inductor` | AOTInductor: options, one compile, the files that it generates |
| `lowerings` | lowerings of AOTInductor: calls by name, no weights packed by templates |
| `freezing` | the compiler's passes over weights, and the constants that they make |
| `early_launch` | programmatic dependent launch of Triton kernels |
| `patches` | other values for names of torch, for a time |
| `cpp_toolchain` | the compiler's use of the C++ compiler |
| `cpp_flags` | instruction sets: compiler flags and vector classes |
| `cpp_headers` | precompiled C++ headers |
| `cpp_interface` | the C++ code that all artifacts share |
| `cpp_shim` | the shim between the runtime and this torch |
| `cpp_checks` | checks of values in generated C++ |

A private name is a name that torch does not document: modules and attributes with a leading underscore,
`torch.fx.experimental`, everything of inductor, and the text of the code that it generates. `Private:` in a docstring
lists the names that a function uses, `Without it:` the consequence if torch moves them. Operators of ATen are public
under any name: captured graphs consist of them.

The rest of the worker uses these functions and no private name; `tests/worker/test_private_names.py` checks this.
Nothing here imports from the rest of the worker. So a difference between versions of torch stays inside this package.

Differences between versions of torch are in the table of `versions`, and nowhere else.
"""
