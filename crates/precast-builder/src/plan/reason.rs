//! Reasons why a program is built or found, as values with the old and the new state.
//!
//! A record has its explained key. The comparison with the current explained key gives [`Field`]s ([`super::diff`], for
//! `precast diff`); these give [`Reason`]s ([`reasons`], for `plan` and `why`). Both need only the explanations, so
//! they also work for records of older versions, whose keys had other fields.

use std::{collections::BTreeSet, fmt};

use precast_store::Digest;
use serde::Serialize;
use serde_json::{Map, Value};

use super::diff::{Field, bare, compare, shown};

/// The reason why a program or an artifact has to be built, or why a change had no effect.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "reason", rename_all = "kebab-case")]
pub enum Reason {
    /// Nothing of this name and bucket was built before.
    NeverBuilt,
    /// The last attempt with this key failed.
    FailedBefore {
        /// One line of the error.
        message: String,
    },
    /// It was built, and a file that it needs is missing or damaged.
    ObjectMissing {
        /// Kind of the file: `program`, `artifact`, `object` or `log`.
        what: String,
        /// Digest or key that names the file.
        object: Digest,
    },
    /// The imports of the entry are unknown: another entry, or its torch or the GPU is missing.
    EntryUnknown,
    /// Keys are encoded by other rules.
    FormatChanged {
        /// Version of the format then.
        old: Value,
        /// Version of the format now.
        new: Value,
    },
    /// The worker captures or compiles in another way.
    ProtocolChanged {
        /// Version of the worker then.
        old: Value,
        /// Version of the worker now.
        new: Value,
    },
    /// A file that the entry imports or reads has another content.
    SourceChanged {
        /// Relative to the spec's folder, with `/`.
        path: String,
    },
    /// The entry imports or reads a file that it did not before.
    SourceAdded {
        /// Relative to the spec's folder, with `/`.
        path: String,
    },
    /// The entry no longer imports or reads a file.
    SourceRemoved {
        /// Relative to the spec's folder, with `/`.
        path: String,
    },
    /// An imported package has another version.
    PackageChanged {
        /// Name of the distribution.
        name: String,
        /// Version then.
        old: Value,
        /// Version now.
        new: Value,
    },
    /// The entry imports a package that it did not before.
    PackageAdded {
        /// Name of the distribution.
        name: String,
        /// Version now.
        version: Value,
    },
    /// The entry no longer imports a package.
    PackageRemoved {
        /// Name of the distribution.
        name: String,
        /// Version then.
        version: Value,
    },
    /// The build is for another machine, or another torch.
    TargetChanged {
        /// Name of the field of the target, as `isa`.
        field: String,
        /// Value then.
        old: Value,
        /// Value now.
        new: Value,
    },
    /// An option of the compiler has another value.
    OptionChanged {
        /// Inductor's dotted name, or `attention`.
        name: String,
        /// Value then; null where it was not set.
        old: Option<Value>,
        /// Value now; null where it is not set.
        new: Option<Value>,
    },
    /// A field of the spec: `mode`, `entry`, `regions`, …
    SettingChanged {
        /// Name of the field.
        name: String,
        /// Value then.
        old: Value,
        /// Value now.
        new: Value,
    },
    /// An input has another dtype, shape, dimension, padding value or range.
    InputChanged {
        /// Name of the input.
        name: String,
        /// Name of the field, as `shape`.
        field: String,
        /// Value then.
        old: Value,
        /// Value now.
        new: Value,
    },
    /// The module takes an input that it did not before.
    InputAdded {
        /// Name of the input.
        name: String,
    },
    /// The module no longer takes an input.
    InputRemoved {
        /// Name of the input.
        name: String,
    },
    /// The module takes the same inputs in another order.
    InputsReordered,
    /// A graph pass has another source.
    PassChanged {
        /// The pass, as `module:callable`.
        callable: String,
    },
    /// The module computes something else.
    GraphChanged,
    /// Layouts of an artifact's inputs, outputs or constants.
    LayoutChanged {
        /// `inputs`, `outputs` or `constants`.
        what: String,
    },
    /// A field that this version of precast does not know.
    FieldChanged {
        /// The field with its old and new value.
        field: Field,
    },
    /// A remote has this program with another key.
    OtherInRemote {
        /// Name of the remote.
        remote: String,
        /// What differs: then is the remote's, now is this build's.
        reasons: Vec<Reason>,
    },
    /// Nothing was rebuilt: the entry neither imports nor reads the changed file.
    NotASource {
        /// Relative to the spec's folder, with `/`.
        path: String,
    },
    /// Nothing was rebuilt: nothing changed.
    Unchanged,
}

