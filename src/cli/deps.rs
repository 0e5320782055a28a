//! `precast deps`: the libraries that a host needs to run releases. Files are read, and nothing is opened.

use std::path::Path;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::{self, Refusal},
    libtorch::LibtorchFolder,
    name,
    table::{self, Column},
    text::{bytes, count},
};
use crate::{
    inspect::libraries::{self, Deps, Environment, MissingLibrary, Needs},
    record::Release,
    store::{Hold, Store},
};

#[derive(clap::Args)]
pub(super) struct DepsArgs {
    /// The models, each with `@NUMBER` or `@NAME` for another release than the newest [default: all]
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    #[command(flatten)]
    libtorch: LibtorchFolder,
}

/// A release of the listing.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Named {
    pub(super) model: String,
    /// Number of the release.
    pub(super) seq: u64,
}

impl Named {
    /// Returns the names of releases, for a document.
    pub(super) fn all(releases: &[Release]) -> Vec<Self> {
        let named = releases.iter().map(|release| Self {
            model: release.model.clone(),
            seq: release.seq,
        });
        named.collect()
    }
}

/// The torch whose libraries these are.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Found<'a> {
    /// As `2.11.0+cu130`; none without a `version.py` next to the libraries.
    version: Option<&'a str>,
    /// The folder with `libtorch_cpu.so`.
    folder: &'a Path,
}

/// `precast deps --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct DepsDocument<'a> {
    releases: Vec<Named>,
    torch: Found<'a>,
    /// Whether a program runs on a GPU.
    cuda: bool,
    /// Bytes of all files.
    bytes: u64,
    #[serde(flatten)]
    needs: &'a Needs,
    /// Absent if torch is in no `site-packages`.
    environment: Option<Environment>,
}

/// Releases that gc keeps, and the libraries that they need.
pub(super) struct Selected {
    pub(super) releases: Vec<Release>,
    _held: Vec<Hold>,
    pub(super) deps: Deps,
}

pub(super) fn run(args: &DepsArgs, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let selected = Selected::find(&store, &args.models, &args.libtorch)?;
    let (releases, deps) = (&selected.releases, &selected.deps);
    let needs = &deps.needs;
    if let Some(wrong) = wrong_torch(deps) {
        exit::warning(&wrong.message);
        exit::tell_hint(&wrong.hint);
    }
    let document = DepsDocument {
        releases: Named::all(releases),
        torch: Found {
            version: deps.torch.as_ref().map(|torch| torch.version.as_str()),
            folder: &deps.folder,
        },
        cuda: deps.asked.cuda,
        bytes: needs.bytes(),
        needs,
        environment: deps.environment(),
    };
    context.show(&document, || print(&document, deps, context))?;
    Ok(exit::code(needs.missing.is_empty()))
}

impl Selected {
    /// Finds the releases of these models, or the newest of each model, and the libraries that they need.
    pub(super) fn find(
        store: &Store,
        models: &[String],
        libtorch: &LibtorchFolder,
    ) -> Result<Self> {
        let (releases, held) = held_releases(store, models)?;
        let usage = |message: String| {
            let hint = "name the folder of the package `torch`: `--libtorch DIR`, or LIBTORCH";
            Refusal::usage(message, hint)
        };
        let none = "no libtorch is named, and the Python in use has no torch";
        let named = libtorch.find().ok_or_else(|| usage(none.to_owned()))?;
        let folder = libraries::torch_folder(&named).ok_or_else(|| {
            let (file, lib, named) = (libraries::CPU, named.join("lib"), named.display());
            let lib = lib.display();
            usage(format!("there is no `{file}` in `{lib}` or `{named}`"))
        })?;
        let library_path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let library_path = std::env::split_paths(&library_path).filter(|path| path.is_absolute());
        let deps = Deps::find(store, &releases, folder, library_path.collect())?;
        Ok(Self {
            releases,
            _held: held,
            deps,
        })
    }
}

/// Returns the mistake if the releases are for another torch.
pub(super) fn wrong_torch(deps: &Deps) -> Option<Refusal> {
    let version = deps.wrong_torch()?;
    let (folder, torches) = (deps.folder.display(), deps.asked.torches.join(", "));
    let message = format!("torch {version} in `{folder}` is not the one of the release: {torches}");
    let hint = "name the folder of that torch with `--libtorch DIR`";
    Some(Refusal::usage(message, hint))
}

