"""The commands as functions: each runs the command `precast` and returns its document as an object.

`store` is the folder of the store: else `PRECAST_STORE`, else `artifacts` in the current folder. `python` is the
interpreter with torch: else `PRECAST_PYTHON`, else that of this process. Errors are `precast.BuildError`, and
`precast.NotFound` for a name or an ID that the store lacks. The names of parameters are those of the command's options,
which "Every command" in the documentation explains.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import BuildError
from ..spec import Spec, literal
from . import command, objects
from .objects import Document
from .progress import Progress
from .progress import progress as progress_of

PathLike = str | os.PathLike[str]


def build_spec(
    spec: PathLike | Spec = "precast.toml",
    *,
    store: PathLike | None = None,
    only: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tune: bool = False,
    release: str | None = None,
    without: Sequence[str] = (),
    allow_lost: bool = False,
    locked: bool = False,
    remote: str | None = None,
    push: bool = False,
    on: str | None = None,
    ray_resource: Sequence[str] = (),
    jobs: int | None = None,
    memory: str | None = None,
    timeout: float | None = None,
    trace: PathLike | None = None,
    python: PathLike | None = None,
    untried_torch: bool = False,
    shared: bool = False,
    progress: bool | Progress = True,
) -> objects.BuildResult:
    """Builds the programs of a spec that the store lacks, and publishes a release.

    `remote` is a place to look for programs and artifacts before they are made; `push` also sends there what was made.
    `on` is `"ray"`, or `"ray://HOST:10001"`, for builders on a Ray cluster that share the build through the remote.
    `settings` decides keys of `[compile]` for this build, as `{"mode": "max-autotune", "encode.dynamic": True}`.
    `progress` shows the build: a bar on a terminal and in a notebook, else lines on standard error. A build that ends
    with an error after its plan raises a `BuildError` with the `BuildResult` as its attribute `result`, else None. Its
    attribute `failures` names the programs that failed.
    """
    result: objects.BuildResult | None = None
    failures: list[str] = []
    shown = progress if not isinstance(progress, bool) else progress_of() if progress else None

    def on_event(event: command.Json) -> None:
        nonlocal result
        if event["event"] == "finished":
            result = objects.BuildResult(event)
            return
        if event["event"] == "failed":
            failures.append(f"{event['module']} {event['bucket']}: {event['message']}")
        if shown is not None:
            shown.event(event)

    options = _options(
        store=store,
        only=only,
        set=_settings(settings),
        tune=tune,
        release=release,
        without=without,
        allow_lost=allow_lost,
        locked=locked,
        remote=remote,
        push=push,
        on=on,
        ray_resource=ray_resource,
        jobs=jobs,
        memory=memory,
        timeout=timeout,
        trace=trace,
        python=python,
        untried_torch=untried_torch,
        shared=shared,
    )
    try:
        with _file(spec) as file:
            return objects.BuildResult(command.run("build", *options, *file, on_event=on_event))
    except BuildError as error:
        error.result, error.failures = result, failures
        raise
    finally:
        if shown is not None:
            shown.close()


def plan(
    spec: PathLike | Spec = "precast.toml",
    *,
    store: PathLike | None = None,
    only: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tune: bool = False,
    python: PathLike | None = None,
    untried_torch: bool = False,
    shared: bool = False,
) -> objects.Plan:
    """Returns the programs that `build` would make, with the reasons."""
    options = _options(
        store=store,
        only=only,
        set=_settings(settings),
        tune=tune,
        python=python,
        untried_torch=untried_torch,
        shared=shared,
    )
    with _file(spec) as file:
        return objects.Plan(command.run("plan", *options, *file))


def check(
    spec: PathLike | Spec = "precast.toml",
    *,
    all: bool = False,
    recompiles: bool = False,
    cost: bool = False,
    sizes: PathLike | None = None,
    fail_on: str | None = None,
    store: PathLike | None = None,
    python: PathLike | None = None,
    untried_torch: bool = False,
    shared: bool = False,
) -> objects.CheckResult:
    """Returns code that will break in a build, with the reason and a fix. Compiles nothing, and needs no store.

    `failed` of the result tells whether there is a finding of severity `fail_on`, which is `"high"` if left out.
    """
    options = _options(
        all=all,
        recompiles=recompiles,
        cost=cost,
        sizes=sizes,
        fail_on=fail_on,
        store=store,
        python=python,
        untried_torch=untried_torch,
        shared=shared,
    )
    with _file(spec) as file:
        return objects.CheckResult(command.run("check", *options, *file))


def init(
    entry: str,
    *,
    sample: str | None = None,
    input: Sequence[str] = (),
    sizes: PathLike | None = None,
    device: str | None = None,
    file: PathLike | None = None,
    force: bool = False,
    python: PathLike | None = None,
    untried_torch: bool = False,
) -> objects.NewSpec:
    """Writes a spec for the model that `entry` returns, `"module:callable"` beside the spec, and returns its text."""
    options = _options(
        sample=sample,
        input=input,
        sizes=sizes,
        device=device,
        file=file,
        force=force,
        python=python,
        untried_torch=untried_torch,
    )
    return objects.NewSpec(command.run("init", *options, "--", entry))


def doctor(
    *,
    store: PathLike | None = None,
    python: PathLike | None = None,
    libtorch: PathLike | None = None,
    untried_torch: bool = False,
    untried_libtorch: bool = False,
    shared: bool = False,
) -> objects.Diagnosis:
    """Returns the checks of this machine: whether it can build and run, with hints for missing parts."""
    options = _options(
        store=store,
        python=python,
        libtorch=libtorch,
        untried_torch=untried_torch,
        untried_libtorch=untried_libtorch,
        shared=shared,
    )
    return objects.Diagnosis(command.run("doctor", *options))


def ls(
    glob: str | None = None,
    *,
    model: str | None = None,
    bucket: str | None = None,
    device: str | None = None,
    state: str | None = None,
    older: str | None = None,
    newer: str | None = None,
    sort: str | None = None,
    artifacts: bool = False,
    objects: bool = False,
    store: PathLike | None = None,
    shared: bool = False,
) -> Document:
    """Returns the programs of a store as the table `programs`, or its `artifacts` or `objects`."""
    options = _options(
        model=model,
        bucket=bucket,
        device=device,
        state=state,
        older=older,
        newer=newer,
        sort=sort,
        artifacts=artifacts,
        objects=objects,
        store=store,
        shared=shared,
    )
    return Document(command.run("ls", *options, *_after(glob)))


def show(*ids: str, store: PathLike | None = None, shared: bool = False) -> Document:
    """Returns programs or artifacts whole: steps, receipt, and whether this host can run them."""
    return Document(command.run("show", *_options(store=store, shared=shared), *_after(*ids)))


def log(*ids: str, store: PathLike | None = None, shared: bool = False) -> Document:
    """Returns the compile logs of artifacts, programs or failures."""
    return Document(command.run("log", *_options(store=store, shared=shared), *_after(*ids)))


def why(
    *ids: str,
    model: str | None = None,
    spec: PathLike | None = None,
    store: PathLike | None = None,
    shared: bool = False,
) -> objects.Why:
    """Returns why programs or artifacts were built, and their predecessors.

    With a `spec`, also the changed files beside it that had no effect.
    """
    options = _options(model=model, file=spec, store=store, shared=shared)
    return objects.Why(command.run("why", *options, *_after(*ids)))


def diff(a: str, b: str, *, store: PathLike | None = None, shared: bool = False) -> Document:
    """Returns the differences between two programs, artifacts, releases or stores."""
    return Document(command.run("diff", *_options(store=store, shared=shared), *_after(a, b)))


def du(by: str | None = None, *, store: PathLike | None = None, shared: bool = False) -> objects.DiskUsage:
    """Returns the disk space of a store `by` `"model"`, `"module"` or `"release"`, and the part that can be freed."""
    return objects.DiskUsage(command.run("du", *_options(by=by, store=store, shared=shared)))


def verify(
    *,
    repair: bool = False,
    reindex: bool = False,
    host: Sequence[str] | bool = False,
    store: PathLike | None = None,
    python: PathLike | None = None,
    libtorch: PathLike | None = None,
    untried_torch: bool = False,
    untried_libtorch: bool = False,
    shared: bool = False,
) -> Document:
    """Reads every byte of a store and returns its defects.

    `host` runs the gates of the newest releases under the torch of this host: of all models, or of the named ones.
    """
    options = _options(
        repair=repair,
        reindex=reindex,
        host=bool(host),
        store=store,
        python=python,
        libtorch=libtorch,
        untried_torch=untried_torch,
        untried_libtorch=untried_libtorch,
        shared=shared,
    )
    models = () if isinstance(host, bool) else host
    return Document(command.run("verify", *options, *_after(*models)))


def report(
    output: PathLike | None = None,
    *,
    model: str | None = None,
    release: int | None = None,
    counts: Sequence[PathLike] = (),
    check: Sequence[PathLike] = (),
    training: Sequence[PathLike] = (),
    store: PathLike | None = None,
    shared: bool = False,
) -> objects.Report:
    """Returns the content, the costs and the use of a store. With `output`, writes a page with them to that file."""
    given = {"counts": counts, "check": check, "training": training}
    options = _options(model=model, release=release, **given, store=store, shared=shared)
    if output is not None:
        command.write("report", *options, *_options(output=output))
    return objects.Report(command.run("report", *options))


def inspect(file: PathLike) -> Document:
    """Returns the content of a `.so`, `.pt2` or `.safetensors` file, which is read and never run."""
    return Document(command.run("inspect", *_after(os.fspath(file))))


def deps(*models: str, store: PathLike | None = None, libtorch: PathLike | None = None) -> Document:
    """Returns the libraries that a host needs to run the newest releases, with their sizes."""
    return Document(command.run("deps", *_options(store=store, libtorch=libtorch), *_after(*models)))


def export(
    folder: PathLike,
    *models: str,
    dry_run: bool = False,
    store: PathLike | None = None,
    libtorch: PathLike | None = None,
) -> Document:
    """Writes a folder that runs the newest releases on a machine without Python and torch."""
    options = _options(dry_run=dry_run, store=store, libtorch=libtorch)
    return Document(command.run("export", *options, *_after(os.fspath(folder), *models)))


def push(model: str, remote: str, *, dry_run: bool = False, store: PathLike | None = None) -> Document:
    """Copies a release to a place that other machines read, as `"s3://bucket/models"` or `"file:///mnt/models"`."""
    return Document(command.run("push", *_options(dry_run=dry_run, store=store), *_after(model, remote)))


def pull(
    remote: str | None = None,
    model: str | None = None,
    *,
    target: str | None = None,
    every: bool = False,
    lock: bool = False,
    locked: bool = False,
    dry_run: bool = False,
    store: PathLike | None = None,
    libtorch: PathLike | None = None,
) -> Document:
    """Copies the newest release of a model that this host can run from such a place; without a model, of all.

    `target` names another kind of host; `every` takes all releases, for whatever host. `lock` writes what was taken
    into `precast.lock` in the current folder; `locked` takes exactly the releases of that file, and no `remote`.
    """
    options = _options(lock=lock, locked=locked, dry_run=dry_run, store=store, libtorch=libtorch)
    options += _options(**{"for": target, "all": every})
    return Document(command.run("pull", *options, *_after(remote, model)))


def remotes() -> Document:
    """Returns the names of remotes, with their places."""
    return Document(command.run("remote", "ls"))


def add_remote(name: str, url: str, *, write: bool = False) -> Document:
    """Gives a place a name, which then stands wherever a place does. Pushes need `write`."""
    return Document(command.run("remote", "add", *_options(write=write), *_after(name, url)))


def remove_remote(name: str) -> Document:
    """Removes a name; the place stays as it is."""
    return Document(command.run("remote", "rm", *_after(name)))


def bench(
    module: str,
    *,
    model: str | None = None,
    against: str | None = None,
    at: str | None = None,
    threads: int | None = None,
    seconds: float | None = None,
    graphs: str | None = None,
    device: str | None = None,
    store: PathLike | None = None,
    libtorch: PathLike | None = None,
) -> Document:
    """Returns the time of a call of each bucket, without Python."""
    options = _options(
        model=model,
        against=against,
        at=at,
        threads=threads,
        seconds=seconds,
        graphs=graphs,
        device=device,
        store=store,
        libtorch=libtorch,
    )
    return Document(command.run("bench", *options, *_after(module)))


def stats(*files: PathLike, top: int | None = None) -> Document:
    """Returns a summary of counted requests and of the programs that answered them."""
    return Document(command.run("stats", *_options(top=top), *_after(*(os.fspath(file) for file in files))))


def releases(*, store: PathLike | None = None, shared: bool = False) -> Document:
    """Returns the releases of a store, with the versions of torch that run them."""
    return Document(command.run("release", "ls", *_options(store=store, shared=shared)))


def rollback(model: str, *, to: int | None = None, store: PathLike | None = None, shared: bool = False) -> Document:
    """Makes an earlier release of a model the newest: number `to`, else the last one with other content."""
    options = _options(to=to, store=store, shared=shared)
    return Document(command.run("release", "rollback", *options, *_after(model)))


def gc(
    *,
    keep_days: int | None = None,
    keep_releases: int | None = None,
    max_size: str | None = None,
    unreleased: bool = False,
    grace: str | None = None,
    apply: bool = False,
    dry_run: bool = False,
    store: PathLike | None = None,
    shared: bool = False,
) -> objects.Collection:
    """Deletes unused programs, artifacts and objects of a store, and returns the plan.

    Where `store` is a remote: what no release needs and is older than `grace`, as `"7d"`, only with `apply`.
    """
    options = _options(
        keep_days=keep_days,
        keep_releases=keep_releases,
        max_size=max_size,
        unreleased=unreleased,
        grace=grace,
        apply=apply,
        dry_run=dry_run,
        store=store,
        shared=shared,
    )
    return objects.Collection(command.run("gc", *options))


def _options(**options: Any) -> list[str]:
    """Returns options as the command reads them: none for None and False, one for each item of a list."""
    found = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            found.append(option)
        elif value is None or value is False:
            continue
        elif isinstance(value, (str, os.PathLike, int, float)):
            found.append(f"{option}={value if isinstance(value, (int, float)) else os.fspath(value)}")
        else:
            found += [f"{option}={os.fspath(item)}" for item in value]
    return found


def _settings(settings: Mapping[str, Any] | None) -> list[str]:
    return [f"{name}={literal(value)}" for name, value in (settings or {}).items()]


def _after(*names: str | None) -> list[str]:
    """Returns arguments that are not read as options, even with a `-` at the beginning."""
    return ["--", *(name for name in names if name is not None)]


@contextlib.contextmanager
def _file(spec: PathLike | Spec) -> Iterator[list[str]]:
    """Yields the argument of a spec's file; that of a `Spec` is in its folder, where its modules are, until the end."""
    if not isinstance(spec, Spec):
        yield [f"--file={os.fspath(spec)}"]
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=spec.folder, prefix="precast-", suffix=".toml") as file:
        file.write(spec.toml())
        file.flush()
        yield [f"--file={file.name}"]
