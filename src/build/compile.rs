//! Compiling one artifact, once across the workers of this build and across builds.

use std::time::Duration;

use super::{
    BuildError,
    jobs::{Seat, Shared, Work},
    protocol::{Compiled, Request},
    task::Compile,
};

/// How long a compile may take.
const COMPILE_LIMIT: Duration = Duration::from_secs(7200);

impl Shared<'_> {
    pub(super) fn compile(
        &self,
        number: usize,
        seat: &mut Seat<'_>,
        compile: Compile,
    ) -> Result<(), BuildError> {
        let key = compile.key;
        let store = self.options.store;
        // Another process may be at it: then its result is ours.
        let mut waiting = |_: &str| !self.crew.stop.is_set();
        let Some(claim) = store.claim(&key, &mut waiting)? else {
            return Err(BuildError::Interrupted);
        };
        let made = match store.keep_artifact(&key)? {
            true => Ok(false),
            false => self.make(number, seat, compile)?,
        };
        drop(claim);
        match made {
            Ok(compiled) => {
                let mut queue = self.lock();
                queue.done.compiled += usize::from(compiled);
                queue.compiled(&key);
                Ok(())
            }
            Err((error, log)) => {
                let mut queue = self.lock();
                // Who asks for it is known when no capture that does is under way.
                while queue.cuts(&key) && !self.crew.stop.is_set() {
                    queue = self.changed(queue);
                }
                let asking = queue.failed(&key, &error.to_string());
                drop(queue);
                let mut asking = asking.into_iter();
                asking.try_for_each(|job| self.fail_with(job, &error, &log))
            }
        }
    }

    /// Compiles and publishes one artifact. The inner error is one of this artifact alone.
    #[allow(clippy::type_complexity)]
    fn make(
        &self,
        number: usize,
        seat: &mut Seat<'_>,
        compile: Compile,
    ) -> Result<Result<bool, (BuildError, Vec<u8>)>, BuildError> {
        let request = Request::Compile {
            file: compile.segment.file.clone(),
            device: self.options.spec.target.device.to_string(),
            isa: self.options.spec.target.isa.clone(),
            mode: compile.set.mode.name().to_owned(),
            options: compile.set.options.clone().into_iter().collect(),
            passes: compile.set.passes.clone(),
            out: self
                .crew
                .scratch
                .join(format!("artifact-{}", compile.key.short())),
        };
        let task = (Work::Compile, &*compile.name);
        let ((answer, log), _) =
            self.asked::<Compiled>(number, seat, task, &request, COMPILE_LIMIT, &|_| ());
        match answer {
            Ok(compiled) => match self.keep(compile, compiled, &log) {
                Ok(()) => Ok(Ok(true)),
                Err(error) if error.ends_build() => Err(error),
                Err(error) => Ok(Err((error, log))),
            },
            Err(error) if error.ends_build() => Err(error),
            Err(error) => Ok(Err((error, log))),
        }
    }
}
