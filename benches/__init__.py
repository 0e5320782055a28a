"""Side by side with what people use today: every number is a ratio within one run. The commands are in
`docs/src/benchmarks/overview.md`.

A **case** (`cases.py`) is a model with a `precast.toml`: everything else (inputs, sizes, entry) is read from that file,
so that all contenders run the same thing. A **contender** (`contenders.py`) answers one case: `precast bench` and
`precast run` on a store of `precast build`, or a Python process of its own (`peer.py`, one way to run a model in
`ways.py`). Contenders of a case are prepared, stay alive, and are measured in turns, round after round, so that other
work of the machine meets all of them. A ratio is taken in each round; the median and the range of the rounds are
kept. A **part** (`parts/`) measures one thing for all cases and adds it to the result, which is written after each, so
that an interrupted run loses nothing. Parts that could not be measured are listed under `skipped`, with the reason.

The machine should do nothing else: OpenMP's threads spin while they wait for each other, so that with as many of them
as cores one other busy process makes a call many times as slow. Where that can't be had, `OMP_WAIT_POLICY=passive`
makes all contenders but ONNX Runtime, which has threads of its own, wait without spinning; the result says so.
"""
