//! `precast export`: a folder that runs releases on a machine that has neither Python nor torch.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::{
    Context,
    deps::{Named, Selected, print_files, sought, users, wrong_torch},
    exit::Refusal,
    libtorch::LibtorchFolder,
    table::{self, Column},
    text::{bytes, count},
};
use crate::{
    build::BuildError,
    inspect::{
        export::{Copied, Export, ExportError},
        libraries::{Deps, Environment},
    },
};

#[derive(clap::Args)]
pub(super) struct ExportArgs {
    /// The folder to write: a new one, or an empty one
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// The models, each with `@NUMBER` or `@NAME` for another release than the newest [default: all]
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    /// Print what would be written, with sizes, and write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    libtorch: LibtorchFolder,
}

/// `precast export --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct ExportDocument {
    folder: PathBuf,
    /// False for a dry run.
    written: bool,
    releases: Vec<Named>,
    /// Files next to the store.
    files: Vec<Copied>,
    /// Number of objects in the store.
    objects: usize,
    /// Their bytes on disk.
    object_bytes: u64,
    /// Bytes of all files and objects; records and the store's index come on top.
    bytes: u64,
    /// Absent if torch is in no `site-packages`.
    environment: Option<Environment>,
}

pub(super) fn run(args: &ExportArgs, context: &Context) -> Result<u8> {
    // The lease protects the copied objects from gc.
    let store = context.open_or_look()?;
    let selected = Selected::find(&store, &args.models, &args.libtorch)?;
    let deps = &selected.deps;
    refuse(deps)?;
    for release in &selected.releases {
        // Fails for a release with missing parts.
        store.releases().hold(release)?;
    }
    let folder = &args.folder;
    empty(folder)?;
    let program = std::env::current_exe().context("can't find this program's own file")?;
    let export = Export::new(&store, &selected.releases, deps, program).map_err(error)?;
    room(folder, export.bytes())?;
    if !args.dry_run {
        write(&export, folder, context)?;
    }
    let total = export.bytes();
    let document = ExportDocument {
        folder: folder.to_owned(),
        written: !args.dry_run,
        releases: Named::all(&selected.releases),
        objects: export.objects.len(),
        object_bytes: export.object_bytes,
        files: export.files,
        bytes: total,
        environment: deps.environment(),
    };
    context.show(&document, || print(&document, deps, context))?;
    if let Some(environment) = &document.environment {
        let (own, whole) = (bytes(document.bytes), bytes(environment.bytes));
        note!("{own}; the Python environment of this torch has {whole}");
    }
    let to = folder.display();
    if args.dry_run {
        note!("nothing was written: this is what `{to}` would get");
    } else {
        let run = format!("{to}/bin/precast run MODULE --inputs FILE");
        note!("to run it: `{run} --store {to}/store --libtorch {to}/torch`");
    }
    Ok(0)
}

/// Removes the folders of killed exports, and writes the new one.
fn write(export: &Export<'_>, folder: &Path, context: &Context) -> Result<()> {
    let folder = std::path::absolute(folder)?;
    let swept = Export::sweep(&folder);
    if !swept.is_empty() {
        let folders = count(swept.len(), "folder");
        note!("removed {folders} of exports that were killed");
    }
    export.write(&folder, &context.cancel).map_err(error)
}

/// Returns the error with the exit code and the hint of its cause.
fn error(error: ExportError) -> anyhow::Error {
    match error {
        ExportError::NotRelative(lost) => {
            let (by, file) = (users(&lost.needed_by), lost.path.display());
            let message = format!(
                "`{by}` would not find `{file}` in the folder: its search path is not relative"
            );
            let hint = "name a torch as pip installs it, or a libtorch as pytorch.org packs it, with `--libtorch DIR`";
            Refusal::usage(message, hint).into()
        }
        ExportError::Build(BuildError::Scratch { path, source }) => {
            let context = format!("can't write in `{}`", path.display());
            anyhow::Error::from(BuildError::Scratch { path, source }).context(context)
        }
        ExportError::Build(error) => error.into(),
        ExportError::Store(error) => error.into(),
        ExportError::Library(error) => error.into(),
        other => other.into(),
    }
}

/// Fails for releases that could not run in the folder.
fn refuse(deps: &Deps) -> Result<()> {
    if let Some(wrong) = wrong_torch(deps) {
        return Err(wrong.into());
    }
    let Some(first) = deps.needs.missing.first() else {
        return Ok(());
    };
    let message = format!("`{}` is missing, {}", first.name, sought(first));
    let hint = "install it beside torch; `precast deps` lists all that is missing";
    Err(Refusal::usage(message, hint).into())
}

/// Fails for a folder with files in it.
fn empty(folder: &Path) -> Result<()> {
    let shown = folder.display();
    let usage = |message| {
        let hint = "name a new folder, or an empty one";
        Err(Refusal::usage(message, hint).into())
    };
    match fs::read_dir(folder) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => usage(format!("`{shown}` is not empty")),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            match folder.symlink_metadata() {
                Ok(_) => usage(format!("`{shown}` is a symbolic link to nothing")),
                Err(_) => Ok(()),
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
            usage(format!("`{shown}` is not a folder"))
        }
        Err(error) => Err(error).with_context(|| format!("can't read `{shown}`")),
    }
}

/// Fails where the disk has less space than is needed.
fn room(folder: &Path, needed: u64) -> Result<()> {
    let whole = std::path::absolute(folder)?;
    let parent = whole.ancestors().find(|above| above.is_dir());
    let Some(stat) = parent.and_then(|above| rustix::fs::statvfs(above).ok()) else {
        return Ok(());
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free >= needed {
        return Ok(());
    }
    let (shown, needed, free) = (folder.display(), bytes(needed), bytes(free));
    let message = format!("`{shown}` needs {needed}, and the disk has {free}");
    let hint = "free some space, or name a folder on another disk";
    Err(Refusal::usage(message, hint).into())
}

fn print(document: &ExportDocument, deps: &Deps, context: &Context) -> Result<()> {
    if !document.written {
        print_files(deps, context)?;
        context.out.line("")?;
    }
    const COLUMNS: [Column; 3] = [
        Column::left("PART", 0),
        Column::right("SIZE", 0),
        Column::left("", 0),
    ];
    let releases = document.releases.iter();
    let releases: Vec<String> = releases
        .map(|release| format!("{}@{}", release.model, release.seq))
        .collect();
    let needs = &deps.needs;
    let program = document.files.first().map_or(0, |file| file.bytes);
    let objects = count(document.objects, "object");
    let objects = format!("{}: {objects}", releases.join(", "));
    let files = count(needs.files.len(), "file");
    let rows = [
        ("bin/precast", program, "this program".to_owned()),
        ("store", document.object_bytes, objects),
        ("libraries", needs.bytes(), files),
        ("total", document.bytes, String::new()),
    ];
    let rows = rows.map(|(part, size, more)| vec![part.to_owned(), bytes(size), more]);
    table::print(&context.out, &COLUMNS, rows.into_iter())
}
