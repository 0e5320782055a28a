"""The end of a process that still has models and sessions: it ends, with the code it was asked for.

The package's exit handler is registered by the first `load`. What runs after it: exit handlers that were registered
earlier, destructors of globals, and generators that are suspended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Names in all of them: `precast`, `store`, `ids`, and `load()`.
HEAD = """\
import atexit, sys, threading, torch, precast
store = {store!r}
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
def said(work, print=print, Error=precast.Error):
    try:
        work()
        print("done")
    except (Error, ImportError) as error:
        print("refused:", error)
"""

FORMS = {
    "a call in a destructor": "model = load()\nat = At(lambda: said(lambda: model.encode(ids, ids)))",
    "close in a destructor": "model = load()\nat = At(lambda: said(model.close))",
    "stats in a destructor": "model = load()\nat = At(lambda: said(model.stats))",
    "other weights in a destructor": "model = load()\nat = At(lambda: said(lambda: model.swap('tiny@1')))",
    "a load in a destructor": "model = load()\nat = At(lambda: said(load))",
    "a session's close in a destructor": "session = load().session()\nat = At(lambda: said(session.close))",
    "a session's call in a destructor": (
        "session = load().session()\nat = At(lambda: said(lambda: session.run('count', one)))"
    ),
    "a session's state in a destructor": "session = load().session()\nat = At(lambda: said(lambda: session.position))",
    "a session opened in a destructor": "model = load()\nat = At(lambda: said(model.session))",
    "a generator in `with load()`": (
        "def answers():\n    with load() as model:\n        while True:\n            yield model.encode(ids, ids)\n"
        "going = answers()\nnext(going)\nprint('done')"
    ),
    "a generator in `with session()`": (
        "def answers():\n    with load() as model, model.session() as session:\n        while True:\n"
        "            yield session.run('count', one)\n"
        "going = answers()\nnext(going)\nprint('done')"
    ),
    "an earlier exit handler that calls": (
        "atexit.register(lambda: said(lambda: model.encode(ids, ids)))\nmodel = load()"
    ),
    "an earlier exit handler that closes": "atexit.register(lambda: said(model.close))\nmodel = load()",
    "an earlier exit handler that reads stats": "atexit.register(lambda: said(model.stats))\nmodel = load()",
    "an earlier exit handler that waits for a thread": (
        "stop = threading.Event()\n"
        "def work():\n"
        "    while not stop.is_set():\n"
        "        try:\n            model.encode(ids, ids)\n"
        "        except precast.Error as error:\n            print('refused:', error)\n            return\n"
        "thread = threading.Thread(target=work, daemon=True)\n"
        "atexit.register(lambda: (stop.set(), thread.join()))\n"
        "model = load()\nthread.start()"
    ),
    "an earlier exit handler that waits for a thread's close": (
        "go = threading.Event()\n"
        "def work():\n    go.wait()\n    said(model.close)\n"
        "thread = threading.Thread(target=work, daemon=True)\n"
        "atexit.register(lambda: (go.set(), thread.join()))\n"
        "model = load()\nthread.start()"
    ),
    "an earlier exit handler that loads first": "atexit.register(lambda: said(load))",
}

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

ENDS = {"": 0, "sys.exit(3)": 3, "raise ValueError('the end')": 1}


def ends(store: Path, code: str) -> subprocess.CompletedProcess[str]:
    head = HEAD.format(store=str(store))
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=60)
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("form", FORMS)
def test_a_process_ends_as_asked_whatever_uses_a_model_after_the_exit_handler(store: Path, form: str) -> None:
    done = ends(store, FORMS[form] + "\n" + CALLS + "\nsys.exit(3)")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith(("done", "refused")), done.stdout + done.stderr


@pytest.mark.parametrize("end", ENDS)
def test_the_exit_code_is_that_of_the_program(store: Path, end: str) -> None:
    done = ends(store, FORMS["close in a destructor"] + "\n" + end)
    assert done.returncode == ENDS[end], done.stderr
    assert "done" in done.stdout


def test_the_thread_that_ends_the_process_closes_and_is_refused_calls(store: Path) -> None:
    done = ends(store, FORMS["close in a destructor"])
    assert done.stdout == "done\n", done.stderr
    done = ends(store, FORMS["an earlier exit handler that calls"])
    assert "refused: " in done.stdout and "the process is ending" in done.stdout, done.stdout
