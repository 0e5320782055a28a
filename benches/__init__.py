"""Side by side with what people use today: every number is a ratio within one run.

    make bench                            the CPU's figures, into benches/results/cpu.json
    benches/gpu.sh OUT                    a GPU machine's, from the files of benches/pack.sh
    python -m benches draw FILE           pictures and a page's table from that file
    make bench-build                      the cost of a build from nothing (cold_build.py)
    python benches/wrapper.py             `maybe_compile` beside `torch.compile` and eager
    python -m benches.architectures       `maybe_compile` over twenty architectures, beside eager
    make bench-smoke                      few, short measurements against the stored ratios, by hand before a release

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
