#!/bin/sh
# Packs what a GPU machine needs for the benchmarks into dist/, which git ignores: the release binary, this harness, the
# models, and MiniLM's weights in float16. 64 MiB at most. Usage: benches/pack.sh
#
# On the machine (a GPU, a C++ compiler, and a python3 with torch 2.11.0, torchvision and transformers; no Rust, no network):
#   python3 -m tarfile -e precast-bench.tar.gz DIR && DIR/benches/gpu.sh OUT
set -eu
cd "$(dirname "$0")/.."
stage=dist/bench
rm -rf $stage
mkdir -p $stage/bin $stage/examples $stage/benches

make build
cp target/release/precast $stage/bin/
strip $stage/bin/*

cp -r benches/*.py benches/*.sh benches/parts benches/models $stage/benches/
for example in minilm blocks vlm; do
    test -d examples/$example || continue
    mkdir $stage/examples/$example
    cp examples/$example/*.py examples/$example/*.toml $stage/examples/$example/
done
mkdir $stage/kernels
cp -r kernels/precast_kernels $stage/kernels/
find $stage -name __pycache__ -prune -exec rm -r {} +
git rev-parse HEAD > $stage/COMMIT
.venv/bin/python tests/gpu/half.py $stage/examples/minilm/weights

tar -czf dist/precast-bench.tar.gz -C $stage .
rm -rf $stage
size=$(wc -c < dist/precast-bench.tar.gz)
echo "dist/precast-bench.tar.gz: $((size / 1048576)) MiB"
test "$size" -le 67108864 || { echo "error: larger than 64 MiB" >&2; exit 1; }
