//! `[module.buckets]`: a grid or a list of points, expanded, sorted and checked against the inputs.

use std::collections::{BTreeMap, BTreeSet};

use precast_store::record::{Sizes, bucket_name};

use super::{
    Dim,
    inputs::{Inputs, NAMES, is_identifier, positive},
    reader::{KeyValue, Reader, Section, Span},
    states::States,
};

/// More buckets than this are a mistake.
const MAX_POINTS: usize = 10_000;

/// The expanded buckets of one module.
pub(super) struct Buckets {
    /// Sorted, distinct, all with the same dimensions.
    pub points: Vec<Sizes>,
    /// The first place of each dimension in the file.
    dims: BTreeMap<String, Span>,
    place: Span,
}

/// Reads the table.
pub(super) fn buckets<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Buckets> {
    let section = reader.table(field, "[module.buckets]")?;
    let Some(list) = section.field("points") else {
        return grid(reader, &section);
    };
    for (key, place, _) in section.fields() {
        if key != "points" {
            let help = "give a grid or points, not both";
            reader.wrong_help(
                &place,
                format!("`{key}` stands beside `points` in [module.buckets]"),
                help,
            );
        }
    }
    points(reader, &section, &list)
}

fn grid<'t>(reader: &mut Reader<'t>, section: &Section<'t>) -> Option<Buckets> {
    let mut axes = Vec::new();
    let mut dims = BTreeMap::new();
    for (dim, place, field) in section.fields() {
        check_name(reader, dim, &place);
        let items = reader.array(&field, "sizes");
        let mut sizes = BTreeSet::new();
        for item in items.iter().flatten() {
            if let Some(size) = positive(reader, item)
                && !sizes.insert(size)
            {
                reader.wrong_help(
                    &item.place,
                    format!("size {size} is twice in {}", field.name),
                    "leave one of them out",
                );
            }
        }
        if items.is_some_and(|items| items.is_empty()) {
            reader.wrong_help(
                &field.place,
                format!("{} has no size, which leaves no bucket", field.name),
                format!("as in `{dim} = [1, 8]`"),
            );
        }
        dims.insert(dim.to_owned(), place);
        axes.push((dim, sizes));
    }
    let count = axes.iter().try_fold(1_usize, |count, (_, sizes)| {
        count.checked_mul(sizes.len().max(1))
    });
    if count.is_none_or(|count| count > MAX_POINTS) {
        let count = count.map_or_else(|| "far too many".to_owned(), |count| count.to_string());
        let message = format!("the grid has {count} buckets, more than {MAX_POINTS}");
        reader.wrong_help(
            &section.place,
            message,
            "list the ones that are needed as `points`",
        );
        return None;
    }
    let mut points = vec![Sizes::new()];
    for (dim, sizes) in axes {
        let with = |point: &Sizes, size: i64| {
            let mut point = point.clone();
            point.insert(dim.to_owned(), size);
            point
        };
        points = (points.iter())
            .flat_map(|point| {
                sizes
                    .iter()
                    .map(|size| with(point, *size))
                    .collect::<Vec<_>>()
            })
            .collect();
    }
    points.sort();
    Some(Buckets {
        points,
        dims,
        place: section.place.clone(),
    })
}

