//! The plan of a build: the programs of a spec, their keys, and the reason why each one is missing or found.
//!
//! The plan reads the project's sources and the store, and changes nothing. A program is one module at one bucket,
//! named by its *request key*: from the spec entry, the digests of all source files of the model, the versions of the
//! installed packages that it imports, and the target. The files and packages are found by the first import of the
//! entry and recorded in the model's latest release, so that an unchanged build is planned without Python.
//!
//! | file | holds |
//! |---|---|
//! | `key` | the fields of a request key and of an artifact key |
//! | `reason` | the reasons why a key changed |
//! | `diff` | the fields of two explained keys that differ |
//! | `form` | the programs of a module |
//! | `history` | the previous program of each module and bucket |
//! | `sources` | the digests of the recorded files, and the versions of the packages |

mod diff;
mod form;
mod history;
mod key;
mod reason;
mod sources;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    path::PathBuf,
};

use precast_store::{
    Digest, Store, StoreError, Target,
    canon::Shared,
    record::{Entry, Program, Release},
};
use serde_json::Value;

pub use self::{
    diff::{Field, diff},
    form::{Form, forms},
    history::{History, Place, names},
    key::{Common, HeldKey, RequestKey},
    reason::{Reason, reasons},
    sources::{StatCache, bystanders, changed_source, digest_of, file_digest, known, refresh},
};
pub(crate) use self::{
    form::left_to_eager,
    key::{ArtifactKey, PROTOCOL, Pass},
    sources::known_of,
};

use crate::spec::{CommandLine, Compile, Effective, Module, Origin, Overrides, Spec};

/// The code of a failure by lack of memory, of the device or the host.
pub(crate) const OUT_OF_MEMORY: &str = "out_of_memory";

/// The reason why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A source of the model can't be read.
    #[error("can't read `{}`", path.display())]
    Source {
        /// Path of the source.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// `get_torch_compile_config()` of a submodule returns keys that `[compile]` has not.
    #[error(
        "submodule `{path}` declares a compile config for `{method}` that can't be used: {message}"
    )]
    Declared {
        /// FQN of the submodule.
        path: String,
        /// Name of the method that it is for.
        method: String,
        /// The first problem.
        message: String,
    },
    /// The glob of `--only` matches no program of the spec.
    #[error("no module or bucket matches `{0}`")]
    NothingMatches(String),
    /// The store can't be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl PlanError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> String {
        let text = match self {
            Self::Source { .. } => "it is a source of the model: put it back, or let it be read",
            Self::Declared { .. } => {
                "`get_torch_compile_config()` returns method -> keys of [compile]"
            }
            Self::NothingMatches(_) => {
                "`precast plan` without `--only` lists every module and bucket"
            }
            Self::Store(error) => error.hint(),
        };
        text.to_owned()
    }
}

/// One program of a spec.
#[derive(Clone, Debug)]
pub struct Item {
    /// Index into [`Spec::modules`].
    pub module: usize,
    /// Its bucket, or its dynamic dimensions, and whether it is compiled.
    pub form: Form,
    /// Settings of its module, with the layer of each.
    pub settings: Effective,
    /// The reason why the spec leaves its module to eager, if it does.
    pub left_to_eager: Option<String>,
    /// The state of the program in the store.
    pub state: State,
    /// Its place among all programs of the spec.
    pub place: usize,
}

/// The state of a program in the store.
#[derive(Clone, Debug)]
pub enum State {
    /// It is in the store.
    Hit {
        /// The request key.
        id: Digest,
    },
    /// It is not; the key is unknown while the entry has never been imported.
    Miss {
        /// The request key and its explanation.
        key: Option<(Digest, Value)>,
        /// The reasons why it is missing, the strongest one first.
        reasons: Vec<Reason>,
        /// The previous program.
        before: Option<Digest>,
        /// Whether every artifact is known to exist: the program is captured, and nothing is compiled for it.
        capture_only: bool,
    },
    /// The module works without it, and the last attempt with the same key failed.
    Skipped {
        /// The request key.
        key: Digest,
        /// The error of the last attempt.
        why: String,
    },
}