impl Reason {
    /// Returns whether this leaves every artifact unchanged. It then only changes a program's record, such as names and
    /// padding values.
    pub fn leaves_artifacts(&self) -> bool {
        match self {
            Self::SettingChanged { name, .. } => matches!(&**name, "model" | "module" | "padding"),
            Self::InputChanged { field, .. } => field == "pad",
            _ => false,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverBuilt => write!(f, "never built"),
            Self::FailedBefore { message } => write!(f, "failed before: {message}"),
            Self::ObjectMissing { what, object } => {
                write!(f, "{what} `{}` is missing or damaged", object.short())
            }
            Self::EntryUnknown => write!(f, "what the entry imports has to be found out anew"),
            Self::FormatChanged { old, new } => changed(f, "the key format", old, new),
            Self::ProtocolChanged { old, new } => changed(f, "the worker protocol", old, new),
            Self::SourceChanged { path } => write!(f, "`{path}` changed"),
            Self::SourceAdded { path } => write!(f, "`{path}` became a source"),
            Self::SourceRemoved { path } => write!(f, "`{path}` is no source any more"),
            Self::PackageChanged { name, old, new } => {
                changed(f, &format!("package `{name}`"), old, new)
            }
            Self::PackageAdded { name, version } => {
                write!(f, "package `{name}` {} is imported now", bare(version))
            }
            Self::PackageRemoved { name, version } => {
                write!(
                    f,
                    "package `{name}` {} is not imported any more",
                    bare(version)
                )
            }
            Self::TargetChanged { field, old, new } => match field.as_str() {
                "sm" => write!(f, "the target changed: {} -> {}", chip(old), chip(new)),
                "isa" | "device" | "arch" | "os" => changed(f, "the target", old, new),
                "features" => write!(
                    f,
                    "the target changed: CPU features {}",
                    gained_and_lost(old, new)
                ),
                _ => changed(f, &format!("the target's {field}"), old, new),
            },
            Self::OptionChanged { name, old, new } => {
                write!(
                    f,
                    "option `{name}` changed: {} -> {}",
                    shown(old.as_ref()),
                    shown(new.as_ref())
                )
            }
            // Programs of one bucket have the same sizes: only a program for any size is captured at others.
            Self::SettingChanged { name, old, new } if name == "sizes" => {
                changed(f, "the largest bucket", old, new)
            }
            Self::SettingChanged { name, old, new } => changed(f, &format!("`{name}`"), old, new),
            Self::InputChanged {
                name,
                field,
                old,
                new,
            } => changed(f, &format!("`{field}` of input `{name}`"), old, new),
            Self::InputAdded { name } => write!(f, "input `{name}` was added"),
            Self::InputRemoved { name } => write!(f, "input `{name}` was removed"),
            Self::InputsReordered => write!(f, "the order of the inputs changed"),
            Self::PassChanged { callable } => write!(f, "pass `{callable}` changed"),
            Self::GraphChanged => write!(f, "the captured graph changed"),
            Self::LayoutChanged { what } => write!(f, "the layout of the {what} changed"),
            Self::FieldChanged { field } => write!(f, "{field}"),
            Self::OtherInRemote { remote, reasons } => {
                let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
                write!(
                    f,
                    "it is not in {remote}: since its release {}",
                    reasons.join(", ")
                )
            }
            Self::NotASource { path } => write!(f, "`{path}` is not a source"),
            Self::Unchanged => write!(f, "nothing changed"),
        }
    }
}

fn changed(f: &mut fmt::Formatter<'_>, what: &str, old: &Value, new: &Value) -> fmt::Result {
    write!(
        f,
        "{what} changed: {} -> {}",
        shown(Some(old)),
        shown(Some(new))
    )
}

fn chip(value: &Value) -> String {
    match value {
        Value::Null => "`cpu`".to_owned(),
        sm => format!("`sm_{}`", bare(sm)),
    }
}

/// Returns `+avx512f -sse4a`.
fn gained_and_lost(old: &Value, new: &Value) -> String {
    let names = |value: &Value| -> BTreeSet<String> {
        value.as_array().into_iter().flatten().map(bare).collect()
    };
    let (old, new) = (names(old), names(new));
    let gained = new.difference(&old).map(|name| format!("+{name}"));
    let lost = old.difference(&new).map(|name| format!("-{name}"));
    let all: Vec<String> = gained.chain(lost).collect();
    format!("`{}`", all.join(" "))
}

