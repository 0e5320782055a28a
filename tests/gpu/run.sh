#!/bin/sh
# Builds and runs the example on a GPU machine, from what pack.sh packed, and leaves what it printed as JSON.
#
#   run.sh OUTPUT_FOLDER          beside precast-gpu.tar.gz, or in the folder it was unpacked to
#
# The machine needs a GPU, a C++ compiler and a `python3` (or $PYTHON) with torch, transformers, tokenizers and
# safetensors in the versions of requirements.txt; no Rust and no network.
#
#   DEVICE=cpu         the same on the CPU
#   PARTS="a b c"      which parts to run, of: minilm tests bench export blocks (all but blocks unless set)
#   TESTS="values::"   which tests to run, as libtest filters names (all unless set)
#
# It leaves OUTPUT_FOLDER/summary.json with everything that was printed as data, tests.txt and run.log. Exit code 0: every
# part passed, and what was compared with eager agreed.
set -eu
out=${1:?usage: run.sh OUTPUT_FOLDER}
mkdir -p "$out"
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
parts=" ${PARTS:-minilm tests bench export} "
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -e "$here/precast-gpu.tar.gz" ]; then
    "$python" -m tarfile -e "$here/precast-gpu.tar.gz" "$work/pack"
    here=$work/pack
fi
chmod +x "$here"/bin/*
PATH=$here/bin:$PATH
LIBTORCH=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
# For the tests, which link it through tch.
LD_LIBRARY_PATH=$LIBTORCH/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
PRECAST_STORE=$work/store
PRECAST_PYTHON=$(command -v "$python")
# The graph passes are a package that is not installed there.
PYTHONPATH=$here/kernels${PYTHONPATH:+:$PYTHONPATH}
export PATH LIBTORCH LD_LIBRARY_PATH PRECAST_STORE PRECAST_PYTHON PYTHONPATH

failed=
# step NAME COMMAND…: runs it with its data in NAME.json and its messages in NAME.log; a failure is kept for the end.
step() {
    name=$1
    shift
    echo "== $name: $*"
    start=$(date +%s)
    if "$@" > "$out/$name.json" 2> "$work/$name.log"; then
        echo "   done in $(($(date +%s) - start)) s"
    else
        echo "   FAILED with exit code $?; the end of its messages:"
        tail -n 40 "$work/$name.log"
        failed="$failed $name"
    fi
    tail -c 65536 "$work/$name.log" >> "$out/run.log"
}

: > "$out/run.log"
spec=$here/minilm/precast.cuda.toml
entry=load_half
rtol=2e-2
atol=2e-2
if [ "$device" = cpu ]; then
    spec=$here/minilm/precast.toml
    entry=load
    rtol=1e-4
    atol=1e-5
fi

step machine "$python" - "$device" <<'PY'
import json, os, platform, sys
import torch

gpu = torch.cuda.get_device_name() if sys.argv[1] == "cuda" else None
print(json.dumps({"schema": 1, "device": sys.argv[1], "gpu": gpu, "torch": torch.__version__,
                  "python": platform.python_version(), "cores": os.cpu_count()}))
PY
# has PART: whether to run it.
has() { case "$parts" in *" $1 "*) true ;; *) false ;; esac; }

passes="passes=['precast_kernels:fuse']"
step build precast build -f "$spec" --set "$passes" --format json
step build-again precast build -f "$spec" --set "$passes" --format json
step ls precast ls --format json

if has minilm; then
    # The search example, against eager's embeddings on the same device.
    step eager "$python" "$here/minilm/eager.py" --sentences "$here/minilm/sentences.txt" \
        --entry "$entry" --device "$device" --out "$work/eager.safetensors"
    step minilm minilm --store "$PRECAST_STORE" --device "$device" --sentences "$here/minilm/sentences.txt" --model "$here/minilm/weights" \
        --eager "$work/eager.safetensors" --format json

    # `precast run` on saved inputs, at an exact bucket and at two padded ones.
    cases="batch=8,seq=128 batch=1,seq=20 batch=5,seq=77"
    step numerics "$python" "$here/numerics.py" --spec "$spec" --module encode --out "$work/cases" $cases
    for case in $cases; do
        step "run-$case" precast run encode --inputs "$work/cases/$case.inputs.safetensors" \
            --outputs "$work/cases/$case.got.safetensors" --format json
        step "compare-$case" "$python" "$here/compare.py" "$work/cases/$case.got.safetensors" \
            "$work/cases/$case.eager.safetensors" --rtol "$rtol" --atol "$atol"
    done
fi

if has tests; then
    # The tests that need a device find the store in PRECAST_STORE. Figures that they print are JSON lines.
    for name in blocks/eight blocks/eager residual/precast residual/eager values/precast values/eager decoder/decoder; do
        test "$device" = cpu || step "$(echo "$name" | tr / -)-build" precast build -f "$here/$name.toml" --format json
    done
    # shellcheck disable=SC2086
    step tests gpu-tests ${TESTS:-} --nocapture --test-threads 1
    # The first figure of a test stands behind its name.
    sed -i 's/^\(test [^{]*\)\({"figure"\)/\1\n\2/' "$out/tests.json"
    grep -v '^{' "$out/tests.json" > "$out/tests.txt" || true
    grep '^{' "$out/tests.json" > "$work/figures" || true
    mv "$work/figures" "$out/tests.json"
    cat "$out/tests.txt"
    if [ "$device" = cuda ] && grep 'skipped:' "$work/tests.log"; then
        failed="$failed skipped-tests"
    fi
fi

if has bench; then
    step bench precast bench encode --model minilm --format json
    if [ "$device" = cuda ]; then
        step bench-graphs precast bench encode --model minilm --graphs always --format json
    fi
fi

if has export; then
    # A folder with the program, the store and the libraries runs with nothing else of this environment.
    step deps precast deps minilm --format json
    step export precast export "$work/exported" minilm --format json
    test -e "$work/cases/batch=5,seq=77.inputs.safetensors" ||
        step export-inputs "$python" "$here/numerics.py" --spec "$spec" --module encode --out "$work/cases" batch=5,seq=77
    step export-run env -i "$work/exported/bin/precast" run encode --store "$work/exported/store" --libtorch "$work/exported/torch" \
        --inputs "$work/cases/batch=5,seq=77.inputs.safetensors" --outputs "$work/cases/exported.safetensors" --format json
    step export-compare "$python" "$here/compare.py" "$work/cases/exported.safetensors" \
        "$work/cases/batch=5,seq=77.eager.safetensors" --rtol "$rtol" --atol "$atol"
    rm -rf "$work/exported"
fi

if has blocks; then
    blocks=$here/blocks/precast.toml
    test "$device" = cpu || blocks=$here/blocks/precast.cuda.toml
    step blocks-build precast build -f "$blocks" --format json
    step blocks-bench precast bench forward --model blocks --format json
fi

# One JSON document of all of them.
"$python" - "$out" "$failed" <<'PY'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
parts = {}
for path in sorted(out.glob("*.json")):
    if path.name == "summary.json":
        continue
    text = path.read_text()
    path.unlink()
    if not text:
        continue
    try:
        parts[path.stem] = json.loads(text)
    except ValueError:  # JSON lines
        parts[path.stem] = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
(out / "summary.json").write_text(json.dumps({"schema": 1, "failed": sys.argv[2].split(), **parts}, indent=1) + "\n")
PY
echo "wrote $out/summary.json"
test -z "$failed" || { echo "FAILED:$failed" >&2; exit 1; }
