#!/bin/sh
# Runs on a GPU machine what pack.sh beside it packed: the Python package, a generative model, training, decoding, C streams,
# two devices.
#
#   run.sh OUTPUT_FOLDER     beside precast-python.tar.gz, or in the folder it was unpacked to
#
# The machine needs a GPU, a C++ compiler and a `python3` (or $PYTHON) with torch, transformers and safetensors in the
# versions of requirements.txt; no Rust and no network.
#
#   PARTS="a b c"      which parts to run, of: tests generates streams train step decode devices parallel
#                      (all unless set)
#   TESTS="a.py b.py"  which files of python/tests (those that need a device unless set)
#   LAYERS=2           of the GPT of the part `devices` (12 unless set)
#   BATCHES="1 8"      the rows of the part `decode` (1, 8 and 32 unless set)
#   TABLE="--models encoder --batches 1 8"   what the part `table` measures, which is not among the parts unless asked
#                      for: all of it takes 25 minutes
#                      `tune` is not among the parts unless asked for either: it needs the packages of
#                      examples/chat/requirements.txt
#   DEVICE=cpu         the parts generates and train on the CPU, to try the script
#
# Each part leaves OUTPUT_FOLDER/PART.log as it goes. Exit code 0: every part passed.
set -eu
out=${1:?usage: run.sh OUTPUT_FOLDER}
mkdir -p "$out"
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
parts=" ${PARTS:-tests generates streams train step decode devices parallel} "
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -e "$here/precast-python.tar.gz" ]; then
    "$python" -m tarfile -e "$here/precast-python.tar.gz" "$work/pack"
    here=$work/pack
fi
"$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$here"/wheels/*.whl
chmod +x "$work/site/bin/precast"
PATH=$work/site/bin:$PATH
# The graph passes are a package that is not installed there.
PYTHONPATH=$work/site:$here/kernels
LIBTORCH=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
PRECAST_STORE=$work/store
PRECAST_PYTHON=$(command -v "$python")
PRECAST_COMMAND=$work/site/bin/precast
export PATH PYTHONPATH LIBTORCH PRECAST_STORE PRECAST_PYTHON PRECAST_COMMAND
export PYTHONUNBUFFERED=1

failed=
has() { case "$parts" in *" $1 "*) true ;; *) false ;; esac; }
# part NAME: runs the function of this name, if it is asked for; a failure is kept for the end.
part() {
    has "$1" || return 0
    echo "== $1"
    start=$(date +%s)
    # In the condition of an `if`, the shell would go on after a command that failed.
    set +e
    (set -ex; "$1") > "$out/$1.log" 2>&1
    code=$?
    set -e
    if test $code = 0; then
        echo "   done in $(($(date +%s) - start)) s"
    else
        echo "   FAILED; the end of its messages:"
        tail -n 30 "$out/$1.log"
        failed="$failed $1"
    fi
}

# for_device SPEC: adds the target to a spec.
for_device() {
    sed -i "0,/^\[\[module\]\]/s//[target]\ndevice = \"$device\"\n\n[[module]]/" "$1"
}

# What python/tests has for a device.
tests() {
    cd "$here/tests"
    # shellcheck disable=SC2086
    "$python" -m pytest -x -q -p no:cacheprovider --timeout 300 --durations=10 ${TESTS:-test_cuda.py test_cuda_training.py}
}

# A model of transformers as it is: `init`, the gate of prefill and decode, and sessions from Python.
generates() {
    mkdir "$work/generates"
    cd "$work/generates"
    cp "$here/generates.py" .
    echo '{"seq": [8, 32], "context": [64, 128]}' > sizes.json
    precast init generates:load --device "$device" --sizes sizes.json
    precast build
    "$python" generates.py "$PRECAST_STORE"
}

# Calls from C on CUDA streams of the caller.
streams() {
    cp -r "$here/double" "$work"
    cd "$work/double"
    for_device precast.toml
    precast build
    cc -std=c99 -I "$here/c" -o "$work/streams" "$here/streams.c" "$here/c/libprecast.so" -ldl -Wl,-rpath,"$here/c"
    cudart=$(find "$(dirname "$LIBTORCH")" /usr/local/cuda*/lib64 -name 'libcudart.so.1*' 2> /dev/null | head -n 1)
    "$work/streams" "$LIBTORCH" "$PRECAST_STORE" "$cudart"
}

