//! The folder with the checkpoints of one run: locked by it, and continued from its newest file.
//!
//! ```text
//! run
//! ├── step-0000000200.safetensors   the last two; older ones are removed
//! ├── step-0000000400.safetensors
//! └── train.lock                    locked by the run, with its process ID
//! ```
//!
//! A checkpoint has the settings that decide the losses: learning rate, batches of an update, data. A run that continues
//! under others says so.

use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::{
    super::exit::{Refusal, warning},
    TrainArgs,
    data::Data,
};
use crate::runtime::{RuntimeError, Trainer, command::tensors::Draft};

/// The number of checkpoints that are kept.
const KEPT: usize = 2;

const LOCK: &str = "train.lock";

pub(super) struct Folder {
    path: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
}

impl Folder {
    /// Opens a folder, made if it is not there, for this run alone. Removes what killed runs have left.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        fs::create_dir_all(path).with_context(|| format!("can't make the folder `{shown}`"))?;
        let folder = Self {
            path: path.to_owned(),
            _lock: locked(path)?,
        };
        for entry in folder.entries()? {
            let name = entry.file_name();
            if name.is_some_and(|name| name.to_string_lossy().starts_with(Draft::PREFIX)) {
                // One that stays costs space only.
                let _ = fs::remove_dir_all(entry);
            }
        }
        Ok(folder)
    }

    /// Loads the newest checkpoint. Returns its path.
    pub fn resume(
        &self,
        args: &TrainArgs,
        trainer: &mut Trainer<'_>,
        settings: &BTreeMap<&str, String>,
    ) -> Result<Option<PathBuf>> {
        let mut all = self.saved()?;
        let Some(newest) = all.pop() else {
            return Ok(None);
        };
        let loaded = trainer.load(&newest);
        let same = loaded.map_err(|error| self.refused(error, &all, trainer))?;
        let progress = trainer.progress().clone();
        let shown = newest.display();
        if progress.seed != args.seed {
            let message = format!(
                "`{shown}` was written with `--seed {}`, not {}",
                progress.seed, args.seed
            );
            return Err(Refusal::usage(message, "name the same seed, or another folder").into());
        }
        if progress.step > args.steps {
            let message = format!(
                "`{shown}` is of step {}, and `--steps` is {}",
                progress.step, args.steps
            );
            let hint = "name another folder for a new run; a run that continues has more steps";
            return Err(Refusal::usage(message, hint).into());
        }
        note!("continues from step {}: `{shown}`", progress.step);
        if progress.step == args.steps {
            warning(&format!(
                "nothing is trained: `{shown}` has all steps of `--steps {}`",
                args.steps
            ));
        }
        if !same {
            note!("other programs wrote it: losses may differ from those of an unbroken run");
        }
        for (name, now) in settings {
            let before = progress.notes.get(*name).filter(|before| *before != now);
            if let Some(before) = before {
                warning(&format!(
                    "the run continues with {name} {now}, and had {before}: losses differ from those of an unbroken run"
                ));
            }
        }
        Ok(Some(newest))
    }

    /// Returns the error for a newest checkpoint that can't be used. Offers the newest of the earlier ones that can.
    fn refused(
        &self,
        error: RuntimeError,
        earlier: &[PathBuf],
        trainer: &mut Trainer<'_>,
    ) -> anyhow::Error {
        let RuntimeError::Checkpoint { path, .. } = &error else {
            return error.into();
        };
        let mut earlier = earlier.iter().rev();
        let Some(sound) = earlier.find(|path| trainer.may_load(path).is_ok()) else {
            return error.into();
        };
        let hint = format!(
            "`{}` can be used: remove `{}`, and the same command continues from there",
            sound.display(),
            path.display()
        );
        Refusal::failed(error.to_string(), hint).into()
    }

    /// Writes a checkpoint, and removes those before the last ones. Returns its path.
    pub fn save(&self, trainer: &mut Trainer<'_>) -> Result<PathBuf> {
        let step = trainer.progress().step;
        let path = self.path.join(format!("step-{step:010}.safetensors"));
        trainer.save(&path)?;
        let all = self.saved()?;
        for old in &all[..all.len().saturating_sub(KEPT)] {
            // One that stays costs space only.
            let _ = fs::remove_file(old);
        }
        Ok(path)
    }

    /// Returns the checkpoints, the newest last.
    fn saved(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for path in self.entries()? {
            let name = path.file_name().and_then(|name| name.to_str());
            let number = name
                .and_then(|name| name.strip_prefix("step-")?.strip_suffix(".safetensors"))
                .and_then(|number| number.parse::<u64>().ok());
            found.extend(number.map(|number| (number, path.clone())));
        }
        found.sort_unstable();
        Ok(found.into_iter().map(|(_, path)| path).collect())
    }

    fn entries(&self) -> Result<Vec<PathBuf>> {
        let what = || format!("can't read the folder `{}`", self.path.display());
        let entries = fs::read_dir(&self.path).with_context(what)?;
        entries
            .map(|entry| Ok(entry.with_context(what)?.path()))
            .collect()
    }
}

/// Locks a folder for this process.
fn locked(folder: &Path) -> Result<File> {
    let path = folder.join(LOCK);
    let what = || format!("can't lock `{}`", path.display());
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let mut file = options.open(&path).with_context(what)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut owner = String::new();
            let read = (&file).take(32).read_to_string(&mut owner);
            let owner = match owner.trim() {
                pid if read.is_ok() && !pid.is_empty() => format!("process {pid}"),
                _ => "another process".to_owned(),
            };
            let message = format!("{owner} is training into `{}`", folder.display());
            let hint = "name another folder, or wait for its end: one run removes the checkpoints of the other";
            return Err(Refusal::usage(message, hint).into());
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(what),
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .with_context(what)?;
    Ok(file)
}

/// Returns the settings that decide the losses of a run, by name.
pub(super) fn settings(
    args: &TrainArgs,
    data: &Data,
    devices: u64,
) -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        ("the learning rate", args.schedule.named(args)),
        (
            "batches of an update:",
            (args.accumulate * devices).to_string(),
        ),
        ("the data", data.identity().to_owned()),
    ])
}
