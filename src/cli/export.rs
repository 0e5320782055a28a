//! `precast export`: a folder that runs releases on a machine that has neither Python nor torch.
//!
//! ```text
//! DIR/
//! ├── bin/precast            this program
//! ├── store/                 the releases and nothing else
//! ├── torch/version.py       the runtime reads the version of libtorch there
//! ├── torch/lib/*.so         the libraries that `precast deps` lists
//! └── nvidia/*/lib/*.so.*    in the layout of the wheels: their search paths are relative
//! ```
//!
//! The folder is written under a temporary name beside its place, checked, and renamed: it is there whole or not at all. The
//! next export beside it removes the folder of a killed one. The check is the walk of `precast deps` over the copy. Every library must find those that it needs inside the folder.

use std::{
    collections::BTreeSet,
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::{
    Context,
    deps::{Deps, Environment, Named, print_files, searched, users},
    exit::Usage,
    libtorch::LibtorchFolder,
    printer::note,
    table::{self, Column},
    text::{bytes, count},
};
use crate::{
    Digest,
    build::{BuildError, scratch},
    inspect::libraries::{self, Library, Search},
    store::Store,
};

#[derive(clap::Args)]
pub(super) struct Args {
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

/// One file that is copied.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Copied {
    /// Relative to the folder.
    path: PathBuf,
    /// Where it lies on this machine.
    from: PathBuf,
    bytes: u64,
}

/// `precast export --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document {
    folder: PathBuf,
    /// False for a dry run.
    written: bool,
    releases: Vec<Named>,
    /// Files beside the store.
    files: Vec<Copied>,
    /// How many objects the store has.
    objects: usize,
    /// Their bytes on disk.
    object_bytes: u64,
    /// Bytes of all files and objects; records and the store's index come on top.
    bytes: u64,
    /// None where torch is in no `site-packages`.
    environment: Option<Environment>,
}

/// What is written.
struct Plan<'a> {
    store: &'a Store,
    deps: &'a Deps,
    objects: BTreeSet<Digest>,
    document: Document,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    // Opened as `run` does: what is copied is not collected meanwhile.
    let store = match context.open() {
        Ok(store) => store,
        Err(_) => context.look()?,
    };
    let deps = Deps::find(&store, &args.models, &args.libtorch)?;
    refuse(&deps)?;
    for release in &deps.releases {
        // Fails where something of it is missing.
        store.releases().hold(release)?;
    }
    let folder = &args.folder;
    empty(folder)?;
    let mut plan = Plan::new(&store, &deps, folder)?;
    room(folder, plan.document.bytes)?;
    if !args.dry_run {
        plan.write(context)?;
        plan.document.written = true;
    }
    let document = &plan.document;
    match context.out.json() {
        true => context.out.document(document)?,
        false => print(&plan, context)?,
    }
    if !context.quiet {
        let shown = folder.display();
        if let Some(environment) = &document.environment {
            let (own, whole) = (bytes(document.bytes), bytes(environment.bytes));
            note(format_args!(
                "{own}; the Python environment of this torch has {whole}"
            ));
        }
        match args.dry_run {
            true => note(format_args!(
                "nothing was written: this is what `{shown}` would get"
            )),
            false => note(format_args!(
                "to run it: `{shown}/bin/precast run MODULE --inputs FILE --store {shown}/store --libtorch {shown}/torch`"
            )),
        }
    }
    Ok(0)
}

/// Fails for releases that could not run in the folder.
fn refuse(deps: &Deps) -> Result<()> {
    if let Some(unfit) = &deps.unfit {
        let (message, hint) = (unfit.message.clone(), unfit.hint.clone());
        return Err(Usage { message, hint }.into());
    }
    let Some(first) = deps.needs.missing.first() else {
        return Ok(());
    };
    Err(Usage {
        message: format!(
            "`{}` is missing, needed by {}; it is not in {}",
            first.name,
            users(&first.needed_by),
            searched(&first.searched)
        ),
        hint: "install it beside torch; `precast deps` lists all that is missing".to_owned(),
    }
    .into())
}

