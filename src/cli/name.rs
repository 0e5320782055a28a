//! What people call a thing: the first digits of its ID, or a program by name, as `ls` prints it.

use anyhow::Result;

use super::exit::{Missing, Usage};
use crate::store::{Filter, Found, ProgramRow, Store, StoreError};

/// How many programs a hint lists.
const SOME: usize = 4;

/// A thing of the store, in as many words as its name has.
#[derive(clap::Args)]
pub(super) struct Named {
    /// The first digits of an ID, or a program as `MODULE [BUCKET]`
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
    match store.resolve(text) {
        Err(StoreError::BadPrefix(_) | StoreError::Unknown(_)) => {}
        other => return Ok(other?),
    }
    let filters = filters(text);
    let mut found = live_or_all(store, &filters)?;
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
    for failure in store.failures() {
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

/// Returns the programs of the newest releases that a filter lets through, or all of them where no such release has one.
pub(super) fn live_or_all(
    store: &Store,
    filters: &[Filter],
) -> Result<Vec<ProgramRow>, StoreError> {
    let (mut live, mut others) = (Vec::new(), Vec::new());
    for row in filters
        .iter()
        .flat_map(|filter| store.programs(filter.clone()))
    {
        let row = row?;
        let released = store.released(&row.id)?;
        match released.is_some() && released == store.newest_release(&row.model)? {
            true => live.push(row),
            false => others.push(row),
        }
    }
    Ok(if live.is_empty() { others } else { live })
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
