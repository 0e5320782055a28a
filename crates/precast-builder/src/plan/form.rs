//! The programs of a module.
//!
//! | module | programs |
//! |---|---|
//! | compiled | one for each bucket; with `dynamic`, one more for every size within bounds from 2, and one for each set of dynamic dimensions at size 1 |
//! | left to eager | one eager program for each bucket |
//! | a part of a training step | one for each bucket |
//! | both, unless `fail_policy` is `raise` and it is compiled | one eager program for any size, for requests that no bucket covers |

use precast_store::record::{self, Bounds, Sizes, form_name};

use crate::spec::{Backend, Compile, Dynamic, FailPolicy, Module, glob};

/// One program of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    /// The bucket, or the sizes to capture a dynamic program at.
    pub sizes: Sizes,
    /// Bounds of the dynamic dimensions; none for a bucket.
    pub dynamic: Option<record::Dynamic>,
    /// False for a program that only eager runs.
    pub compiled: bool,
    /// Whether the module works without it: it only answers requests that nothing else answers.
    pub optional: bool,
}

impl Form {
    /// Returns its name in `ls`: `batch=8 seq=128`, `dynamic`, `dynamic batch=1`, `eager`.
    pub fn name(&self) -> String {
        form_name(&self.sizes, self.dynamic.as_ref(), self.compiled)
    }

    /// Returns whether it is eager for any size.
    pub fn is_eager(&self) -> bool {
        !self.compiled && self.dynamic.is_some()
    }

    /// Returns the sizes in its key. Eager for any size does not depend on the buckets, so it has separate sizes.
    pub fn key_sizes(&self) -> Sizes {
        if self.is_eager() {
            self.sizes.keys().map(|dim| (dim.clone(), 2)).collect()
        } else {
            self.sizes.clone()
        }
    }

    /// Returns whether a capture supports fewer sizes than requested. A compiled program starts at 2: size 1 has a
    /// separate form.
    pub fn is_narrowed_by(&self, held: &record::Dynamic) -> bool {
        let least = if self.compiled { 2 } else { 1 };
        self.dynamic.iter().flatten().any(|(dim, asked)| {
            let inside = |held: &Bounds| held.min > asked.min.max(least) || held.max < asked.max;
            held.get(dim).is_none_or(inside)
        })
    }

    /// Returns whether a failure with this code leaves it out of its module, or its module out of the model, which is
    /// then reported and no error.
    pub fn left_out(&self, code: &str, settings: &Compile) -> bool {
        self.optional || (!settings.fullgraph && code == "capture")
    }
}

/// Returns the programs of `module` under these settings, buckets first.
pub fn forms(module: &Module, settings: &Compile) -> Vec<Form> {
    let compiled = left_to_eager(module, settings).is_none();
    let mut forms: Vec<Form> = module
        .buckets
        .iter()
        .map(|sizes| Form {
            sizes: sizes.clone(),
            dynamic: None,
            compiled,
            optional: false,
        })
        .collect();
    if module.train.is_some() {
        // No batch of another size: its padding would be in the loss.
        return forms;
    }
    let largest = largest(module);
    let every = || {
        let unbounded = Bounds {
            min: 1,
            max: Bounds::UNBOUNDED,
        };
        largest.keys().map(|dim| (dim.clone(), unbounded)).collect()
    };
    let asked: Option<record::Dynamic> = match &settings.dynamic {
        Dynamic::All(false) => None,
        Dynamic::All(true) => Some(every()),
        // A default also applies to modules without some of its dimensions.
        Dynamic::Dims(dims) => {
            let own = |(dim, _): &(&String, _)| largest.contains_key(*dim);
            let own: record::Dynamic = dims
                .iter()
                .filter(own)
                .map(|(d, b)| (d.clone(), *b))
                .collect();
            (!own.is_empty()).then_some(own)
        }
    };
    let any_size = |dynamic: record::Dynamic, compiled| {
        let at_least = |(dim, size): (&String, &i64)| {
            // torch.export takes sizes from 2 for dynamic ones.
            let least = if dynamic.contains_key(dim) { 2 } else { 1 };
            (dim.clone(), (*size).max(least))
        };
        Form {
            sizes: largest.iter().map(at_least).collect(),
            dynamic: Some(dynamic),
            compiled,
            optional: !compiled,
        }
    };
    if let Some(dims) = &asked
        && compiled
    {
        let form = any_size(dims.clone(), true);
        for one in at_one(&form, dims) {
            if !forms
                .iter()
                .any(|known| known.sizes == one.sizes && known.dynamic == one.dynamic)
            {
                forms.push(one);
            }
        }
        forms.insert(module.buckets.len(), form);
    }
    let falls_back = settings.fail_policy == FailPolicy::FallbackEager || !compiled;
    if falls_back && !largest.is_empty() {
        forms.push(any_size(every(), false));
    }
    forms
}

