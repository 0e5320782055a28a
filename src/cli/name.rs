//! Names on the command line: the first digits of an ID, or the name of a program as `ls` prints it.

use std::collections::BTreeSet;

use anyhow::Result;

use super::exit::Refusal;
use crate::{
    Digest,
    record::{Artifact, Failure, Program, Release, split_model},
    store::{Filter, Found, ObjectRow, ProgramRow, Store, StoreError},
};

/// Number of programs that a hint lists.
const SOME: usize = 4;

/// An object of the store. Its name may have several words.
#[derive(clap::Args)]
pub(super) struct NameArgs {
    /// The first digits of an ID, or a program as `MODULE [BUCKET]`, with `MODEL@NUMBER` in front for that of a release
    #[arg(required = true, value_name = "ID-or-NAME")]
    words: Vec<String>,
}

impl NameArgs {
    pub fn text(&self) -> String {
        self.words.join(" ")
    }
}

/// The record of a named object.
pub(super) enum Record {
    Program(Box<Program>),
    Artifact(Box<Artifact>),
    Failure(Box<Failure>),
    Object(ObjectRow),
}

/// Returns the record of the object that `text` names, as [`find`] does.
pub(super) fn record(store: &Store, text: &str) -> Result<Record> {
    let record = match find(store, text)? {
        Found::Program(id) => (store.records().program(&id)?).map(|it| Record::Program(it.into())),
        Found::Artifact(id) => {
            (store.records().artifact(&id)?).map(|it| Record::Artifact(it.into()))
        }
        Found::Failure(id) => (store.records().failure(&id)?).map(|it| Record::Failure(it.into())),
        Found::Object(digest) => store.objects().row(&digest)?.map(Record::Object),
    };
    let message = || format!("`{text}` was removed while it was read");
    let hint = "`precast gc` may be running: run the command again";
    Ok(record.ok_or_else(|| Refusal::missing(message(), hint))?)
}

/// Returns the object with this ID, or the program with this name. Of several programs with one name, the one in the
/// newest release is returned, else the newest.
fn find(store: &Store, text: &str) -> Result<Found> {
    match store.records().resolve(text) {
        Err(StoreError::BadPrefix(_) | StoreError::Unknown(_)) => {}
        other => return Ok(other?),
    }
    let (text, programs) = split_release(store, text)?;
    let filters = filters(&text);
    let mut found = match &programs {
        None => live_or_all(store, &filters)?,
        Some(programs) => of_programs(store, &filters, programs)?,
    };
    found.sort_by(|a, b| (name(a), b.created).cmp(&(name(b), a.created)));
    let older = |other: &ProgramRow, row: &ProgramRow| {
        name(other) == name(row) && other.created < row.created
    };
    match &found[..] {
        [] => {}
        // Programs of one time and one name are variants, and none of them is the newest.
        [row, others @ ..] if others.iter().all(|other| older(other, row)) => {
            return Ok(Found::Program(row.id));
        }
        several => {
            let first = several.iter().take(SOME);
            let first = first
                .map(|row| format!("`{} {}` is {}", row.module, row.bucket, row.id.short()))
                .collect::<Vec<_>>();
            let message = format!("`{text}` names {} programs", several.len());
            return Err(Refusal::usage(message, first.join(", ")).into());
        }
    }
    for failure in store.records().failures() {
        let (failure, _) = failure?;
        let named = |filter: &Filter| {
            let is = |want: &Option<String>, have| want.as_ref().is_none_or(|want| want == have);
            is(&filter.model, &failure.model)
                && is(&filter.module, &failure.module)
                && is(&filter.bucket, &failure.bucket)
        };
        if filters.iter().any(named) {
            return Ok(Found::Failure(failure.id));
        }
    }
    let message = format!("no program and no ID `{text}` is in the store");
    Err(Refusal::missing(message, "`precast ls` lists programs and their IDs").into())
}

/// Splits `MODEL@7 MODULE BUCKET` into `MODEL MODULE BUCKET` and the programs of that release. Fails for the name of a
/// whole release.
fn split_release(store: &Store, text: &str) -> Result<(String, Option<BTreeSet<Digest>>)> {
    if let Some((model, rest)) = text.split_once(' ')
        && model.contains('@')
    {
        let (model, programs) = model_and_programs(store, Some(model))?;
        return Ok((format!("{} {rest}", model.unwrap_or_default()), programs));
    }
    if text.contains('@') || store.releases().models()?.iter().any(|model| model == text) {
        release(store, text)?;
        let message = format!("`{text}` is a release of many programs");
        let list = format!("`precast ls --model {text}` lists them");
        let hint = format!("name one of them, as `{text} MODULE BUCKET`; {list}");
        return Err(Refusal::usage(message, hint).into());
    }
    Ok((text.to_owned(), None))
}