/// Returns the reasons why the key `new` of a thing differs from its key `old`, most specific first; empty if both are
/// equal.
pub fn reasons(old: &Value, new: &Value) -> Vec<Reason> {
    let mut found = Vec::new();
    let empty = Map::new();
    let (old, new) = (
        old.as_object().unwrap_or(&empty),
        new.as_object().unwrap_or(&empty),
    );
    for (name, old, new) in pairs(old, new) {
        match name.as_str() {
            "common" => {
                let (old, new) = (object(&old), object(&new));
                for (name, old, new) in pairs(&old, &new) {
                    field(&mut found, &["common"], &name, &old, &new);
                }
            }
            _ => field(&mut found, &[], &name, &old, &new),
        }
    }
    found.sort_by_key(rank);
    found
}

/// Reads one top-level field of a key, or one of the fields that its model shares.
fn field(
    found: &mut Vec<Reason>,
    above: &[&str],
    name: &str,
    old: &Option<Value>,
    new: &Option<Value>,
) {
    if old == new {
        return;
    }
    let plain = |value: &Option<Value>| value.clone().unwrap_or_default();
    let changed = || {
        let pairs = pairs(&object(old), &object(new)).into_iter();
        pairs.filter(|(_, old, new)| old != new)
    };
    match name {
        "format" => found.push(Reason::FormatChanged {
            old: plain(old),
            new: plain(new),
        }),
        "protocol" => found.push(Reason::ProtocolChanged {
            old: plain(old),
            new: plain(new),
        }),
        "sources" => found.extend(changed().map(|(path, old, new)| match (old, new) {
            (Some(_), Some(_)) => Reason::SourceChanged { path },
            (None, _) => Reason::SourceAdded { path },
            (_, None) => Reason::SourceRemoved { path },
        })),
        "packages" => found.extend(changed().map(|(name, old, new)| match (old, new) {
            (Some(old), Some(new)) => Reason::PackageChanged { name, old, new },
            (Some(version), None) => Reason::PackageRemoved { name, version },
            (None, version) => Reason::PackageAdded {
                name,
                version: version.unwrap_or_default(),
            },
        })),
        "target" => found.extend(changed().map(|(field, old, new)| Reason::TargetChanged {
            field,
            old: old.unwrap_or_default(),
            new: new.unwrap_or_default(),
        })),
        "options" => {
            let changed = changed();
            found.extend(changed.map(|(name, old, new)| Reason::OptionChanged { name, old, new }));
        }
        "inputs" if named(old) || named(new) => inputs(found, old, new),
        "inputs" | "outputs" | "constants" if old.is_some() && new.is_some() => {
            found.push(Reason::LayoutChanged {
                what: name.to_owned(),
            });
        }
        "graph" => found.push(Reason::GraphChanged),
        "passes" => passes(found, &plain(old), &plain(new)),
        "compiles" | "dynamic" | "backend" | "mode" | "model" | "entry" | "samples" | "context"
        | "module" | "path" | "method" | "state" | "sizes" | "regions" | "padding" | "tuned"
        | "train" | "pair" | "weights" => found.push(Reason::SettingChanged {
            name: name.to_owned(),
            old: plain(old),
            new: plain(new),
        }),
        _ => {
            let path = above.iter().copied().chain([name]);
            let mut path: Vec<String> = path.map(str::to_owned).collect();
            let mut fields = Vec::new();
            compare(&mut path, old.as_ref(), new.as_ref(), &mut fields);
            let fields = fields.into_iter();
            found.extend(fields.map(|field| Reason::FieldChanged { field }));
        }
    }
}

/// Returns whether these are a module's inputs: with names, where an artifact has layouts only.
fn named(list: &Option<Value>) -> bool {
    match list {
        Some(Value::Array(items)) => items.first().is_some_and(|item| item.get("dims").is_some()),
        _ => false,
    }
}

