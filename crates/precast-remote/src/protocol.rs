//! Answers the requests of `precast`, in the words of [`precast_store::transfer`].

use std::{
    io::{BufRead, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use precast_store::{
    Store, Target,
    transfer::{Event, Kind, Listed, Request},
};

use crate::{
    error::RemoteError,
    event::Tell,
    remote::{Remote, Wanted},
};

/// Answers the request that comes first from `input`, in lines to `output`. Returns whether it was done.
pub fn answer(input: impl BufRead + Send + 'static, output: impl Write + Send) -> bool {
    let stop = Arc::new(AtomicBool::new(false));
    let output = Mutex::new(output);
    let say = |event: &Event| {
        let mut text = serde_json::to_vec(event).unwrap_or_default();
        text.push(b'\n');
        if let Ok(mut output) = output.lock() {
            // Nobody listens: the end of stdin stops the work.
            let _ = output.write_all(&text).and_then(|()| output.flush());
        }
    };
    let result = request(input, &stop).and_then(|request| serve(request, &stop, &say));
    match &result {
        Ok(()) => say(&Event::Done),
        Err(error) => say(&told(error)),
    }
    result.is_ok()
}

/// Reads the request; then a thread waits for the end of the input.
fn request(
    mut input: impl BufRead + Send + 'static,
    stop: &Arc<AtomicBool>,
) -> Result<Request, RemoteError> {
    let mut line = String::new();
    let read = input.read_line(&mut line);
    let wrong = |why: String| RemoteError::Url {
        url: "the request".to_owned(),
        why,
    };
    read.map_err(|e| wrong(e.to_string()))?;
    let request = serde_json::from_str(&line).map_err(|e| wrong(e.to_string()))?;
    let stop = stop.clone();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut input, &mut std::io::sink());
        stop.store(true, Ordering::Relaxed);
    });
    Ok(request)
}

fn told(error: &RemoteError) -> Event {
    let kind = match error {
        RemoteError::Url { .. } | RemoteError::ReadOnly { .. } => Kind::Usage,
        RemoteError::NotARemote { .. } | RemoteError::NoRelease { .. } => Kind::Missing,
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

fn serve(
    request: Request,
    stop: &AtomicBool,
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
        } => {
            let store = Store::open(store)?;
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
        } => {
            let remote = Remote::open(&remote)?;
            let store = Store::create(store)?;
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
                        listings.extend(remote.listing(&model, seq)?);
                    }
                    listings
                } else {
                    vec![remote.find(&model, which.as_deref(), &wanted)?]
                };
                for listing in listings {
                    let moved = remote.pull_release(&store, &listing, dry_run, &tell)?;
                    say(&Event::Moved(moved));
                }
            }
        }
        Request::List { remote } => {
            let remote = Remote::open(&remote)?;
            for (model, numbers) in remote.numbers()? {
                for seq in numbers.into_iter().rev() {
                    let Some(listing) = remote.listing(&model, seq)? else {
                        continue;
                    };
                    say(&Event::Listed(Listed {
                        model: model.clone(),
                        seq,
                        name: listing.release.name.clone(),
                        identity: listing.identity(),
                        targets: listing.targets.iter().map(Target::name).collect(),
                        programs: listing.release.programs.len(),
                        bytes: listing.bytes(),
                        created: listing.release.provenance.created,
                    }));
                }
            }
        }
    }
    Ok(())
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