/// Returns the error for a store without a model.
pub(super) fn no_model(store: &Store) -> Refusal {
    let message = format!("the store `{}` has no model", store.path().display());
    Refusal::missing(message, "`precast build` makes one")
}

/// Returns the release that `MODEL`, `MODEL@7` or `MODEL@NAME` names.
pub(super) fn release(store: &Store, text: &str) -> Result<Release> {
    let (model, which) = split_model(text);
    if let Some(found) = store.releases().get(model, which)? {
        return Ok(found);
    }
    let list = "`precast release ls` lists models and releases";
    if which.is_some() {
        return Err(Refusal::missing(format!("there is no release `{text}`"), list).into());
    }
    let Some(last) = store.releases().last(model)? else {
        return Err(Refusal::missing(format!("there is no model `{model}`"), list).into());
    };
    let hint = format!(
        "`precast build` makes the rest; `{model}@{}` names the last one",
        last.seq
    );
    Err(Refusal::missing(format!("`{model}` has only partial releases"), hint).into())
}

/// Splits `MODEL@7` or `MODEL@NAME` into the model and the number of the release, which `option` can give instead.
pub(super) fn release_number(
    store: &Store,
    text: &str,
    seq: Option<u64>,
    option: &str,
) -> Result<(String, Option<u64>)> {
    let (model, which) = split_model(text);
    let seq = match (which, seq) {
        (None, seq) => seq,
        (Some(_), None) => Some(release(store, text)?.seq),
        (Some(_), Some(_)) => {
            let message = format!("`{text}` and `{option}` both name a release");
            return Err(Refusal::usage(message, "leave one of them out").into());
        }
    };
    Ok((model.to_owned(), seq))
}

/// Returns the model of `--model`, and the programs of the release `@7` or `@NAME` after it.
pub(super) fn model_and_programs(
    store: &Store,
    text: Option<&str>,
) -> Result<(Option<String>, Option<BTreeSet<Digest>>)> {
    let Some(text) = text else {
        return Ok((None, None));
    };
    let (model, which) = split_model(text);
    let programs = match which {
        Some(_) => Some(release(store, text)?.programs.into_iter().collect()),
        None => None,
    };
    Ok((Some(model.to_owned()), programs))
}

/// Returns the programs of the newest releases that match a filter; without any, the matching programs of the store.
pub(super) fn live_or_all(
    store: &Store,
    filters: &[Filter],
) -> Result<Vec<ProgramRow>, StoreError> {
    let (mut live, mut others) = (Vec::new(), Vec::new());
    for row in filters
        .iter()
        .flat_map(|filter| store.records().programs(filter.clone()))
    {
        let row = row?;
        let released = store.releases().released(&row.id)?;
        if released.is_some() && released == store.releases().newest(&row.model)? {
            live.push(row)
        } else {
            others.push(row)
        }
    }
    Ok(if live.is_empty() { others } else { live })
}

/// Returns the programs among `programs` that match a filter.
pub(super) fn of_programs(
    store: &Store,
    filters: &[Filter],
    programs: &BTreeSet<Digest>,
) -> Result<Vec<ProgramRow>, StoreError> {
    let all = filters
        .iter()
        .flat_map(|filter| store.records().programs(filter.clone()));
    let own = |row: &Result<ProgramRow, StoreError>| {
        row.as_ref().map_or(true, |row| programs.contains(&row.id))
    };
    all.filter(own).collect()
}

fn name(row: &ProgramRow) -> (&str, &str, &str) {
    (&row.model, &row.module, &row.bucket)
}

/// Returns the filters for `MODULE [BUCKET]` and for `MODEL MODULE [BUCKET]`.
fn filters(text: &str) -> Vec<Filter> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let filter = |model: Option<&&str>, words: &[&str]| {
        let (module, bucket) = words.split_first()?;
        Some(Filter {
            model: model.map(|model| (*model).to_owned()),
            module: Some((*module).to_owned()),
            bucket: (!bucket.is_empty()).then(|| bucket.join(" ")),
            device: None,
        })
    };
    let with_model = (words.split_first()).and_then(|(model, words)| filter(Some(model), words));
    filter(None, &words).into_iter().chain(with_model).collect()
}
