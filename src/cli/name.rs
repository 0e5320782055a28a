//! Names on the command line: the first digits of an ID, or the name of a program as `ls` prints it.

use std::collections::BTreeSet;

use anyhow::Result;

use super::exit::{Missing, Usage};
use crate::{
    Digest,
    record::{Release, split_model},
    store::{Filter, Found, ProgramRow, Store, StoreError},
};

/// How many programs a hint lists.
const SOME: usize = 4;

/// A thing of the store, in as many words as its name has.
#[derive(clap::Args)]
pub(super) struct Named {
    /// The first digits of an ID, or a program as `MODULE [BUCKET]`, with `MODEL@NUMBER` in front for that of a release
    #[arg(required = true, value_name = "ID-or-NAME")]
    words: Vec<String>,
}

impl Named {
    pub fn text(&self) -> String {
        self.words.join(" ")
    }
}

/// Returns what `text` stands for: an ID, or the name of one program. Where several have been built under one name, it
/// stands for the one in the newest release, else for the newest.
pub(super) fn find(store: &Store, text: &str) -> Result<Found> {
    match store.records().resolve(text) {
        Err(StoreError::BadPrefix(_) | StoreError::Unknown(_)) => {}
        other => return Ok(other?),
    }
    let (release, text) = match text.split_once(' ') {
        Some((model, rest)) if model.contains('@') => {
            let (model, programs) = programs_of(store, model)?;
            (programs, format!("{model} {rest}"))
        }
        _ if text.contains('@') || store.releases().models()?.iter().any(|model| model == text) => {
            release(store, text)?;
            return Err(Usage {
                message: format!("`{text}` is a release of many programs"),
                hint: format!("name one of them, as `{text} MODULE BUCKET`; `precast ls --model {text}` lists them"),
            }
            .into());
        }
        _ => (None, text.to_owned()),
    };
    let text = text.as_str();
    let filters = filters(text);
    let mut found = match &release {
        None => live_or_all(store, &filters)?,
        Some(programs) => of_programs(store, &filters, programs)?,
    };
    found.sort_by(|a, b| (name(a), b.created).cmp(&(name(b), a.created)));
    match &found[..] {
        [] => {}
        [row] => return Ok(Found::Program(row.id)),
        // Not in a release: the newest of those with one name, unless they are variants of one time.
        [row, others @ ..]
            if others
                .iter()
                .all(|other| name(other) == name(row) && other.created < row.created) =>
        {
            return Ok(Found::Program(row.id));
        }
        several => {
            let first: Vec<_> = (several.iter().take(SOME))
                .map(|row| format!("`{} {}` is {}", row.module, row.bucket, row.id.short()))
                .collect();
            return Err(Usage {
                message: format!("`{text}` names {} programs", several.len()),
                hint: first.join(", "),
            }
            .into());
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
    Err(Missing {
        message: format!("no program and no ID `{text}` is in the store"),
        hint: "`precast ls` lists programs and their IDs".to_owned(),
    }
    .into())
}

/// Returns the release that `MODEL`, `MODEL@7` or `MODEL@NAME` stands for.
pub(super) fn release(store: &Store, text: &str) -> Result<Release> {
    let (model, which) = split_model(text);
    if let Some(found) = store.releases().get(model, which)? {
        return Ok(found);
    }
    let hint = match which {
        None => store.releases().last(model)?,
        Some(_) => None,
    };
    Err(Missing {
        message: match (which, &hint) {
            (Some(_), _) => format!("there is no release `{text}`"),
            (None, Some(_)) => format!("`{model}` has only partial releases"),
            (None, None) => format!("there is no model `{model}`"),
        },
        hint: match hint {
            Some(last) => format!(
                "`precast build` makes the rest; `{model}@{}` names the last one",
                last.seq
            ),
            None => "`precast release ls` lists models and releases".to_owned(),
        },
    }
    .into())
}

/// Splits `MODEL@7` or `MODEL@NAME` into the model and the number of the release, which `option` can say too.
pub(super) fn release_number(
    store: &Store,
    text: &str,
    seq: Option<u64>,
    option: &str,
) -> Result<(String, Option<u64>)> {
    let (model, which) = split_model(text);
    match (which, seq) {
        (None, seq) => Ok((model.to_owned(), seq)),
        (Some(_), None) => Ok((model.to_owned(), Some(release(store, text)?.seq))),
        (Some(_), Some(_)) => Err(Usage {
            message: format!("`{text}` and `{option}` both name a release"),
            hint: "leave one of them out".to_owned(),
        }
        .into()),
    }
}

/// Splits `MODEL@7` or `MODEL@NAME` into the model and the programs of that release; none where it names no release.
pub(super) fn programs_of(store: &Store, text: &str) -> Result<(String, Option<BTreeSet<Digest>>)> {
    let (model, which) = split_model(text);
    let programs = match which {
        Some(_) => Some(release(store, text)?.programs.into_iter().collect()),
        None => None,
    };
    Ok((model.to_owned(), programs))
}

/// Returns the programs of the newest releases that a filter lets through, or all of them where no such release has one.
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
        match released.is_some() && released == store.releases().newest(&row.model)? {
            true => live.push(row),
            false => others.push(row),
        }
    }
    Ok(if live.is_empty() { others } else { live })
}

/// Returns those of some programs that a filter lets through.
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

/// Returns what `text` can mean: `MODULE [BUCKET]`, or `MODEL MODULE [BUCKET]`.
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
