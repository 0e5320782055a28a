#!/bin/sh
# Packs what a GPU machine needs to build and run the example into dist/, which git ignores: release binaries for this
# CPU architecture, the example and its weights in float16, the checks and run.sh. 64 MiB at most, so that it can travel
# as one small file. Usage: tests/gpu/pack.sh
set -eu
cd "$(dirname "$0")/../.."
stage=dist/stage
rm -rf dist
mkdir -p $stage/bin $stage/minilm $stage/blocks $stage/residual $stage/values $stage/decoder

cargo build --workspace --exclude precast-python --release --bin minilm
# Cargo builds the programs for tests too, with other features than `make build`, which comes last.
tests=$(cargo test --release --features tch --test gpu --no-run --message-format json \
    | sed -n '/"name":"gpu"/s/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
make build
cp target/release/precast target/release/minilm $stage/bin/
cp "$tests" $stage/bin/gpu-tests
strip $stage/bin/*

cp examples/minilm/*.py examples/minilm/*.toml examples/minilm/sentences.txt $stage/minilm/
cp examples/blocks/*.py examples/blocks/*.toml tests/gpu/eight.toml tests/gpu/eager.toml $stage/blocks/
cp tests/gpu/residual/*.py tests/gpu/residual/*.toml $stage/residual/
cp tests/gpu/values/*.py tests/gpu/values/*.toml $stage/values/
cp tests/numerics/decoder/*.py tests/gpu/decoder.toml $stage/decoder/
cp tests/numerics/eager.py $stage/numerics.py
cp tests/gpu/run.sh tests/gpu/compare.py $stage/
mkdir $stage/kernels
cp -r kernels/precast_kernels $stage/kernels/
find $stage/kernels -name __pycache__ -prune -exec rm -r {} +
.venv/bin/python tests/gpu/half.py $stage/minilm/weights

tar -czf dist/precast-gpu.tar.gz -C $stage .
cp tests/gpu/run.sh dist/run.sh
rm -rf $stage
size=$(wc -c < dist/precast-gpu.tar.gz)
echo "dist/precast-gpu.tar.gz: $((size / 1048576)) MiB; run dist/run.sh OUTPUT_FOLDER on the GPU machine"
test "$size" -le 67108864 || { echo "error: larger than 64 MiB" >&2; exit 1; }
