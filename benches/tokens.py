"""Tokens a second of SmolLM2-135M-Instruct on the CPU, with the likeliest token each time: Precast and its peers.

    python -m benches.tokens --store STORE --chat target/release/chat --folder FOLDER [--genai PYTHON] --out tokens.json

`make chat` makes the store, the program and the folder (`target/chat`). Each way answers the same ten questions in a
process of its own; the ways take turns. A rate leaves the prompt out. `read` is the floor: a plain read of the weights.
`--genai` is a Python with onnxruntime-genai and FOLDER/onnx, the model that its builder makes of `save_pretrained`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import machine

CHAT = Path(__file__).parents[1] / "examples" / "chat"
TOKENS = 48


def of_eager() -> float:
    """Returns the rate of `generate` with a static cache."""
    import eager
    from model import load

    model = load()
    seconds, tokens = 0.0, 0
    for ids in prompts():
        _, first = eager.generated(model, ids, 1)
        own, whole = eager.generated(model, ids, TOKENS)
        seconds, tokens = seconds + whole - first, tokens + len(own) - 1
    return tokens / seconds


def of_compile() -> float:
    """Returns the rate of steps with a compiled `forward` and a static cache of 512, as Precast has.

    `generate` makes a cache of another size for each prompt, for which it compiles again.
    """
    import torch
    from model import load
    from transformers import StaticCache

    model = load()
    step = torch.compile(model.forward)
    seconds, tokens = 0.0, 0
    with torch.inference_mode():
        for number, ids in enumerate([*prompts()[:1], *prompts()]):
            cache = StaticCache(config=model.config, max_cache_len=512)
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            # The first answer compiles.
            for at in range(TOKENS - 1):
                started = time.perf_counter()
                token = logits[:, -1:].argmax(-1)
                place = torch.tensor([[ids.shape[1] + at]])
                logits = step(input_ids=token, position_ids=place, past_key_values=cache, use_cache=True).logits
                if number:
                    seconds, tokens = seconds + time.perf_counter() - started, tokens + 1
    return tokens / seconds


def of_read() -> float:
    """Returns the floor: how often a second the threads read as many bytes as the weights have, and do nothing else."""
    import torch
    from model import load

    # A matrix that two names share is counted once, as a step reads it.
    values = torch.ones(sum(value.numel() for value in load().parameters()))
    seconds = []
    for _ in range(21):
        started = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - started)
    return 1 / statistics.median(seconds[1:])


def prompts() -> list[Any]:
    """Returns the tokens of the questions."""
    import eager
    from model import tokenizer

    words, options = tokenizer(), {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": False}
    asked = [[{"role": "user", "content": question}] for question in eager.QUESTIONS]
    return [words.apply_chat_template(one, **options) for one in asked]


def of_genai(folder: Path) -> float:
    """Returns the rate of ONNX Runtime GenAI, which counts tokens after the first."""
    import onnxruntime_genai as genai

    model = genai.Model(str(folder / "onnx"))
    words = genai.Tokenizer(model)
    seconds, tokens = 0.0, 0
    for answer in json.loads((folder / "eager.json").read_text())["answers"]:
        message = json.dumps([{"role": "user", "content": answer["question"]}])
        ids = words.encode(words.apply_chat_template(message, add_generation_prompt=True))
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + TOKENS, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        started = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
            tokens += 1
        seconds += time.perf_counter() - started
    return tokens / seconds


def of_precast(args: argparse.Namespace) -> float:
    """Returns the rate that `chat` prints; fails where its tokens are not those of `generate`."""
    command = [args.chat, "--store", args.store, "--eager", args.folder / "eager.json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"([\d.]+) tokens a second", printed.stdout + printed.stderr)
    assert found is not None, printed.stdout + printed.stderr
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--chat", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--genai", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=["eager", "compile", "genai", "read"])
    args = parser.parse_args()
    if args.way is not None:
        sys.path.insert(0, str(CHAT))
        ways = {"eager": of_eager, "compile": of_compile, "genai": lambda: of_genai(args.folder), "read": of_read}
        print(ways[args.way]())
        return
    ways = ["precast", "eager", "compile", *(["genai"] if args.genai else []), "read"]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            if way == "precast":
                rates[way].append(of_precast(args))
                continue
            python = args.genai if way == "genai" else sys.executable
            command = [python, "-m", "benches.tokens", "--folder", args.folder, "--way", way]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ})
            rates[way].append(float(printed.stdout.split()[-1]))
            print(way, rates[way], flush=True)
    medians = {way: statistics.median(found) for way, found in rates.items()}
    document = {
        "schema": 1,
        "date": time.strftime("%Y-%m-%d"),
        "what": "Tokens a second of SmolLM2-135M-Instruct in float32 after the prompt, the likeliest token each time",
        "machine": machine.describe(args.chat.parent),
        "command": " ".join(sys.argv),
        "tokens_a_second": medians,
        "precast_over": {way: round(medians["precast"] / other, 2) for way, other in medians.items()},
        "rounds": rates,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"tokens_a_second": medians, "precast_over": document["precast_over"]}))


if __name__ == "__main__":
    main()