/// Fails for a folder that has something in it.
fn empty(folder: &Path) -> Result<()> {
    let shown = folder.display();
    let usage = |message| {
        let hint = "name a new folder, or an empty one".to_owned();
        Err(Usage { message, hint }.into())
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
    let there = whole.ancestors().find(|above| above.is_dir());
    let Some(stat) = there.and_then(|above| rustix::fs::statvfs(above).ok()) else {
        return Ok(());
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    match free < needed {
        true => Err(Usage {
            message: format!(
                "`{}` needs {}, and the disk has {}",
                folder.display(),
                bytes(needed),
                bytes(free)
            ),
            hint: "free some space, or name a folder on another disk".to_owned(),
        }
        .into()),
        false => Ok(()),
    }
}

impl<'a> Plan<'a> {
    fn new(store: &'a Store, deps: &'a Deps, folder: &Path) -> Result<Self> {
        let mut objects = BTreeSet::new();
        for release in &deps.releases {
            objects.extend(store.releases().manifest(release)?.objects());
        }
        let mut object_bytes = 0;
        for object in &objects {
            object_bytes += store.objects().row(object)?.map_or(0, |row| row.stored);
        }
        let program = std::env::current_exe().context("can't find this program's own file")?;
        let mut files = vec![(PathBuf::from("bin/precast"), program)];
        let version = deps.folder.parent().map(|torch| torch.join("version.py"));
        let version = version.filter(|file| file.is_file());
        files.extend(version.map(|file| (PathBuf::from("torch/version.py"), file)));
        let library = |library: &Library| (deps.place(library), library.path.clone());
        files.extend(deps.needs.files.iter().map(library));
        let files: Vec<Copied> = files
            .into_iter()
            .map(|(path, from)| {
                let meta = fs::metadata(&from);
                let meta = meta.with_context(|| format!("can't read `{}`", from.display()))?;
                let bytes = meta.len();
                Ok(Copied { path, from, bytes })
            })
            .collect::<Result<_>>()?;
        let document = Document {
            folder: folder.to_owned(),
            written: false,
            releases: Named::all(&deps.releases),
            bytes: object_bytes + files.iter().map(|file| file.bytes).sum::<u64>(),
            files,
            objects: objects.len(),
            object_bytes,
            environment: deps.environment(),
        };
        Ok(Self {
            store,
            deps,
            objects,
            document,
        })
    }

    /// Writes the folder under another name, checks it, and renames it.
    fn write(&self, context: &Context) -> Result<()> {
        let folder = std::path::absolute(&self.document.folder)?;
        let above = folder.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(above).with_context(|| format!("can't make `{}`", above.display()))?;
        let swept = scratch::sweep(above, scratch::EXPORT, false);
        if !swept.is_empty() && !context.quiet {
            let folders = count(swept.len() as u64, "folder");
            note(format_args!(
                "removed {folders} of exports that were killed"
            ));
        }
        // Removed again where anything fails.
        let temporary = scratch::Scratch::new(above, scratch::EXPORT)
            .with_context(|| format!("can't write in `{}`", above.display()))?;
        let root = temporary.path();
        self.write_store(&root.join("store"), context)?;
        for file in &self.document.files {
            interrupted(context)?;
            copy(&file.from, &root.join(&file.path))?;
        }
        self.check(root)?;
        fs::set_permissions(root, Permissions::from_mode(0o755))
            .with_context(|| format!("can't set the mode of `{}`", root.display()))?;
        // An empty folder is replaced; one that has got files meanwhile is not.
        let published = temporary.publish(&folder);
        published.with_context(|| format!("can't make `{}`", folder.display()))
    }

    fn write_store(&self, path: &Path, context: &Context) -> Result<()> {
        let store = Store::create(path)?;
        for object in &self.objects {
            interrupted(context)?;
            store.objects().copy(self.store.objects(), object)?;
        }
        for release in &self.deps.releases {
            interrupted(context)?;
            store.releases().copy(self.store.releases(), release)?;
        }
        Ok(())
    }

    /// Fails where a library of the copy does not find in it what the original finds.
    fn check(&self, root: &Path) -> Result<()> {
        let root = root.canonicalize()?;
        let search = Search {
            library_path: vec![],
            system: libraries::system_folders(),
            within: Some(root.clone()),
        };
        let copies = libraries::needs(&root.join("torch/lib"), &self.deps.asked, &search)?;
        let found: BTreeSet<_> = copies.files.iter().map(|file| &file.name).collect();
        let mut originals = self.deps.needs.files.iter();
        let Some(lost) = originals.find(|file| !found.contains(&file.name)) else {
            return Ok(());
        };
        Err(Usage {
            message: format!(
                "`{}` would not find `{}` in the folder: its search path is not relative",
                users(&lost.needed_by),
                lost.path.display()
            ),
            hint: "name a torch as pip installs it, or a libtorch as pytorch.org packs it, with `--libtorch DIR`".to_owned(),
        }
        .into())
    }
}

fn interrupted(context: &Context) -> Result<()> {
    match context.cancel.load(Ordering::Relaxed) {
        true => Err(BuildError::Interrupted.into()),
        false => Ok(()),
    }
}

/// Copies a file with its mode, and makes the copy durable.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let above = to.parent().unwrap_or(Path::new("/"));
    let copied = fs::create_dir_all(above)
        .and_then(|()| fs::copy(from, to))
        .and_then(|_| File::open(to)?.sync_all());
    copied.with_context(|| format!("can't copy `{}` to `{}`", from.display(), to.display()))
}

fn print(plan: &Plan<'_>, context: &Context) -> Result<()> {
    let document = &plan.document;
    if !document.written {
        print_files(plan.deps, context)?;
        context.out.line("")?;
    }
    const COLUMNS: [Column; 3] = [
        Column::left("PART", 0),
        Column::right("SIZE", 0),
        Column::left("", 0),
    ];
    let releases = plan.deps.releases.iter();
    let releases: Vec<String> = releases
        .map(|release| format!("{}@{}", release.model, release.seq))
        .collect();
    let needs = &plan.deps.needs;
    let program = document.files.first().map_or(0, |file| file.bytes);
    let objects = count(document.objects as u64, "object");
    let rows = [
        ("bin/precast", program, "this program".to_owned()),
        (
            "store",
            document.object_bytes,
            format!("{}: {objects}", releases.join(", ")),
        ),
        (
            "libraries",
            needs.bytes(),
            count(needs.files.len() as u64, "file"),
        ),
        ("total", document.bytes, String::new()),
    ];
    let rows = rows.map(|(part, size, more)| Ok(vec![part.to_owned(), bytes(size), more]));
    table::print(&context.out, &COLUMNS, rows.into_iter())?;
    Ok(())
}