fn points<'t>(
    reader: &mut Reader<'t>,
    section: &Section<'t>,
    list: &KeyValue<'t>,
) -> Option<Buckets> {
    let items = reader.array(list, "tables")?;
    if items.is_empty() {
        reader.wrong_help(
            &list.place,
            format!("{} is empty, which leaves no bucket", list.name),
            "as in `points = [{ batch = 1, seq = 512 }]`",
        );
        return None;
    }
    if items.len() > MAX_POINTS {
        let message = format!(
            "{} has {} buckets, more than {MAX_POINTS}",
            list.name,
            items.len()
        );
        let help = "keep those that requests really have; `dynamic` serves the rest";
        reader.wrong_help(&list.place, message, help);
        return None;
    }
    let mut points = BTreeSet::new();
    let mut dims = BTreeMap::new();
    let mut first: Option<BTreeSet<String>> = None;
    for item in &items {
        let Some(point) = reader.table(item, "a point of `points`") else {
            continue;
        };
        let mut sizes = Sizes::new();
        for (dim, place, field) in point.fields() {
            check_name(reader, dim, &place);
            sizes.insert(dim.to_owned(), positive(reader, &field).unwrap_or(1));
            dims.entry(dim.to_owned()).or_insert(place);
        }
        let names: BTreeSet<String> = sizes.keys().cloned().collect();
        let expected = first.get_or_insert_with(|| names.clone());
        if *expected != names {
            let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
            let message = format!(
                "this point has other dimensions than the first one, `{}`",
                expected.join(" ")
            );
            reader.wrong_help(
                &item.place,
                message,
                "give each point a size for every dimension",
            );
        }
        let name = bucket_name(&sizes);
        if !points.insert(sizes) {
            let message = format!("the bucket {name} is listed twice");
            reader.wrong_help(&item.place, message, "leave one of them out");
        }
    }
    Some(Buckets {
        points: points.into_iter().collect(),
        dims,
        place: section.place.clone(),
    })
}

fn check_name(reader: &mut Reader<'_>, dim: &str, place: &Span) {
    if !is_identifier(dim) {
        let message = format!("`{dim}` is not the name of a dimension");
        reader.wrong_help(place, message, NAMES);
    }
}

/// Checks that the inputs and the buckets have the same dimensions and that every input can exist.
pub(super) fn check(
    reader: &mut Reader<'_>,
    module: &Section<'_>,
    (inputs, states): (&Inputs, &States),
    buckets: Option<&Buckets>,
) {
    let mut used = BTreeSet::new();
    let own = inputs.iter().map(|(input, places)| {
        let what = format!("input `{}`", input.name);
        (what, &input.shape[..], places)
    });
    let kept = states.iter().filter_map(|(state, places)| {
        let what = format!("state `{}`", state.name);
        Some((what, state.shape.as_deref()?, places))
    });
    for (what, shape, places) in own.chain(kept) {
        for (dim, place) in shape.iter().zip(places) {
            let Dim::Named(name) = dim else { continue };
            let known = buckets.is_some_and(|buckets| buckets.dims.contains_key(name));
            if used.insert(name) && !known {
                let message = format!("dimension `{name}` of {what} has no buckets");
                let help = format!("add `{name} = [1, 8]` to [module.buckets], or write its size");
                reader.wrong_help(place, message, help);
            }
        }
    }
    let no_sizes = [Sizes::new()];
    let points = buckets.map_or(&no_sizes[..], |buckets| &buckets.points);
    for (dim, place) in buckets.iter().flat_map(|buckets| &buckets.dims) {
        if !used.contains(dim) {
            let message = format!("no input has the dimension `{dim}`");
            let help = "a `shape` in [module.inputs] uses it, as `shape = [\"batch\", 3]`";
            reader.wrong_help(place, message, help);
        }
    }
    let place = buckets.map_or(&module.place, |buckets| &buckets.place);
    for (input, _) in inputs {
        if let Some(dim) = input.within.as_ref().filter(|dim| !used.contains(dim)) {
            let message = format!("the range of input `{}` ends at `{dim}`", input.name);
            let help = "an input or a state has the dimension, as `shape = [1, \"context\"]`";
            reader.wrong_help(place, message, help);
        }
    }
    for (input, _) in inputs {
        if let Some(point) = points.iter().find(|point| bytes(input, point).is_none()) {
            let message = format!(
                "input `{}` is larger than memory can be at {}",
                input.name,
                bucket_name(point)
            );
            reader.wrong_help(place, message, "take out the sizes that are too large");
        }
    }
}

/// Returns the bytes of the input at a bucket, if a machine can address that many.
fn bytes(input: &super::InputSpec, sizes: &Sizes) -> Option<i64> {
    let element = i64::try_from(input.dtype.size()).ok()?;
    let layout = input.sized(sizes).layout;
    (layout.shape.iter())
        .try_fold(element, |bytes, size| bytes.checked_mul(*size))
        .filter(|bytes| *bytes < 1 << 47)
}
