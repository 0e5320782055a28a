#!/bin/sh
# The benchmarks on a GPU machine, from what pack.sh packed. Usage: gpu.sh OUT [option of `python -m benches run`…]
#
#   gpu.sh OUT                                     everything, as for the book: an hour or more
#   gpu.sh OUT --cases minilm,mlp --minutes 9      as much as fits: what was not measured is listed under `skipped`
#   gpu.sh OUT --tune --together --minutes 90      the same without the graph passes of kernels/
#   WORK=DIR gpu.sh OUT …                          keeps stores and compilers' caches for the next call
#   DEVICE=cpu gpu.sh OUT …                        the same on the CPU, to try it
#
# OUT/bench.json is written after each step. PYTHON names another interpreter than python3.
set -eu
out=${1:?usage: gpu.sh OUT [option…]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -gt 0 ] || set -- --tune --kernels --together --minutes 90
chmod +x "$root"/bin/*
cd "$root"
PYTHONPATH=$root PYTHONUNBUFFERED=1 exec "${PYTHON:-python3}" -m benches run --device "${DEVICE:-cuda}" \
    --binaries "$root/bin" --out "$out/bench.json" ${WORK:+--work "$WORK"} "$@"
