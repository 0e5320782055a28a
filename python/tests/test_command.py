"""The command as a child process: how it is found, its documents and errors, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from precast.client import command
from precast.errors import BuildError, NotFound

Fake = Callable[[str], None]


def program(path: Path, text: str) -> Path:
    """Writes a Python program in the place of the command."""
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}", "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a Python program play the command."""
    return lambda text: monkeypatch.setenv("PRECAST_COMMAND", str(program(tmp_path / "precast", text)))


def test_the_command_is_found_by_variable_then_scripts_then_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: tmp_path / name for name in ("named", "scripts", "path")}
    for folder in folders.values():
        folder.mkdir()
        program(folder / "precast", "")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folders["scripts"]) if name == "scripts" else "")
    monkeypatch.setenv("PATH", str(folders["path"]))
    monkeypatch.setenv("PRECAST_COMMAND", str(folders["named"] / "precast"))
    assert command.find() == str(folders["named"] / "precast")
    monkeypatch.delenv("PRECAST_COMMAND")
    assert command.find() == str(folders["scripts"] / "precast")
    (folders["scripts"] / "precast").unlink()
    assert command.find() == str(folders["path"] / "precast")
    (folders["path"] / "precast").unlink()
    with pytest.raises(NotFound, match="the command `precast` is missing"):
        command.find()
    monkeypatch.setenv("PRECAST_COMMAND", "/nowhere/precast")
    with pytest.raises(NotFound, match="`/nowhere/precast`, which is no program"):
        command.find()


def test_the_workers_get_the_python_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRECAST_PYTHON", raising=False)
    assert sys.executable in command.run("--version", "-v")["python"]
    monkeypatch.setenv("PRECAST_PYTHON", "/nowhere/python")
    assert "/nowhere/python" in command.run("--version", "-v")["python"]


def test_an_error_of_the_real_command_is_raised_with_its_mistakes_its_hint_and_code(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot read the spec") as raised:
        command.run("plan", f"--file={tmp_path}/precast.toml", f"--store={tmp_path}/store")
    assert "No such file" in str(raised.value) and "name a spec with `-f`" in raised.value.hint
    assert (raised.value.code, raised.value.document["code"]) == ("2", 2)
    text = 'schema = 1\n[model]\nname = "x"\nentri = "m:f"\n[[module]]\nname = "y"\nregion = []\n'
    (tmp_path / "precast.toml").write_text(text)
    with pytest.raises(BuildError) as raised:
        command.run("plan", f"--file={tmp_path}/precast.toml", f"--store={tmp_path}/store")
    message = str(raised.value)
    assert "precast.toml:4:1: unknown key `entri` in [model]" in message
    assert "precast.toml:7:1: unknown key `region`" in message
    assert len(raised.value.document["mistakes"]) >= 2
    with pytest.raises(BuildError, match="--nothing"):
        command.run("ls", "--nothing")


def test_each_document_of_a_stream_is_an_event(fake: Fake) -> None:
    fake("""for number in range(3): print('{"schema": 1, "event": %d}' % number)""")
    seen: list[int] = []
    last = command.run("build", on_event=lambda event: seen.append(event["event"]))
    assert (seen, last["event"]) == ([0, 1, 2], 2)


def test_a_warning_is_warned_of_and_a_note_is_logged(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake("""
        import sys
        print('{"schema":1,"warning":"something is odd","hint":"look at it"}', file=sys.stderr)
        print('{"schema":1,"note":"something is so"}', file=sys.stderr)
        print('text of a library', file=sys.stderr)
        print('{"schema":1}')
    """)
    caplog.set_level("INFO", "precast")
    with pytest.warns(UserWarning, match="something is odd; look at it") as caught:
        assert command.run("ls") == {"schema": 1}
    assert caught[0].filename != command.__file__
    assert caplog.messages == ["something is so", "text of a library"]


def test_much_text_on_both_streams_does_not_stop_it(fake: Fake) -> None:
    fake("""
        import sys
        sys.stderr.write(("y" * 99 + "\\n") * 20_000)
        print('{"schema":1,"long":"' + "z" * 2_000_000 + '"}')
    """)
    assert len(command.run("ls")["long"]) == 2_000_000


def test_a_defect_is_a_document_and_no_error(fake: Fake) -> None:
    fake('import sys; print(\'{"schema":1,"failed":true}\'); sys.exit(1)')
    assert command.run("check") == {"schema": 1, "failed": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "`precast ls` was ended by SIGKILL"),
        ("import sys; sys.exit('no JSON at all')", "`precast ls` ended with 1\nno JSON at all"),
        ("", "`precast ls` ended with 0"),
    ],
)
def test_an_end_without_a_document_is_an_error(text: str, message: str, fake: Fake) -> None:
    fake(text)
    with pytest.raises(BuildError) as raised:
        command.run("ls")
    assert message in str(raised.value)


def test_an_error_of_the_caller_ends_the_command(fake: Fake) -> None:
    fake("""import time; print('{"schema":1}', flush=True); time.sleep(60)""")
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        command.run("build", on_event=lambda event: 1 // 0)
    assert time.monotonic() - begun < 30


CALLER = """
    import sys
    import signal
    from precast.client import command
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command.run("build", on_event=lambda event: print("event", flush=True))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""

# Counts its signals in a file. Ends at the second one, or half a second after the first one if it is `quick`.
COUNTS_SIGNALS = """
    import os, signal, sys, time
    def note(number, frame):
        seen.append(time.monotonic())
        open(sys.argv[0] + ".signals", "w").write(str(len(seen)))
    seen = []
    signal.signal(signal.SIGINT, note)
    print('{"schema":1}', flush=True)
    while len(seen) < 2 and not (seen and QUICK and time.monotonic() > seen[0] + 0.5):
        time.sleep(0.01)
    sys.exit(130)
"""


@pytest.mark.parametrize(("presses", "quick"), [(1, True), (2, False)])
def test_each_ctrl_c_reaches_the_command_once(presses: int, quick: bool, tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the process group of the caller."""
    path = program(tmp_path / "precast", COUNTS_SIGNALS.replace("QUICK", str(quick)))
    environment = {**os.environ, "PRECAST_COMMAND": str(path)}
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CALLER)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "event\n"
    for _ in range(presses):
        os.killpg(caller.pid, signal.SIGINT)
        time.sleep(0.3)
    output, _ = caller.communicate(timeout=30)
    assert output == "interrupted\n"
    assert (tmp_path / "precast.signals").read_text() == str(presses)


def test_a_killed_caller_ends_its_build(tmp_path: Path) -> None:
    spec = Path(__file__).parent / "model" / "precast.toml"
    text = f"""
        from precast.client import command
        arguments = ["--file={spec}", "--store={tmp_path / "artifacts"}"]
        command.run("build", *arguments, on_event=lambda event: print("event", flush=True))
    """
    caller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "event\n"
    (child,) = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
    assert b"build" in Path(f"/proc/{child}/cmdline").read_bytes()
    caller.kill()
    caller.wait()
    end = time.monotonic() + 30
    while _runs(child):
        assert time.monotonic() < end, "the build outlived its caller"
        time.sleep(0.1)


def _runs(process: str) -> bool:
    """Returns whether a process runs: it is there, and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False