/// The programs of a spec, and the state of each.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The programs, in the order of the spec.
    pub items: Vec<Item>,
    /// The programs of the spec that [`PlanRequest::only`] leaves out. A release keeps the existing ones.
    pub beyond: Vec<Item>,
    /// The sources and the target of the plan; none while the entry has never been imported.
    pub known: Option<Known>,
    /// The model's latest release, if there is one.
    pub release: Option<Release>,
}

/// The outside facts that keys are computed from.
#[derive(Clone, Debug)]
pub struct Known {
    /// The result of the last import of the entry.
    pub entry: Entry,
    /// The target.
    pub target: Target,
}

impl Item {
    /// Returns `encode batch=1 seq=32`, and `answer(ids, image) batch=1` where the module has variants.
    pub fn name(&self, spec: &Spec) -> String {
        format!("{} {}", spec.title(self.module), self.form.name())
    }

    /// Returns the program, if it is in the store.
    pub fn hit(&self) -> Option<Digest> {
        match self.state {
            State::Hit { id } => Some(id),
            _ => None,
        }
    }

    /// Returns whether a release is to have it.
    pub fn wanted(&self) -> bool {
        !matches!(self.state, State::Skipped { .. })
    }

    /// Returns whether eager answers uncovered requests by the default of `fail_policy`, and not because the spec
    /// requests it.
    pub fn eager_unasked(&self) -> bool {
        self.form.is_eager()
            && self.left_to_eager.is_none()
            && self.settings.origin("fail_policy") == Origin::BuiltIn
    }
}

impl Plan {
    /// Returns the items that must be made.
    pub fn missing(&self) -> impl Iterator<Item = &Item> {
        self.items
            .iter()
            .filter(|item| matches!(item.state, State::Miss { .. }))
    }

    /// Returns the existing programs.
    pub fn hits(&self) -> Vec<Digest> {
        self.items.iter().filter_map(Item::hit).collect()
    }

    /// Returns the existing programs, also beyond [`PlanRequest::only`].
    pub fn found(&self) -> Vec<Digest> {
        let all = self.items.iter().chain(&self.beyond);
        all.filter_map(Item::hit).collect()
    }

    /// Returns the number of programs that a release is to have.
    pub fn wanted(&self) -> usize {
        self.items.iter().filter(|item| item.wanted()).count()
    }
}

/// The narrowing of a plan by the caller.
#[derive(Clone, Debug, Default)]
pub struct PlanRequest {
    /// A glob over `module` or `module batch=1 seq=32`.
    pub only: Option<String>,
    /// Settings from the command line.
    pub command_line: CommandLine,
    /// Whether to choose the fastest of several option sets for every compiled program.
    pub tune: bool,
}

/// Plans the build of a spec, from the `known` sources and target.
pub fn plan(
    spec: &Spec,
    store: Option<&Store>,
    known: Option<Known>,
    request: &PlanRequest,
) -> Result<Plan, PlanError> {
    let release = match store {
        Some(store) => store.releases().get(&spec.model.name, None)?,
        None => None,
    };
    let unsaved = spec.unsaved();
    let common = known.as_ref().map(|known| {
        let common = Common {
            model: &spec.model.name,
            entry: &spec.model.entry,
            samples: spec.model.samples.as_deref(),
            context: spec.model.context,
            unsaved: &unsaved,
            weights_file: spec.model.weights.file().is_some(),
            sources: &known.entry.sources,
            packages: &known.entry.packages,
            target: &known.target,
        };
        common.shared()
    });
    let mut past = match store {
        Some(store) => Some(Past::new(store, spec, release.as_ref())?),
        None => None,
    };
    let (mut items, mut beyond) = (Vec::new(), Vec::new());
    for (index, module) in spec.modules.iter().enumerate() {
        let declared = match &known {
            Some(known) => declared(module, &known.entry.declared)?,
            None => Overrides::default(),
        };
        let settings = spec.settings(module, &declared, &request.command_line.of(&module.name));
        for form in forms(module, &settings.compile) {
            let text = format!("{} {}", module.name, form.name());
            let only = request.only.as_ref();
            let selected = only.is_none_or(|only| selects(only, &module.name, &text));
            let state = match &common {
                None => never_opened(release.as_ref()),
                Some(common) => {
                    // A program that is not selected does not change.
                    let tune = request.tune && selected;
                    let program = (module, &form, &settings.compile);
                    let siblings = siblings(spec, module);
                    state(
                        common,
                        program,
                        &spec.modules,
                        tune,
                        siblings,
                        past.as_mut(),
                    )?
                }
            };
            let item = Item {
                module: index,
                left_to_eager: left_to_eager(module, &settings.compile),
                form,
                settings: settings.clone(),
                state,
                place: items.len() + beyond.len(),
            };
            if selected {
                items.push(item);
            } else {
                beyond.push(item);
            }
        }
    }
    match (&request.only, items.is_empty()) {
        (Some(only), true) => Err(PlanError::NothingMatches(only.clone())),
        _ => Ok(Plan {
            items,
            beyond,
            known,
            release,
        }),
    }
}