# The small GPT of examples/train, with checkpoints and a release of the trained weights.
train() {
    cp -r "$here/train" "$work"
    cd "$work/train"
    for_device train.toml
    precast build -f train.toml
    "$python" - <<'PY'
import torch
from safetensors.torch import save_file

text = torch.frombuffer(bytearray(open("model.py", "rb").read()), dtype=torch.uint8).long() % 128
rows = text[: len(text) // 65 * 65].view(-1, 65)
save_file({"ids": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}, "rows.safetensors")
PY
    precast train train --model gpt-train --data rows.safetensors --steps 60 --lr 0.003 --checkpoint kept --every 20 --publish \
        --device "$device" --format json
}

# Steps of a GPT of 12 layers of 1,024 beside eager and torch.compile.
step() {
    cp -r "$here/gpt" "$work"
    cd "$work/gpt"
    "$python" peer.py eager
    "$python" peer.py batch rows.safetensors
    for mode in default reduce-overhead; do # the second has a CUDA graph
        precast build -f precast.cuda.toml --set mode=$mode --store "$work/$mode"
        precast train train --data rows.safetensors --steps 220 --lr 0.0001 --store "$work/$mode" --format json \
            > "$out/step-$mode.json"
    done
    "$python" peer.py compile
}

# The GPT of `step` with 32 rows for each of two devices: by NCCL, with sums in memory, and one device with two batches of
# an update, which all have the same losses. Efficiency: steps in a second over those of one device with 32 rows.
devices() {
    if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]; then
        echo "skipped: fewer than two CUDA devices"
        return
    fi
    cp -r "$here/gpt" "$work/devices"
    cd "$work/devices"
    "$python" peer.py batch rows.safetensors
    sed -i 's/\[1, 128\]/[32, 128]/' precast.cuda.toml
    sed -i "s/1024, 12, 16/1024, ${LAYERS:-12}, 16/" model.py
    echo 'accumulate = true' >> precast.cuda.toml
    precast build -f precast.cuda.toml --set mode=reduce-overhead --store store
    run() {
        to=$1
        shift
        precast train train --data rows.safetensors --lr 0.0001 --store store --format json "$@" > "$out/devices-$to.json"
    }
    run one --steps 100
    run accumulated --steps 12 --accumulate 2
    run nccl --steps 100 --devices cuda:0,cuda:1
    run memory --steps 12 --devices cuda:0,cuda:1 --no-nccl
    "$python" - "$out" <<'PY'
import json
import pathlib
import sys

names = ("one", "accumulated", "nccl", "memory")
runs = {name: json.loads(pathlib.Path(sys.argv[1], f"devices-{name}.json").read_text()) for name in names}
assert runs["nccl"]["sums"] == "nccl" and runs["memory"]["sums"] == "memory", runs
losses = {name: runs[name]["losses"][:12] for name in names}
for name in ("memory", "accumulated"):
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["nccl"], losses[name], strict=True))
    print(f"losses of NCCL and of {name}: {apart:.1e} apart")
    assert apart < 2e-3, losses
steps = {name: runs[name]["artifact"]["steps_per_second"] for name in names}
print(json.dumps({"steps_per_second": steps, "efficiency": steps["nccl"] / steps["one"]}))
PY
}

# DDP and FSDP2 by NCCL in two processes, beside the same in eager.
parallel() {
    if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]; then
        echo "skipped: fewer than two CUDA devices"
        return
    fi
    "$python" "$here/parallel.py" "$work/parallel"
}

# A token of a Llama of 1.1 B, by batch and context, beside torch.compile: with kernels that start early, without, and for
# one row in one bucket of 4,096.
decode() {
    cp -r "$here/decode" "$work"
    cd "$work/decode"
    # spec NAME BATCH CHANGES: writes the spec of a batch size as model NAME.
    spec() {
        entry=load
        test "$2" = 1 || entry=load$2
        sed "s/name  = \"decode\"/name  = \"$1\"/;s/model:load/model:$entry/;s/\[1, 1\]/[$2, 1]/;s/shape = \[1, 4/shape = [$2, 4/;${3:-}" \
            precast.cuda.toml > "$1.toml"
    }
    plain='s/, "triton.enable_pdl" = true//'
    releases=
    for batch in ${BATCHES:-1 8 32}; do
        spec "early-$batch" "$batch"
        spec "plain-$batch" "$batch" "$plain"
        releases="$releases early-$batch plain-$batch"
        # The first process fills the caches of torch.compile.
        "$python" peer.py "$batch" > "cold-$batch" 2>&1 &
    done
    case "${BATCHES:-1}" in 1*)
        spec whole-1 1 "s/\[256, 1024, 4096\]/[4096]/"
        releases="$releases whole-1"
    esac
    for name in $releases; do
        precast build -f "$name.toml" --jobs 3 > "$name.log" 2>&1 &
    done
    wait
    for name in $releases; do tail -n 3 "$name.log"; done
    for name in $releases; do
        precast bench decode --model "$name" --seconds 1 --compiled --graphs always --format json > "$out/decode-$name.json"
        "$python" peer.py "${name##*-}" "$PRECAST_STORE" "$name"
    done
    for batch in ${BATCHES:-1 8 32}; do
        cat "cold-$batch"
        "$python" peer.py "$batch"
    done
}

# SmolLM2 fine-tuned on the text of the guide, by a process beside a chat that takes the new weights between two answers.
tune() {
    cp -r "$here/chat" "$work"
    chmod +x "$work/chat/chat"
    cd "$work/chat/examples/chat"
    sed -i 's/device = "cpu"/device = "cuda"/' precast.toml train.toml
    precast build -f train.toml > "$out/tune-build.log" 2>&1 &
    precast build
    wait $!
    "$python" -c 'from model import tokenizer; tokenizer().save_pretrained("words")'
    "$python" rows.py rows.safetensors
    ask='What does precast build do?'
    # The chat reads the questions: one before the training, and one when it has had time to take the weights.
    (echo "$ask" && precast train train --model smollm2-train --data rows.safetensors --steps 300 --lr 5e-5 \
        --schedule cosine --warmup 10 --publish smollm2 --format json > "$out/tune.json" && sleep 20 && echo "$ask") |
        "$work/chat/chat" --device cuda --store "$PRECAST_STORE" --tokenizer words/tokenizer.json --interactive --tokens 64
}

# Training steps of four models by batch, as pairs and as steps, beside eager and torch.compile.
table() {
    cp -r "$here/steps" "$work"
    cd "$work/steps"
    # shellcheck disable=SC2086
    "$python" table.py "$out/table.json" --jobs 6 ${TABLE:-}
}

for name in tests generates streams train step decode devices parallel table tune; do part $name; done
test -z "$failed" || { echo "FAILED:$failed" >&2; exit 1; }
