//! `precast remote`: names of places, in a file of the user's.
//!
//! ```toml
//! schema = 1
//!
//! [remote.prod]
//! url = "s3://models/precast"
//! write = false
//! ```
//!
//! A name stands wherever a URL does. It is read only unless `--write` was said: developers pull, CI pushes. The file
//! decides where code comes from, so it is read only where nobody else can write it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::{
    super::{
        Context,
        exit::Refusal,
        folders,
        table::{self, Column},
        text::count,
        trusted,
    },
    ask,
    document::{self, SCHEMA},
    tell_racy,
};
use crate::store::transfer::{Event, Looked, Request};

#[derive(clap::Args)]
pub(in crate::cli) struct RemoteArgs {
    #[command(subcommand)]
    command: RemoteCommand,
}

#[derive(clap::Subcommand)]
enum RemoteCommand {
    /// Give a place a name, which then stands wherever a URL does
    Add {
        /// The name
        name: String,
        /// The place: `s3://BUCKET/PATH`, `gs://…`, `az://…`, `file:///PATH` or `https://HOST/PATH`
        url: String,
        /// Allow pushes; otherwise it is read only. The place may be empty
        #[arg(long)]
        write: bool,
    },
    /// List the names
    Ls,
    /// Remove a name; the place stays as it is
    Rm {
        /// The name
        name: String,
    },
}

/// `precast remote --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct RemotesDocument {
    remotes: Vec<NamedRemote>,
    /// What is at the place. Null unless one was added.
    found: Option<Looked>,
}

/// A remote with a name.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct NamedRemote {
    name: String,
    url: String,
    /// Whether pushes are allowed.
    write: bool,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Names {
    schema: u32,
    #[serde(default)]
    remote: BTreeMap<String, Place>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    url: String,
    #[serde(default)]
    write: bool,
}

impl Names {
    /// Reads the file. Without one there are no names.
    fn load() -> Result<Self> {
        let Some(path) = folders::remotes().filter(|path| path.exists()) else {
            return Ok(Self::default());
        };
        let text = trusted::read(&path).ok_or_else(|| {
            let message = format!("`{}` is not read", path.display());
            Refusal::usage(message, "let nobody else write it: `chmod go-w`")
        })?;
        document::parse(
            &path,
            &text,
            "mend it, or write it again with `precast remote add`",
        )
    }

    fn save(&self, path: &Path) -> Result<()> {
        let text = toml::to_string(self)?;
        replace(path, &text)
    }

    /// Returns the names for a hint.
    fn known(&self) -> String {
        let names: Vec<&str> = self.remote.keys().map(String::as_str).collect();
        match &names[..] {
            [] => "there are none yet".to_owned(),
            names => format!("known: {}", names.join(", ")),
        }
    }

    fn show(self, found: Option<Looked>) -> RemotesDocument {
        let remotes = self.remote.into_iter();
        let remotes = remotes.map(|(name, Place { url, write })| NamedRemote { name, url, write });
        RemotesDocument {
            remotes: remotes.collect(),
            found,
        }
    }
}

/// Writes a file in one step.
pub(super) fn replace(path: &Path, text: &str) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let write = || {
        fs::create_dir_all(folder)?;
        let mut file = tempfile::Builder::new();
        let file = file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
        let mut file = file.tempfile_in(folder)?;
        std::io::Write::write_all(&mut file, text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|e| e.error)?;
        std::io::Result::Ok(())
    };
    write().with_context(|| format!("can't write `{}`", path.display()))
}

/// Returns the URL that a text names. With `writing` the place is for a push, which its name must allow.
pub(in crate::cli) fn resolve(text: &str, writing: bool) -> Result<String> {
    if is_url(text) {
        return Ok(text.to_owned());
    }
    let names = Names::load()?;
    let Some(place) = names.remote.get(text) else {
        let hint = format!(
            "a remote is a URL, as `s3://BUCKET/PATH` or `file:///PATH`, or a name that `precast remote add` gave: {}",
            names.known()
        );
        return Err(Refusal::usage(format!("there is no remote `{text}`"), hint).into());
    };
    if writing && !place.write {
        let url = &place.url;
        let hint = format!("`precast remote add {text} {url} --write` allows pushes to it");
        return Err(Refusal::usage(format!("`{text}` ({url}) is read only"), hint).into());
    }
    Ok(place.url.clone())
}