/// Returns the state of a program while the entry has never been imported.
fn never_opened(release: Option<&Release>) -> State {
    let reason = match release {
        Some(_) => Reason::EntryUnknown,
        None => Reason::NeverBuilt,
    };
    State::Miss {
        key: None,
        reasons: vec![reason],
        before: None,
        capture_only: false,
    }
}

/// Returns the state of a program. It is the state of the tuned program if the program is to be tuned, or if the tuned
/// one exists and no release has the untuned one.
fn state(
    common: &Shared,
    (module, form, settings): (&Module, &Form, &Compile),
    modules: &[Module],
    tune: bool,
    siblings: Vec<BTreeSet<String>>,
    past: Option<&mut Past<'_>>,
) -> Result<State, PlanError> {
    let sizes = form.key_sizes();
    let inputs = module.sized_inputs(&sizes);
    let states = module.sized_state(&sizes, modules);
    let key = RequestKey {
        common,
        module: &module.name,
        path: &module.path,
        method: &module.method,
        inputs: inputs.as_deref(),
        state: &states,
        sizes: &sizes,
        dynamic: form.dynamic.as_ref(),
        compiled: form.compiled,
        regions: &module.regions,
        settings,
        padding: module.padding,
        train: module.train.as_ref(),
        pair: module.pair.as_ref(),
        tuned: false,
    };
    let tuned = RequestKey { tuned: true, ..key };
    // A program that is not compared with eager is not measured.
    let can = form.compiled && settings.healthcheck;
    let plain = key.digest();
    let is_tuned = can
        && (tune
            || match &past {
                Some(past) if !past.current.contains(&plain) => {
                    past.store.records().has_program(&tuned.digest())?
                }
                _ => false,
            });
    let (key, id) = if is_tuned {
        (tuned, tuned.digest())
    } else {
        (key, plain)
    };
    look_up(&key, id, form, siblings, past)
}

fn selects(only: &str, module: &str, text: &str) -> bool {
    let glob = globset::Glob::new(only).map(|glob| glob.compile_matcher());
    glob.is_ok_and(|glob| glob.is_match(module) || glob.is_match(text))
}

/// FQN -> method -> keys of `[compile]`, as the worker gives them.
pub(crate) type Declared = BTreeMap<String, BTreeMap<String, Value>>;

/// Returns the settings that the submodule declares.
pub(crate) fn declared(module: &Module, all: &Declared) -> Result<Overrides, PlanError> {
    let methods = all.get(&module.path);
    let Some(says) = methods.and_then(|methods| methods.get(&module.method)) else {
        return Ok(Overrides::default());
    };
    serde_json::from_value(says.clone()).map_err(|error| PlanError::Declared {
        path: module.path.clone(),
        method: module.method.clone(),
        message: error.to_string(),
    })
}

/// Returns the names of the inputs of a module's other variants.
fn siblings(spec: &Spec, module: &Module) -> Vec<BTreeSet<String>> {
    let names = |module: &Module| module.input_names();
    let own = names(module);
    let variants = spec
        .modules
        .iter()
        .filter(|other| other.name == module.name);
    variants
        .filter_map(names)
        .filter(|names| Some(names) != own.as_ref())
        .collect()
}

