//! The remote that a build looks into, and pushes to.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use anyhow::{Error, Result};

use super::{
    super::{Context, exit::Refusal, text::count},
    names,
    program::{Program, ask},
};
use crate::{
    Digest,
    build::{
        Remote, Turn,
        progress::{Event as Told, Progress},
    },
    record::{Program as Record, Release},
    store::{
        PartKind,
        transfer::{Event, Leased, Request},
    },
};

/// The heading of options about other machines.
pub(in crate::cli) const MACHINES: &str = "Other machines";

/// The remote of a build and its options.
#[derive(clap::Args)]
pub(in crate::cli) struct RemoteArgs {
    /// Look there for what the store lacks, before it is made: a place or a name as for `pull`
    #[arg(
        long,
        env = "PRECAST_REMOTE",
        value_name = "REMOTE",
        hide_env_values = true,
        help_heading = MACHINES
    )]
    remote: Option<String>,
    /// Push what the build made: of several builds that lack one artifact at once, one makes it
    #[arg(long, requires = "remote", help_heading = MACHINES)]
    push: bool,
    /// Share the build with builders on a Ray cluster, which push: `ray` for the cluster of this machine, or
    /// `ray://HOST:10001`
    #[arg(
        long,
        value_name = "CLUSTER",
        requires = "remote",
        value_parser = cluster,
        help_heading = MACHINES
    )]
    on: Option<String>,
    /// After how many seconds without a sign of its holder a lease is taken over: for tests
    #[arg(
        long,
        env = "PRECAST_LEASE_SECONDS",
        value_name = "SECONDS",
        hide = true
    )]
    lease_seconds: Option<u16>,
}

fn cluster(text: &str) -> Result<String, String> {
    if text == "ray" || text.starts_with("ray://") {
        return Ok(text.to_owned());
    }
    Err("it is `ray` or `ray://HOST:PORT`".to_owned())
}

impl RemoteArgs {
    /// Says that a plan knows this machine alone.
    pub(in crate::cli) fn not_asked(&self) {
        if let Some(place) = &self.remote {
            note!("a plan does not ask {place}: what is missing here may come from there");
        }
    }

    /// Returns whether the user asked for a push.
    pub(in crate::cli) fn pushes(&self) -> bool {
        self.push
    }

    /// Returns the cluster that shares the build.
    pub(in crate::cli) fn cluster(&self) -> Option<&str> {
        self.on.as_deref()
    }

    /// Returns the remote, if one was named.
    pub(in crate::cli) fn of<'a>(
        &self,
        context: &'a Context,
        progress: &'a dyn Progress,
    ) -> Result<Option<BuildRemote<'a>>> {
        let push = self.push || self.on.is_some();
        let Some(place) = self.remote.as_deref().filter(|place| !place.is_empty()) else {
            if push {
                let hint = "name one with `--remote`: PRECAST_REMOTE is empty";
                return Err(Refusal::usage("a push needs a remote", hint).into());
            }
            return Ok(None);
        };
        refuse(place, push)?;
        Ok(Some(BuildRemote {
            name: place.to_owned(),
            place: names::resolve(place, push)?,
            store: std::path::absolute(&context.store)?,
            push,
            lease_seconds: self.lease_seconds,
            failures: AtomicUsize::new(0),
            context,
            progress,
        }))
    }
}

/// Refuses places that a build can't use, before it begins.
fn refuse(place: &str, push: bool) -> Result<(), Refusal> {
    let Some((scheme, rest)) = place.split_once("://") else {
        return Ok(());
    };
    let host = rest.split('/').next().unwrap_or_default();
    if host.contains('@') {
        let message = "the place of the remote has a name or a password in it";
        let hint = "credentials come from the storage's own tools, and are no part of a URL";
        return Err(Refusal::usage(message, hint));
    }
    if push && scheme.starts_with("http") {
        let message = format!("can't push to `{place}`: files over HTTP are only read");
        let hint = "push to the storage behind it, such as `s3://` or `file://`";
        return Err(Refusal::usage(message, hint));
    }
    Ok(())
}

/// After so many failures a remote is left alone.
const FAILURES: usize = 3;

/// A remote of a build.
pub(in crate::cli) struct BuildRemote<'a> {
    name: String,
    place: String,
    store: std::path::PathBuf,
    /// Whether the build may write there.
    push: bool,
    lease_seconds: Option<u16>,
    /// How often it failed: after some failures it is left alone.
    failures: AtomicUsize,
    context: &'a Context,
    progress: &'a dyn Progress,
}