/// Returns the URL of a text that is a URL or a known name; none for other texts.
pub(in crate::cli) fn known(text: &str) -> Result<Option<String>> {
    if is_url(text) {
        return Ok(Some(text.to_owned()));
    }
    Ok(Names::load()?.remote.remove(text).map(|place| place.url))
}

/// Returns whether a text is the URL of a place.
pub(in crate::cli) fn is_url(text: &str) -> bool {
    text.contains("://")
}

pub(in crate::cli) fn run(args: &RemoteArgs, context: &Context) -> Result<u8> {
    let document = match &args.command {
        RemoteCommand::Add { name, url, write } => add(name, url, *write, context)?,
        RemoteCommand::Ls => Names::load()?.show(None),
        RemoteCommand::Rm { name } => remove(name)?,
    };
    context.show(&document, || match &document.found {
        Some(found) => {
            let RemoteCommand::Add { name, url, write } = &args.command else {
                return Ok(());
            };
            let releases = count(found.releases, "release");
            let may = if *write {
                "pushes are allowed"
            } else {
                "read only"
            };
            writeln!(context.out, "{name} is {url} now: {releases}, {may}")
        }
        None => {
            const COLUMNS: [Column; 3] = [
                Column::left("NAME", 0),
                Column::left("URL", 0),
                Column::left("PUSHES", 0),
            ];
            let rows = document.remotes.iter().map(|one| {
                let may = if one.write { "allowed" } else { "no" };
                vec![one.name.clone(), one.url.clone(), may.to_owned()]
            });
            table::print_some(&context.out, &COLUMNS, rows, "remotes")
        }
    })?;
    Ok(0)
}

fn add(name: &str, url: &str, write: bool, context: &Context) -> Result<RemotesDocument> {
    let first = name
        .chars()
        .next()
        .is_some_and(|c| c.is_ascii_alphanumeric());
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !first || name.len() > 64 || !name.chars().all(plain) {
        let hint =
            "a name has letters, digits, `-`, `_` and `.`, and begins with a letter or a digit";
        return Err(Refusal::usage(format!("`{name}` is no name for a remote"), hint).into());
    }
    let path = file()?;
    let mut names = Names::load()?;
    if let Some(other) = names.remote.get(name).filter(|other| other.url != url) {
        let message = format!("`{name}` is {} already", other.url);
        let hint = format!("`precast remote rm {name}` first");
        return Err(Refusal::usage(message, hint).into());
    }
    let mut looked = None;
    let request = Request::Look {
        remote: url.to_owned(),
        write,
    };
    ask(&request, context, &mut |event| {
        if let Event::Looked(found) = event {
            looked = Some(found);
        }
    })?;
    let found = looked.unwrap_or(Looked {
        releases: 0,
        refuses_twice: None,
    });
    if !write && found.releases == 0 {
        let hint = "push a release first; with `--write` a place may be empty";
        return Err(Refusal::missing(format!("`{url}` has no release yet"), hint).into());
    }
    match found.refuses_twice {
        Some(false) => tell_racy(url),
        Some(true) => note!("{url} refuses to create a file twice: several may push at once"),
        None => {}
    }
    names.schema = SCHEMA;
    let place = Place {
        url: url.to_owned(),
        write,
    };
    names.remote.insert(name.to_owned(), place.clone());
    names.save(&path)?;
    let added = Names {
        schema: SCHEMA,
        remote: [(name.to_owned(), place)].into(),
    };
    Ok(added.show(Some(found)))
}

fn remove(name: &str) -> Result<RemotesDocument> {
    let path = file()?;
    let mut names = Names::load()?;
    if names.remote.remove(name).is_none() {
        let message = format!("there is no remote `{name}`");
        return Err(Refusal::missing(message, names.known()).into());
    }
    names.save(&path)?;
    Ok(names.show(None))
}

/// Returns the path of the file of names.
fn file() -> Result<PathBuf> {
    folders::remotes().ok_or_else(|| {
        let hint = "set `HOME` or `XDG_CONFIG_HOME`";
        Refusal::usage("there is no folder for settings", hint).into()
    })
}