/// Returns whether the store has everything that a program calls.
fn has_artifacts(store: &Store, program: &Program) -> Result<bool, StoreError> {
    for step in &program.steps {
        if !store.records().has_artifact(&step.artifact)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns a program. A program with a damaged record counts as missing: the build creates it again.
fn readable(store: &Store, id: &Digest) -> Result<Option<Program>, StoreError> {
    undamaged(store.records().program(id))
}

fn undamaged<T>(read: Result<Option<T>, StoreError>) -> Result<Option<T>, StoreError> {
    match read {
        Err(StoreError::Record { .. }) => Ok(None),
        read => read,
    }
}

/// The earlier builds of a model.
struct Past<'a> {
    store: &'a Store,
    history: History<'a>,
    device: String,
    known: precast_store::Known,
    /// Programs of the newest release. They are current even if tuned ones exist: a rollback selected them.
    current: HashSet<Digest>,
}

impl<'a> Past<'a> {
    fn new(
        store: &'a Store,
        spec: &'a Spec,
        release: Option<&Release>,
    ) -> Result<Self, StoreError> {
        let programs = release.map_or(&[][..], |release| &release.programs);
        Ok(Self {
            store,
            history: History::new(store, &spec.model.name)?,
            device: spec.target.device.to_string(),
            known: store.records().known(programs)?,
            current: programs.iter().copied().collect(),
        })
    }

    /// Returns the kind and the ID of the first file that a program lacks. A program that was never built lacks nothing
    /// but itself, and is none of these.
    fn lacks(&mut self, id: &Digest) -> Result<Lacks, StoreError> {
        Ok(match self.store.records().lacks(id, &mut self.known)? {
            None => Lacks::Nothing,
            Some(("program", _)) if self.store.records().program_row(id)?.is_none() => Lacks::All,
            Some((what, object)) => Lacks::File(Reason::ObjectMissing {
                what: what.to_owned(),
                object,
            }),
        })
    }
}

/// The missing part of a program.
enum Lacks {
    Nothing,
    /// A file that was there.
    File(Reason),
    /// It was never built.
    All,
}

/// Returns whether a program is in the store; if not, with its differences from the previous one.
fn look_up(
    request: &RequestKey<'_>,
    id: Digest,
    form: &Form,
    siblings: Vec<BTreeSet<String>>,
    past: Option<&mut Past<'_>>,
) -> Result<State, PlanError> {
    let Some(past) = past else {
        return Ok(State::Miss {
            key: Some(request.explained()),
            reasons: vec![Reason::NeverBuilt],
            before: None,
            capture_only: false,
        });
    };
    // Only a missing program needs an explanation.
    let mut lost = match past.lacks(&id)? {
        Lacks::Nothing => return Ok(State::Hit { id }),
        Lacks::File(reason) => Some(reason),
        Lacks::All => None,
    };
    let failure = undamaged(past.store.records().failure(&id))?;
    if let Some(log) = failure.as_ref().and_then(|failure| failure.log)
        && !past.store.objects().has_sound(&log)?
    {
        lost.get_or_insert(Reason::ObjectMissing {
            what: "log".to_owned(),
            object: log,
        });
    }
    if let Some(failure) = &failure
        // At the sizes of other buckets it may be captured.
        && failure.sizes == form.sizes
        && lost.is_none()
        && form.left_out(&failure.code, request.settings)
        // Memory may not be short again.
        && failure.code != OUT_OF_MEMORY
    {
        let why = failure.message.clone();
        return Ok(State::Skipped { key: id, why });
    }
    let (_, explained) = request.explained();
    let history = &mut past.history;
    let place = Place {
        module: request.module,
        bucket: &form.name(),
        device: &past.device,
        inputs: request
            .inputs
            .map(|inputs| inputs.iter().map(|input| input.name.clone()).collect()),
        siblings,
    };
    let before = history.previous(&place, None)?;
    let before = match before {
        Some(before) => readable(past.store, &before)?,
        None => None,
    };
    let id_before = before.as_ref().map(|before| before.id);
    let reasons = match (lost, failure, &before) {
        (Some(lost), ..) => vec![lost],
        (None, Some(failure), _) => vec![Reason::FailedBefore {
            message: failure.message,
        }],
        (None, None, Some(before)) => reasons(&before.request, &explained),
        (None, None, None) => vec![Reason::NeverBuilt],
    };
    let capture_only = match &before {
        Some(before) if !reasons.is_empty() => {
            reasons.iter().all(Reason::leaves_artifacts) && has_artifacts(past.store, before)?
        }
        _ => false,
    };
    Ok(State::Miss {
        key: Some((id, explained)),
        reasons,
        before: id_before,
        capture_only,
    })
}