impl BuildRemote<'_> {
    fn cancel(&self) -> &Arc<AtomicBool> {
        &self.context.cancel
    }

    /// Returns where it is, for builders on other machines.
    pub(in crate::cli) fn place(&self) -> &str {
        &self.place
    }

    /// Sends a request. An error is told, and the build goes on; after some errors the remote is left alone.
    fn ask(&self, request: &Request, each: &mut dyn FnMut(Event)) {
        if self.is_left() {
            return;
        }
        if let Err(error) = ask(request, self.cancel(), each) {
            self.fails(&error);
        }
    }

    /// Returns whether it is left alone. One damaged file is not enough.
    fn is_left(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= FAILURES
    }

    fn fails(&self, error: &Error) {
        let before = self.failures.fetch_add(1, Ordering::Relaxed);
        if before < FAILURES && !self.cancel().load(Ordering::Relaxed) {
            let goes_on = match before + 1 {
                FAILURES => "the build goes on without",
                _ => "nothing came from",
            };
            let message = format!("{goes_on} {}: {error:#}", self.name);
            self.progress.event(&Told::Note { message: &message });
        }
    }

    /// Returns what is left to do after the build; none if it may not write.
    pub(in crate::cli) fn push(&self) -> Option<Push> {
        self.push.then(|| Push {
            name: self.name.clone(),
            place: self.place.clone(),
            offer: self.offered(PartKind::Program, &[]),
            failed: self.is_left(),
        })
    }

    fn offered(&self, kind: PartKind, ids: &[Digest]) -> Request {
        Request::Offer {
            store: self.store.clone(),
            remote: self.place.clone(),
            kind,
            ids: ids.to_vec(),
            shared: self.context.shared,
            trusted: self.context.options().trusted,
        }
    }
}

/// The push of a build's result.
pub(in crate::cli) struct Push {
    name: String,
    place: String,
    /// A request without keys.
    offer: Request,
    failed: bool,
}

impl Push {
    /// Sends the result of a build: a whole release as a release, the programs of another one by key.
    pub(in crate::cli) fn send(mut self, release: &Release, context: &Context) -> Result<()> {
        let (model, seq) = (&release.model, release.seq);
        if self.failed {
            let message = format!("release {seq} of {model} was not pushed to {}", self.name);
            let hint = format!("`precast push {model}@{seq} {}` pushes it", self.name);
            return Err(Refusal::failed(message, hint).into());
        }
        if !release.is_partial() {
            return super::push_release(&self.place, model, seq, context);
        }
        if let Request::Offer { ids, .. } = &mut self.offer {
            ids.clone_from(&release.programs);
        }
        ask(&self.offer, &context.cancel, &mut |_| {})?;
        let programs = count(release.programs.len(), "program");
        note!(
            "{programs} can be found by key in {}: the release is a partial one",
            self.name
        );
        Ok(())
    }
}

impl Remote for BuildRemote<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn releases(&self, model: &str) -> (Vec<Release>, Vec<Record>) {
        let (mut releases, mut programs) = (Vec::new(), Vec::new());
        let request = Request::Releases {
            remote: self.place.clone(),
            model: model.to_owned(),
        };
        let mut take = |event| match event {
            Event::Release(release) => releases.push(*release),
            Event::Program(program) => programs.push(*program),
            _ => {}
        };
        match ask(&request, self.cancel(), &mut take) {
            // A build asks this first, also the one after the builders on a cluster.
            Ok(()) => self.failures.store(0, Ordering::Relaxed),
            Err(error) => {
                // A place that does not answer would be waited for each time.
                self.failures.store(FAILURES - 1, Ordering::Relaxed);
                self.fails(&error);
            }
        }
        (releases, programs)
    }

    fn fetch(&self, kind: PartKind, ids: &[Digest]) -> Vec<Digest> {
        let mut has = Vec::new();
        let request = Request::Fetch {
            store: self.store.clone(),
            remote: self.place.clone(),
            kind,
            ids: ids.to_vec(),
            shared: self.context.shared,
            trusted: self.context.options().trusted,
        };
        self.ask(&request, &mut |event| {
            if let Event::Has(id) = event {
                has.push(id);
            }
        });
        has
    }

    fn lease(
        &self,
        kind: PartKind,
        id: &Digest,
        wait: bool,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Option<Turn> {
        if !self.push || self.is_left() {
            return None;
        }
        let request = Request::Lease {
            remote: self.place.clone(),
            kind,
            id: *id,
            wait,
            seconds: self.lease_seconds,
        };
        let mut leased = None;
        let mut program = match Program::start(&request, self.cancel()) {
            Ok(program) => program,
            Err(error) => {
                self.fails(&error);
                return None;
            }
        };
        let mut on_event = |event| {
            if let Event::Lease(told) = event {
                leased = Some(told);
            }
            leased.is_none()
        };
        if let Err(error) = program.events_until(stop, &mut on_event)
            && !stop()
        {
            self.fails(&error);
        }
        match leased? {
            Leased::Held => Some(Turn::Own(Box::new(program))),
            Leased::There => Some(Turn::Made),
            Leased::Taken => Some(Turn::Other),
        }
    }

    fn offer(&self, kind: PartKind, ids: &[Digest]) {
        if self.push {
            self.ask(&self.offered(kind, ids), &mut |_| {});
        }
    }
}
