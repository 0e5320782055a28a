//! `precast deps`: the libraries that a host needs to run releases. Files are read, and nothing is opened.

use std::path::{Path, PathBuf};

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context, exit,
    exit::Usage,
    libtorch::LibtorchFolder,
    name,
    printer::note,
    table::{self, Column},
    text::{bytes, count},
};
use crate::{
    inspect::libraries::{self, Deps, Environment, Needs},
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

/// A release that was looked at.
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
    /// As `2.11.0+cu130`; none where no `version.py` is beside the libraries.
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
    /// None where torch is in no `site-packages`.
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
    if context.out.json() {
        context.out.document(&document)?;
    } else {
        print(&document, deps, context)?;
    }
    Ok(if needs.missing.is_empty() {
        0
    } else {
        exit::FAILED
    })
}

impl Selected {
    /// Finds the releases of these models, or the newest of each model, and the libraries that they need.
    pub(super) fn find(
        store: &Store,
        models: &[String],
        libtorch: &LibtorchFolder,
    ) -> Result<Self> {
        let (releases, held) = held_releases(store, models)?;
        let usage = |message: &str| Usage {
            message: message.to_owned(),
            hint: "name the folder of the package `torch`: `--libtorch DIR`, or LIBTORCH"
                .to_owned(),
        };
        let named = libtorch.find();
        let named = named
            .ok_or_else(|| usage("no libtorch is named, and the Python in use has no torch"))?;
        let folder = libraries::torch_folder(&named).ok_or_else(|| {
            let (lib, named) = (named.join("lib"), named.display());
            usage(&format!(
                "there is no `{}` in `{}` or `{named}`",
                libraries::CPU,
                lib.display()
            ))
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
pub(super) fn wrong_torch(deps: &Deps) -> Option<Usage> {
    deps.wrong_torch().map(|version| Usage {
        message: format!(
            "torch {version} in `{}` is not the one of the release: {}",
            deps.folder.display(),
            deps.asked.torches.join(", ")
        ),
        hint: "name the folder of that torch with `--libtorch DIR`".to_owned(),
    })
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
        if !found
            .iter()
            .any(|other| (&other.model, other.seq) == (&release.model, release.seq))
        {
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
        return Err(exit::Missing {
            message: "there is no release in the store".to_owned(),
            hint: "`precast build` makes one; `--store DIR` names another store".to_owned(),
        }
        .into());
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
        context
            .out
            .line(format_args!("\n{} {host}", "of the host:".bold()))?;
    }
    for library in &needs.missing {
        let (name, by) = (&library.name, users(&library.needed_by));
        let line = format!(
            "{} {name}, needed by {by}; it is not in {}",
            "missing:".red().bold(),
            searched(&library.searched)
        );
        context.out.line(line)?;
    }
    if context.quiet {
        return Ok(());
    }
    if let Some(environment) = &document.environment {
        let (whole, folder) = (bytes(environment.bytes), environment.folder.display());
        note(format_args!(
            "{}; the Python environment of this torch, `{folder}`, has {whole}",
            bytes(document.bytes)
        ));
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
        let by = if file.opened {
            format!("{}, while it runs", users(&file.needed_by))
        } else {
            users(&file.needed_by)
        };
        let folder = folder.display().to_string();
        Ok(vec![file.name.clone(), bytes(file.bytes), by, folder])
    });
    let total = vec![
        "total".to_owned(),
        bytes(deps.needs.bytes()),
        match files.iter().filter(|file| file.opened).count() {
            0 => count(files.len() as u64, "file"),
            opened => format!(
                "{}, {opened} of them while it runs",
                count(files.len() as u64, "file")
            ),
        },
    ];
    table::print(&context.out, &COLUMNS, rows.chain([Ok(total)]))?;
    Ok(())
}

/// Returns the first user, and how many more there are.
pub(super) fn users(needed_by: &[String]) -> String {
    match needed_by {
        [] => String::new(),
        [one] => one.clone(),
        [one, others @ ..] => format!("{one} and {} more", others.len()),
    }
}

/// Returns the folders that a library was looked for in.
pub(super) fn searched(folders: &[PathBuf]) -> String {
    let folders = folders
        .iter()
        .map(|folder| format!("`{}`", folder.display()));
    let folders: Vec<_> = folders
        .chain(["the folders of the system".to_owned()])
        .collect();
    folders.join(", ")
}
