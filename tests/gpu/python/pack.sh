#!/bin/sh
# Packs into dist/, which git ignores, what a GPU machine needs for run.sh beside it: the wheel, python/tests with pytest,
# the C library, and the models. Usage: tests/gpu/python/pack.sh
set -eu
cd "$(dirname "$0")/../../.."
stage=dist/python
rm -rf $stage
mkdir -p $stage/wheels $stage/c $stage/kernels

make wheel
make lib
cargo build --workspace --exclude precast-python --release --bin chat
cp target/wheels/"${WHEEL_PROFILE:-release}"/*.whl $stage/wheels/
.venv/bin/python -m pip download -q --no-deps --disable-pip-version-check -d $stage/wheels \
    $(grep -E '^(pytest|iniconfig|pluggy|pytest-timeout)==' python/requirements.txt)
cp target/c/include/precast.h target/c/lib/libprecast.so $stage/c/
ln -s libprecast.so "$stage/c/$(readelf -d $stage/c/libprecast.so | sed -n 's/.*soname: \[\(.*\)\]/\1/p')"
strip $stage/c/libprecast.so
cp -r python/tests $stage/tests
cp -r examples/double examples/train benches/models/gpt benches/models/steps benches/models/decode $stage/
rm -rf $stage/train/src
mkdir -p $stage/chat/examples $stage/chat/docs
cp -r examples/chat $stage/chat/examples/
cp -r docs/src $stage/chat/docs/
find $stage/chat/docs -type f ! -name '*.md' -delete
cp target/release/chat $stage/chat/
strip $stage/chat/chat
cp tests/gpu/python/*.py tests/gpu/python/streams.c tests/gpu/python/run.sh $stage/
cp -r kernels/precast_kernels $stage/kernels/
find $stage -name __pycache__ -prune -exec rm -r {} +

tar -czf dist/precast-python.tar.gz -C $stage .
cp tests/gpu/python/run.sh dist/python.sh
rm -rf $stage
size=$(wc -c < dist/precast-python.tar.gz)
echo "dist/precast-python.tar.gz: $((size / 1048576)) MiB; run dist/python.sh OUTPUT_FOLDER on the GPU machine"