/// Returns the same releases as [`releases`], held. It starts again if gc removed one before it was held.
fn held_releases(store: &Store, models: &[String]) -> Result<(Vec<Release>, Vec<Hold>)> {
    loop {
        let releases = releases(store, models)?;
        let held = releases
            .iter()
            .map(|release| Ok(store.releases().hold_found(release)?.0));
        let held = held.collect::<Result<Vec<_>>>()?;
        let there = |release: &Release| store.releases().has(&release.model, release.seq);
        if releases.iter().all(there) {
            return Ok((releases, held));
        }
    }
}

/// Returns the releases that are named, or the newest one of each model.
fn releases(store: &Store, models: &[String]) -> Result<Vec<Release>> {
    let mut found: Vec<Release> = Vec::new();
    for model in models {
        let release = name::release(store, model)?;
        let same = |other: &Release| (&other.model, other.seq) == (&release.model, release.seq);
        if !found.iter().any(same) {
            found.push(release);
        }
    }
    if models.is_empty() {
        for model in store.releases().models()? {
            match store.releases().get(&model, None)? {
                Some(release) => found.push(release),
                None => exit::warning(&format!(
                    "`{model}` has only partial releases: it is left out"
                )),
            }
        }
    }
    if found.is_empty() {
        let hint = "`precast build` makes one; `--store DIR` names another store";
        return Err(Refusal::missing("there is no release in the store", hint).into());
    }
    Ok(found)
}

fn print(document: &DepsDocument<'_>, deps: &Deps, context: &Context) -> Result<()> {
    print_files(deps, context)?;
    let needs = &deps.needs;
    if !needs.host.is_empty() {
        let host = needs.host.iter().map(|library| match library.path {
            Some(_) => library.name.clone(),
            None => format!("{} (not on this machine)", library.name),
        });
        let host = host.collect::<Vec<_>>().join(", ");
        writeln!(context.out, "\n{} {host}", "of the host:".bold())?;
    }
    for library in &needs.missing {
        let head = "missing:".red();
        let place = sought(library);
        writeln!(context.out, "{} {}, {place}", head.bold(), library.name)?;
    }
    if let Some(environment) = &document.environment {
        let (own, whole) = (bytes(document.bytes), bytes(environment.bytes));
        let folder = environment.folder.display();
        note!("{own}; the Python environment of this torch, `{folder}`, has {whole}");
    }
    Ok(())
}

/// Prints the table of files and their sum.
pub(super) fn print_files(deps: &Deps, context: &Context) -> Result<()> {
    const COLUMNS: [Column; 4] = [
        Column::left("LIBRARY", 0),
        Column::right("SIZE", 0),
        Column::left("NEEDED BY", 1),
        Column::left("FOLDER", 2),
    ];
    let files = &deps.needs.files;
    let rows = files.iter().map(|file| {
        let place = deps.place(file);
        let folder = place.parent().unwrap_or(Path::new(""));
        let when = if file.opened { ", while it runs" } else { "" };
        let by = users(&file.needed_by) + when;
        let folder = folder.display().to_string();
        vec![file.name.clone(), bytes(file.bytes), by, folder]
    });
    let all = count(files.len(), "file");
    let all = match files.iter().filter(|file| file.opened).count() {
        0 => all,
        opened => format!("{all}, {opened} of them while it runs"),
    };
    let total = vec!["total".to_owned(), bytes(deps.needs.bytes()), all];
    table::print(&context.out, &COLUMNS, rows.chain([total]))
}

/// Returns the first user, and the number of further users.
pub(super) fn users(needed_by: &[String]) -> String {
    match needed_by {
        [] => String::new(),
        [one] => one.clone(),
        [one, others @ ..] => format!("{one} and {} more", others.len()),
    }
}

/// Returns the users of a missing library, and the folders of the search.
pub(super) fn sought(library: &MissingLibrary) -> String {
    let (by, folders) = (users(&library.needed_by), library.searched.iter());
    let folders: String = folders.map(|it| format!("`{}`, ", it.display())).collect();
    format!("needed by {by}; it is not in {folders}the folders of the system")
}
