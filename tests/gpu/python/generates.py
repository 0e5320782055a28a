"""A Llama with random weights in bfloat16, for `precast init`; its sessions from Python beside eager.

python generates.py STORE     a store with its release; what it prints ends with `ok`
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [1, 17, 250, 33, 8, 999, 4]
GREEDY = {"temperature": 0.0, "top_k": 1, "top_p": 1.0, "random": 0.0}


def load() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return model.to(DEVICE, torch.bfloat16).eval()


def on_all_devices(store: str, expected: list[int]) -> None:
    """Runs four sessions at once on all devices, in threads, and compares their tokens with those of one device."""
    import precast

    count = torch.cuda.device_count()
    devices = [f"cuda:{ordinal}" for ordinal in range(count)] if count else ["cpu", "cpu"]
    served = precast.load(store, "generates", device=devices)
    sessions = [served.session() for _ in range(4)]

    def answer(session: precast.Session) -> list[int]:
        out, tokens = session.prefill(PROMPT, **GREEDY), list(PROMPT)
        for _ in range(24):
            tokens.append(int(out["token"]))
            out = session.decode(tokens[-1], **GREEDY)
        return tokens

    with ThreadPoolExecutor(len(sessions)) as threads:
        for tokens in threads.map(answer, sessions):
            assert tokens == expected, (tokens, expected)
    answered = [device["answered"] for device in served.stats()["devices"]]
    assert len({*answered}) == 1, answered
    print(f"four sessions at once on {', '.join(devices)}: ok")


def main(store: str) -> None:
    import precast

    eager, served = load(), precast.load(store, "generates", device=DEVICE)
    answers: list[list[int]] = []
    for _ in range(2):  # the second session takes over the tensors of the first
        session, tokens = served.session(), list(PROMPT)
        out = session.prefill(PROMPT, **GREEDY)
        for _ in range(24):
            with torch.no_grad():
                expected = eager(torch.tensor([tokens], device=DEVICE)).logits[0, -1]
            logits = torch.from_dlpack(out["logits"]).flatten()
            torch.testing.assert_close(logits, expected.to(logits), rtol=5e-2, atol=5e-2)
            tokens.append(int(out["token"]))
            out = session.decode(tokens[-1], **GREEDY)
        answers.append(tokens)
    assert answers[0] == answers[1], answers
    print(f"a prompt and 24 steps in two sessions on {DEVICE}: ok")
    on_all_devices(store, answers[0])


if __name__ == "__main__":
    main(sys.argv[1])
