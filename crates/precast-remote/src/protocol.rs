//! Answers the requests of `precast`, in the words of [`precast_store::transfer`].

use std::{
    collections::BTreeSet,
    io::Write,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use precast_store::{
    Listing, Options, Store, Target,
    transfer::{Event, Kind, Listed, Looked, Request},
};
use tempfile::TempDir;

use crate::{
    error::RemoteError,
    event::Tell,
    lease::{TIMES, Times},
    probe,
    remote::{Remote, Wanted},
};

/// Answers the request in a line, in lines to `output`. Returns whether it was done.
pub fn answer(line: &str, stop: &Arc<AtomicBool>, output: impl Write + Send) -> bool {
    let output = Mutex::new(output);
    let say = |event: &Event| {
        let mut text = serde_json::to_vec(event).unwrap_or_default();
        text.push(b'\n');
        if let Ok(mut output) = output.lock() {
            // Nobody listens: the end of stdin stops the work.
            let _ = output.write_all(&text).and_then(|()| output.flush());
        }
    };
    let request = serde_json::from_str(line).map_err(|e| RemoteError::Url {
        url: "the request".to_owned(),
        why: e.to_string(),
    });
    let result = request.and_then(|request| serve(request, stop, &say));
    // A transfer that was stopped ends with whatever it was doing.
    let result = result.map_err(|error| match stop.load(Ordering::Relaxed) {
        true => RemoteError::Interrupted,
        false => error,
    });
    match &result {
        Ok(()) => say(&Event::Done),
        Err(error) => say(&told(error)),
    }
    result.is_ok()
}

fn told(error: &RemoteError) -> Event {
    let kind = match error {
        RemoteError::Url { .. } | RemoteError::ReadOnly { .. } => Kind::Usage,
        RemoteError::NotARemote { .. }
        | RemoteError::NoRepository { .. }
        | RemoteError::NoRelease { .. } => Kind::Missing,
        RemoteError::Unfit { .. } => Kind::Target,
        RemoteError::Interrupted => Kind::Interrupted,
        _ => Kind::Failed,
    };
    let mut causes = Vec::new();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        causes.push(next.to_string());
        cause = next.source();
    }
    Event::Error {
        message: error.to_string(),
        hint: error.hint().to_owned(),
        causes,
        kind,
    }
}

/// Opens the store of a request as its caller would.
fn open(
    path: &Path,
    create: bool,
    shared: bool,
    trusted: bool,
    stop: &Arc<AtomicBool>,
) -> Result<Store, RemoteError> {
    let options = Options {
        shared,
        trusted,
        ..Options::default()
    };
    let store = if create {
        Store::create_with(path, options)?
    } else {
        Store::open_with(path, options)?
    };
    store.stop_waiting_when(stop.clone());
    Ok(store)
}

/// Opens or creates the store of a pull. A dry run writes nothing: it compares with an empty store where there is none,
/// which is removed with the folder that is returned too.
fn open_for_pull(
    path: &Path,
    dry_run: bool,
    shared: bool,
    trusted: bool,
    stop: &Arc<AtomicBool>,
) -> Result<(Store, Option<TempDir>), RemoteError> {
    if dry_run
        && !path.exists()
        && let Ok(nothing) = tempfile::tempdir()
    {
        let path = nothing.path().join("store");
        return Ok((open(&path, true, shared, trusted, stop)?, Some(nothing)));
    }
    Ok((open(path, !dry_run, shared, trusted, stop)?, None))
}

/// Looks at a place that is to get a name.
fn look(url: &str, write: bool) -> Result<Looked, RemoteError> {
    let remote = match write {
        true => Remote::open_to_write(url)?,
        false => Remote::open_if_there(url)?,
    };
    // Fails if a newer precast wrote it.
    remote.is_new()?;
    let refuses_twice = match write {
        true => Some(probe::refuses_twice(&*remote.carrier)?),
        false => None,
    };
    Ok(Looked {
        releases: remote.numbers()?.values().map(BTreeSet::len).sum(),
        refuses_twice,
    })
}

fn listed(listing: &Listing) -> Listed {
    Listed {
        model: listing.model.clone(),
        seq: listing.release.seq,
        name: listing.release.name.clone(),
        identity: listing.identity(),
        targets: listing.targets.iter().map(Target::name).collect(),
        programs: listing.release.programs.len(),
        bytes: listing.bytes(),
        created: listing.release.provenance.created,
    }
}