fn inputs(found: &mut Vec<Reason>, old: &Option<Value>, new: &Option<Value>) {
    let items = |list: &Option<Value>| -> Vec<(String, Map<String, Value>)> {
        let items = list.iter().filter_map(Value::as_array).flatten();
        items
            .map(|item| {
                (
                    item.get("name").map(bare).unwrap_or_default(),
                    object(&Some(item.clone())),
                )
            })
            .collect()
    };
    let (old, new) = (items(old), items(new));
    let get = |list: &[(String, Map<String, Value>)], name: &str| {
        list.iter().find(|(n, _)| n == name).cloned()
    };
    for (name, before) in &old {
        let Some((_, after)) = get(&new, name) else {
            found.push(Reason::InputRemoved { name: name.clone() });
            continue;
        };
        for (field, old, new) in pairs(before, &after) {
            // The stride follows the shape, and bucketed axes follow the bucket.
            let follows = match &*field {
                "stride" => before.get("shape") != after.get("shape"),
                "shape" => fixed_axes(before) == fixed_axes(&after),
                _ => false,
            };
            if old != new && !follows {
                found.push(Reason::InputChanged {
                    name: name.clone(),
                    field,
                    old: old.unwrap_or_default(),
                    new: new.unwrap_or_default(),
                });
            }
        }
    }
    for (name, _) in new.iter().filter(|(name, _)| get(&old, name).is_none()) {
        found.push(Reason::InputAdded { name: name.clone() });
    }
    let common = |list: &[(String, Map<String, Value>)],
                  other: &[(String, Map<String, Value>)]|
     -> Vec<String> {
        list.iter()
            .map(|(name, _)| name.clone())
            .filter(|name| get(other, name).is_some())
            .collect()
    };
    if common(&old, &new) != common(&new, &old) {
        found.push(Reason::InputsReordered);
    }
}

/// Returns the sizes of an input's axes, without those of bucketed dimensions.
fn fixed_axes(input: &Map<String, Value>) -> Vec<Option<Value>> {
    let list = |name: &str| {
        let list = input.get(name).and_then(Value::as_array);
        list.cloned().unwrap_or_default()
    };
    let axes = list("shape").into_iter().zip(list("dims"));
    axes.map(|(size, dim)| dim.is_null().then_some(size))
        .collect()
}

/// Passes are names in a request key, and names with source digests in an artifact key.
fn passes(found: &mut Vec<Reason>, old: &Value, new: &Value) {
    let name = |pass: &Value| pass.get("callable").map_or_else(|| bare(pass), bare);
    let list = |passes: &Value| passes.as_array().cloned().unwrap_or_default();
    let (old, new) = (list(old), list(new));
    let names = |passes: &[Value]| passes.iter().map(name).collect::<Vec<_>>();
    if names(&old) != names(&new) {
        found.push(Reason::SettingChanged {
            name: "passes".to_owned(),
            old: names(&old).into(),
            new: names(&new).into(),
        });
        return;
    }
    let differ = old.iter().zip(&new).filter(|(old, new)| old != new);
    found.extend(differ.map(|(old, _)| Reason::PassChanged {
        callable: name(old),
    }));
}

/// Returns the entries of both maps as `(name, old, new)`: those of the old map in its order, then the new ones.
fn pairs(
    old: &Map<String, Value>,
    new: &Map<String, Value>,
) -> Vec<(String, Option<Value>, Option<Value>)> {
    let of_old = old
        .iter()
        .map(|(name, value)| (name.clone(), Some(value.clone()), new.get(name).cloned()));
    let of_new = new.iter().filter(|(name, _)| !old.contains_key(*name));
    of_old
        .chain(of_new.map(|(name, value)| (name.clone(), None, Some(value.clone()))))
        .collect()
}

fn object(value: &Option<Value>) -> Map<String, Value> {
    value
        .as_ref()
        .and_then(Value::as_object)
        .cloned()
        .unwrap_or_default()
}

/// The order in which people look: their edits, then the machine, then the consequences.
fn rank(reason: &Reason) -> u8 {
    match reason {
        Reason::NeverBuilt
        | Reason::FailedBefore { .. }
        | Reason::ObjectMissing { .. }
        | Reason::EntryUnknown => 0,
        Reason::SourceChanged { .. }
        | Reason::SourceAdded { .. }
        | Reason::SourceRemoved { .. } => 1,
        Reason::OptionChanged { .. }
        | Reason::SettingChanged { .. }
        | Reason::InputChanged { .. }
        | Reason::InputAdded { .. }
        | Reason::InputRemoved { .. }
        | Reason::InputsReordered
        | Reason::PassChanged { .. } => 2,
        Reason::TargetChanged { .. } => 3,
        Reason::PackageChanged { .. }
        | Reason::PackageAdded { .. }
        | Reason::PackageRemoved { .. } => 4,
        Reason::GraphChanged | Reason::LayoutChanged { .. } => 5,
        Reason::FormatChanged { .. }
        | Reason::ProtocolChanged { .. }
        | Reason::FieldChanged { .. } => 6,
        Reason::OtherInRemote { .. } | Reason::NotASource { .. } | Reason::Unchanged => 7,
    }
}

#[cfg(test)]
mod tests;