/// Returns the largest size of each bucketed dimension.
fn largest(module: &Module) -> Sizes {
    let mut largest = Sizes::new();
    for (dim, size) in module.buckets.iter().flatten() {
        let known = largest.entry(dim.clone()).or_insert(*size);
        *known = (*known).max(*size);
    }
    largest
}

/// Returns forms of a dynamic program for size 1: one for each set of the dimensions whose minimum is 1. A tensor with
/// one element in an axis broadcasts, so each set has a separate graph.
fn at_one(form: &Form, dims: &record::Dynamic) -> Vec<Form> {
    let mut found = vec![form.clone()];
    for dim in dims
        .iter()
        .filter(|(_, bounds)| bounds.min <= 1)
        .map(|(dim, _)| dim)
    {
        for one in found.clone() {
            let mut dynamic = one.dynamic.unwrap_or_default();
            dynamic.remove(dim);
            let mut sizes = one.sizes;
            sizes.insert(dim.clone(), 1);
            found.push(Form {
                sizes,
                dynamic: (!dynamic.is_empty()).then_some(dynamic),
                compiled: true,
                optional: true,
            });
        }
    }
    found.split_off(1)
}

/// Returns why the spec leaves a module to eager, if it does.
pub fn left_to_eager(module: &Module, settings: &Compile) -> Option<String> {
    if !settings.enabled {
        return Some("`enabled` is false".to_owned());
    }
    if settings.backend == Backend::Eager {
        return Some("`backend` is `eager`".to_owned());
    }
    let path = &module.path;
    let blocked = settings.blocklist.iter();
    if let Some(glob) = blocked.into_iter().find(|glob| glob::matches(glob, path)) {
        return Some(format!("`blocklist` has `{glob}`"));
    }
    (!settings.compiles(path)).then(|| "`allowlist` does not have it".to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::spec::{Overrides, Spec};

    fn names(settings: &str) -> String {
        names_of(settings, r#""batch", 4"#, "batch = [1, 8]")
    }

    fn names_of(settings: &str, shape: &str, buckets: &str) -> String {
        let text = format!(
            "schema = 1\n[model]\nname = \"m\"\nentry = \"m:load\"\n[[module]]\nname = \"f\"\npath = \"body\"\n{settings}\n\
             [module.inputs]\nx = {{ dtype = \"float32\", shape = [{shape}] }}\n\
             [module.buckets]\n{buckets}\n"
        );
        let spec = Spec::parse(&text, Path::new("precast.toml"))
            .map_err(|e| e.render())
            .unwrap();
        let module = &spec.modules[0];
        let settings = spec.settings(module, &Overrides::default(), &Overrides::default());
        let forms = forms(module, &settings.compile);
        let show = |form: &Form| format!("{}{}", form.name(), if form.compiled { "" } else { "*" });
        forms.iter().map(show).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn every_module_has_its_buckets_and_what_the_ladder_needs() {
        insta::assert_snapshot!(names(""), @"batch=1, batch=8, eager*");
        insta::assert_snapshot!(names("dynamic = true"), @"batch=1, batch=8, dynamic, eager*");
        let wide = "dynamic = true\nfail_policy = \"raise\"";
        insta::assert_snapshot!(names_of(wide, r#""batch", "seq""#, "batch = [1, 8]\nseq = [4]"), @"batch=1 seq=4, batch=8 seq=4, dynamic, dynamic batch=1, dynamic seq=1, batch=1 seq=1");
        let one = "dynamic.batch = { min = 1, max = 9 }\nfail_policy = \"raise\"";
        insta::assert_snapshot!(names_of(one, r#""batch", "seq""#, "batch = [8]\nseq = [1]"), @"batch=8 seq=1, dynamic seq=1, batch=1 seq=1");
        insta::assert_snapshot!(names("fail_policy = \"raise\""), @"batch=1, batch=8");
        insta::assert_snapshot!(names("dynamic.batch = { min = 1, max = 9 }"), @"batch=1, batch=8, dynamic, eager*");
        insta::assert_snapshot!(names("enabled = false"), @"batch=1*, batch=8*, eager*");
        insta::assert_snapshot!(names("blocklist = [\"body\"]\nfail_policy = \"raise\""), @"batch=1*, batch=8*, eager*");
    }
}