fn serve(
    request: Request,
    stop: &Arc<AtomicBool>,
    say: &(dyn Fn(&Event) + Sync),
) -> Result<(), RemoteError> {
    let progress = Progress::new(say);
    let tell = Tell {
        plan: &|plan| {
            progress.begin();
            say(&Event::Plan(plan.clone()));
        },
        moved: &|bytes| progress.add(bytes),
        stop,
    };
    match request {
        Request::Push {
            store,
            remote,
            model,
            which,
            dry_run,
            shared,
            trusted,
        } => {
            let store = open(&store, false, shared, trusted, stop)?;
            let found = store.releases().get(&model, which.as_deref())?;
            let release = found.ok_or_else(|| {
                let which = which.map_or(String::new(), |which| format!("@{which}"));
                RemoteError::NoRelease {
                    url: store.path().display().to_string(),
                    what: format!("release `{model}{which}`"),
                }
            })?;
            let remote = if dry_run {
                Remote::open_if_there(&remote)?
            } else {
                Remote::open_to_write(&remote)?
            };
            say(&Event::Moved(
                remote.push_release(&store, &release, dry_run, &tell)?,
            ));
        }
        Request::Pull {
            store,
            remote,
            mut models,
            which,
            hosts,
            target,
            all,
            dry_run,
            shared,
            trusted,
        } => {
            let remote = Remote::open(&remote)?;
            let (store, _nothing) = open_for_pull(&store, dry_run, shared, trusted, stop)?;
            let wanted = match target {
                Some(name) => Wanted::Target(name),
                None if hosts.is_empty() => Wanted::Any,
                None => Wanted::Hosts(hosts),
            };
            let numbers = remote.numbers()?;
            if models.is_empty() {
                models = numbers.keys().cloned().collect();
            }
            for model in models {
                let listings = if all {
                    let numbers = numbers.get(&model).cloned().unwrap_or_default();
                    let mut listings = Vec::new();
                    for seq in numbers {
                        listings.push(remote.find(&model, Some(&seq.to_string()), &Wanted::Any)?);
                    }
                    if listings.is_empty() {
                        // Says that there is none.
                        remote.find(&model, None, &Wanted::Any)?;
                    }
                    listings
                } else {
                    vec![remote.find(&model, which.as_deref(), &wanted)?]
                };
                for listing in listings {
                    say(&Event::Listed(listed(&listing)));
                    let moved = remote.pull_release(&store, &listing, dry_run, &tell)?;
                    say(&Event::Moved(moved));
                }
            }
        }
        Request::Releases { remote, model } => {
            /// A build asks for those that its sources may have made.
            const MOST: usize = 8;
            let Some(remote) = in_use(&remote)? else {
                return Ok(());
            };
            let releases = remote.releases(&model, MOST)?;
            if let Some(newest) = releases.first() {
                for program in remote.programs(&newest.programs)? {
                    say(&Event::Program(Box::new(program)));
                }
            }
            for release in releases {
                say(&Event::Release(Box::new(release)));
            }
        }
        Request::Fetch {
            store,
            remote,
            kind,
            ids,
            shared,
            trusted,
        } => {
            let Some(remote) = in_use(&remote)? else {
                return Ok(());
            };
            let store = open(&store, true, shared, trusted, stop)?;
            for id in remote.fetch(&store, kind, &ids, &tell)? {
                say(&Event::Has(id));
            }
        }
        Request::Offer {
            store,
            remote,
            kind,
            ids,
            shared,
            trusted,
        } => {
            let store = open(&store, false, shared, trusted, stop)?;
            let remote = Remote::open_to_write(&remote)?;
            remote.offer(&store, kind, &ids, &tell)?;
            ids.into_iter().for_each(|id| say(&Event::Has(id)));
        }
        Request::Lease {
            remote,
            kind,
            id,
            wait,
            seconds,
        } => {
            let remote = Remote::open_to_write(&remote)?;
            let held = |leased| say(&Event::Lease(leased));
            let times = seconds.map_or(TIMES, Times::lost_after);
            remote.lease(kind, id, wait, times, stop, &held)?;
        }
        Request::List { remote } => {
            let remote = Remote::open(&remote)?;
            for (model, numbers) in remote.numbers()? {
                for seq in numbers.into_iter().rev() {
                    if let Some(listing) = remote.listing(&model, seq)? {
                        say(&Event::Listed(listed(&listing)));
                    }
                }
            }
        }
        Request::Look { remote, write } => say(&Event::Looked(look(&remote, write)?)),
        Request::Locked {
            store,
            remote,
            model,
            seq,
            identity,
            dry_run,
            shared,
            trusted,
        } => {
            let remote = Remote::open(&remote)?;
            let (store, _nothing) = open_for_pull(&store, dry_run, shared, trusted, stop)?;
            let listing = remote.find(&model, Some(&seq.to_string()), &Wanted::Any)?;
            let moved = remote.pull_locked(&store, &listing, identity, dry_run, &tell)?;
            say(&Event::Moved(moved));
        }
        Request::Mirror { remote, folder } => {
            let mirrored = Remote::open(&remote)?.mirror(&folder, &tell)?;
            say(&Event::Mirrored(mirrored));
        }
        Request::Verify { remote } => {
            let verified = Remote::open(&remote)?.verify(&tell)?;
            say(&Event::Verified(verified));
        }
        Request::Gc {
            remote,
            grace,
            keep,
            apply,
        } => {
            // Fails where there is none, before a folder is made.
            let read = Remote::open(&remote)?;
            let remote = if apply {
                Remote::open_to_write(&remote)?
            } else {
                read
            };
            say(&Event::Collected(remote.gc(grace, keep, apply, &tell)?));
        }
    }
    Ok(())
}

/// Opens a remote that a build asks; none where nothing was pushed there yet.
fn in_use(url: &str) -> Result<Option<Remote>, RemoteError> {
    let remote = Remote::open_if_there(url)?;
    Ok(if remote.is_new()? { None } else { Some(remote) })
}

/// Says how many bytes have moved, a few times a second.
struct Progress<'a> {
    say: &'a (dyn Fn(&Event) + Sync),
    bytes: AtomicU64,
    last: Mutex<Instant>,
}

impl<'a> Progress<'a> {
    fn new(say: &'a (dyn Fn(&Event) + Sync)) -> Self {
        Self {
            say,
            bytes: AtomicU64::new(0),
            last: Mutex::new(Instant::now()),
        }
    }

    fn begin(&self) {
        self.bytes.store(0, Ordering::Relaxed);
    }

    fn add(&self, bytes: u64) {
        const EACH: Duration = Duration::from_millis(100);
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Ok(mut last) = self.last.try_lock()
            && last.elapsed() > EACH
        {
            *last = Instant::now();
            (self.say)(&Event::Bytes(all));
        }
    }
}
