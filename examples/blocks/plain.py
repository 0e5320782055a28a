"""The build without Precast: a new process for each bucket exports the model and compiles it whole.

    python plain.py ENTRY BATCH SEQ OUT.pt2 [--device cuda] [--dtype bfloat16] [--width 1024]

Prints one JSON document with the seconds it took from its own start. The benchmark runs one such process per bucket.
"""

import argparse
import json
import sys
import time
from pathlib import Path

START = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entry")
    parser.add_argument("batch", type=int)
    parser.add_argument("seq", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()

    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    import model

    module = getattr(model, args.entry)().to(args.device)
    x = torch.randn(args.batch, args.seq, args.width, dtype=getattr(torch, args.dtype), device=args.device)
    with torch.no_grad():
        exported = torch.export.export(module, (x,))
        torch._inductor.aoti_compile_and_package(exported, package_path=str(args.out.resolve()))
    print(json.dumps({"seconds": time.perf_counter() - START, "bytes": args.out.stat().st_size}))


if __name__ == "__main__":
    main()
