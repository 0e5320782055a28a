"""Writes what `generate` of transformers answers to ten questions, and its tokens a second.

eager.py FOLDER    writes FOLDER/eager.json, and the tokenizer's files beside it
"""

import json
import sys
import time
from pathlib import Path

import torch
from model import load, tokenizer

QUESTIONS = [
    "Name three uses of a paper clip.",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain what a hash function is.",
    "How many legs has a spider?",
    "Translate good morning into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What is seven times eight?",
    "Tell me a joke about computers.",
]
TOKENS = 48
# The likeliest token each time, from a static cache.
OPTIONS = {"do_sample": False, "cache_implementation": "static", "disable_compile": True}


def generated(model: torch.nn.Module, ids: torch.Tensor, count: int) -> tuple[list[int], float]:
    """Returns the tokens that follow a prompt, and the seconds that they took."""
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=count, **OPTIONS)
    return out[0, ids.shape[1] :].tolist(), time.perf_counter() - started


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    words, model = tokenizer(), load()
    words.save_pretrained(folder)
    answers, tokens, seconds = [], 0, 0.0
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        ids = words.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        # The first token is the prompt's: the time of the others is that of single steps.
        _, first = generated(model, ids, 1)
        own, whole = generated(model, ids, TOKENS)
        answers.append({"question": question, "tokens": own})
        tokens += len(own) - 1
        seconds += whole - first
    rate = tokens / seconds
    (folder / "eager.json").write_text(json.dumps({"answers": answers, "rate": rate, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
