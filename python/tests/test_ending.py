"""The end of a process that still has models and sessions: it ends, with the code it was asked for.

The package's exit handler is registered by the first `load`. What runs after it: exit handlers that were registered
earlier, destructors of globals, and generators that are suspended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """\
import atexit, sys, threading, torch, precast
store, forms = {store!r}, {forms!r}
ids = torch.ones(2, 3, dtype=torch.int64)
one = torch.ones(4)
def load():
    return precast.load(store, "tiny")
class At:
    # Does something when the interpreter removes it.
    def __init__(self, work):
        self.work = work
    def __del__(self):
        self.work()
def said(name, work, print=print, Error=precast.Error):
    try:
        work()
        print(name + ": done")
    except (Error, ImportError) as error:
        print(name + ": refused:", error)
"""

# Each has names of its own: what `At` has is done when the interpreter removes them.
DESTRUCTORS = {
    "a call": "model = load()\nat = At(lambda: said(name, lambda: model.encode(ids, ids)))",
    "close": "model = load()\nat = At(lambda: said(name, model.close))",
    "stats": "model = load()\nat = At(lambda: said(name, model.stats))",
    "other weights": "model = load()\nat = At(lambda: said(name, lambda: model.swap('tiny@1')))",
    "a load": "model = load()\nat = At(lambda: said(name, load))",
    "a session's close": "session = load().session()\nat = At(lambda: said(name, session.close))",
    "a session's call": "session = load().session()\nat = At(lambda: said(name, lambda: session.run('count', one)))",
    "a session's state": "session = load().session()\nat = At(lambda: said(name, lambda: session.position))",
    "a session that is opened": "model = load()\nat = At(lambda: said(name, model.session))",
    "a generator in `with load()`": (
        "def answers():\n    with load() as model:\n        while True:\n            yield model.encode(ids, ids)\n"
        "going = answers()\nsaid(name, lambda: next(going))"
    ),
    "a generator in `with session()`": (
        "def answers():\n    with load() as model, model.session() as session:\n        while True:\n"
        "            yield session.run('count', one)\n"
        "going = answers()\nsaid(name, lambda: next(going))"
    ),
}
HOLD = """
kept = [{**globals(), "name": name} for name in forms]
for names in kept:
    exec(forms[names["name"]], names)
del names
"""

# Registered before the package's own, and so called after it. The threads have a model of their own.
HANDLERS = {
    "a handler that closes": "model.close()",
    "a handler that reads stats": "model.stats()",
    "a handler that calls": "model.encode(ids, ids)",
    "a handler that loads": "load()",
}
THREADS = {
    "a thread that calls": "while not stop.is_set(): other.encode(ids, ids)",
    "a thread that closes": "stop.wait(); third.close()",
}
REGISTER = """
stop, threads = threading.Event(), []
for name, code in forms.items():
    def work(code=code):
        exec(code, globals())
    if "thread" in name:
        threads.append(threading.Thread(target=said, args=(name, work), daemon=True))
    else:
        atexit.register(said, name, work)
atexit.register(lambda: (stop.set(), [thread.join() for thread in threads]))
model, other, third = load(), load(), load()
for thread in threads:
    thread.start()
"""

# 8 threads in calls while all of that happens. Their frames stay for ever: with the names of `__main__`, no destructor
# of these would run.
CALLS = """
names = {"others": load(), "ids": ids, "CallFailed": precast.CallFailed}
exec('''
def calls():
    while True:
        try:
            others.encode(ids, ids)
        except CallFailed:
            return
''', names)
for _ in range(8):
    threading.Thread(target=names["calls"], daemon=True).start()
"""


def ended(store: Path, forms: dict[str, str], code: str, exit_code: int) -> dict[str, str]:
    """Runs a process to its end; returns what each form said."""
    text = HEAD.format(store=str(store), forms=forms) + code
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr, done.stderr
    assert done.returncode == exit_code, done.stdout + done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if not line.startswith("  hint: "))
    assert said.keys() == forms.keys(), done.stdout + done.stderr
    assert all(one.startswith(("done", "refused")) for one in said.values()), done.stdout
    return said


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('the end')", 1)])
def test_a_process_ends_as_asked_whatever_its_destructors_do(store: Path, end: str, code: int) -> None:
    assert ended(store, DESTRUCTORS, f"{HOLD}{CALLS}\n{end}", code)["close"] == "done"


def test_a_process_ends_as_asked_whatever_earlier_exit_handlers_do(store: Path) -> None:
    said = ended(store, HANDLERS | THREADS, f"{REGISTER}{CALLS}\nsys.exit(3)", 3)
    assert "the process is ending" in said["a handler that calls"]
