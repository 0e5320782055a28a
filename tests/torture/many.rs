//! Many processes on one store: builders of the same artifacts that are killed at random, and readers while gc runs.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use precast::{
    Digest, Store, StoreError,
    store::{Hold, Policy},
};

use crate::{
    actor::Act,
    scene::{self, Random},
};

/// The outcome.
#[derive(Default, Debug, serde::Serialize)]
pub struct Crowd {
    pub processes: u64,
    pub specs: u64,
    pub kills: u64,
    /// Compiles that were begun; the owner of each unfinished one was killed, and replaced.
    pub begun: u64,
    pub finished: u64,
    /// Artifacts and objects in the store at the end.
    pub artifacts: u64,
    pub objects: u64,
    /// The most compiles of one key that were alive at once.
    pub most_at_once: u64,
    pub seconds: f64,
    #[serde(skip)]
    pub bad: Vec<String>,
}

/// The size of each spec's artifact: two compiles of it never give the same bytes.
const SIZE: usize = 2000;

/// One builder: makes every spec that is not there, in an order of its own.
pub fn builder(root: &Path) -> Result<(), StoreError> {
    let store = Store::create(root)?;
    let specs: usize = std::env::var("PRECAST_ACTOR_SPECS")
        .unwrap()
        .parse()
        .unwrap();
    let longest: usize = std::env::var("PRECAST_ACTOR_COMPILE_MS")
        .unwrap_or_default()
        .parse()
        .unwrap_or(40);
    let mut random = Random(std::process::id().into());
    let mut order: Vec<usize> = (0..specs).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at + 1));
    }
    let logs = root.with_extension("compiles");
    for spec in order {
        let name = format!("spec {spec}");
        let key = Digest::of(name.as_bytes());
        if store.records().keep_artifact(&key)? {
            continue;
        }
        let claim = store.leases().claim(&key, &mut |_| true)?.unwrap();
        if !store.records().keep_artifact(&key)? {
            // A compile of this key that is alive holds this lock: two would be seen.
            let path = logs.join(format!("{spec}"));
            let mut log = File::options()
                .create(true)
                .append(true)
                .open(&path)
                .unwrap();
            if log.try_lock().is_err() {
                fs::write(
                    logs.join(format!("twice-{spec}-{}", std::process::id())),
                    "",
                )
                .unwrap();
            }
            log.write_all(b"begun\n").unwrap();
            thread::sleep(Duration::from_millis(random.below(longest) as u64));
            let content = scene::content(random.draw(), SIZE);
            let object = store.objects().put_bytes(&content)?;
            store
                .records()
                .put_artifact(&scene::artifact(&name, object, SIZE as u64, None))?;
            log.write_all(b"finished\n").unwrap();
        }
        drop(claim);
    }
    Ok(())
}

/// Runs `processes` builders of `specs` specs on one store, each compile at most `longest` milliseconds, and kills one
/// at random again and again.
pub fn builders(processes: u64, specs: u64, longest: u64, kills: u64, seed: u64) -> Crowd {
    let dir = scene::scratch();
    let root = dir.path().join("store");
    Store::create(&root).unwrap();
    let logs = root.with_extension("compiles");
    fs::create_dir(&logs).unwrap();
    let start = Instant::now();
    let spawn = || -> Child {
        let mut command = Act {
            name: "builder",
            root: &root,
            shim: vec![],
        }
        .command();
        command
            .env("PRECAST_ACTOR_SPECS", specs.to_string())
            .env("PRECAST_ACTOR_COMPILE_MS", longest.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut crowd = Crowd {
        processes,
        specs,
        ..Crowd::default()
    };
    let mut random = Random(seed);
    let mut children: Vec<Child> = (0..processes).map(|_| spawn()).collect();
    while !children.is_empty() {
        if crowd.kills < kills {
            let victim = random.below(children.len());
            if children[victim].try_wait().unwrap().is_none() {
                children[victim].kill().unwrap();
                children[victim].wait().unwrap();
                crowd.kills += 1;
                // Somebody else takes its place, as a restarted job would.
                children[victim] = spawn();
            }
        }
        children.retain_mut(|child| match child.try_wait().unwrap() {
            None => true,
            Some(status) => {
                if !status.success() {
                    let mut text = String::new();
                    let _ =
                        std::io::Read::read_to_string(child.stderr.as_mut().unwrap(), &mut text);
                    crowd.bad.push(format!("{status}: {text}"));
                }
                false
            }
        });
        thread::sleep(Duration::from_millis(2 + random.below(12) as u64));
    }
    crowd.seconds = start.elapsed().as_secs_f64();
    let store = Store::open(&root).unwrap();
    crowd.most_at_once = 1;
    for path in scene::files(&logs) {
        if path
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("twice")
        {
            crowd.most_at_once = 2;
            crowd
                .bad
                .push(format!("two compiles at once: {}", path.display()));
        }
        let text = fs::read_to_string(&path).unwrap();
        crowd.begun += text.matches("begun").count() as u64;
        crowd.finished += text.matches("finished").count() as u64;
    }
    for spec in 0..specs {
        let key = Digest::of(format!("spec {spec}").as_bytes());
        match store.records().artifact(&key).unwrap() {
            Some(artifact) if store.objects().read(&artifact.object).is_ok() => {
                crowd.artifacts += 1
            }
            _ => crowd.bad.push(format!("spec {spec} has no artifact")),
        }
    }
    // Leftovers of killed builders go, and one object of each spec stays.
    store.collector().gc(&Policy::default()).unwrap();
    crowd.objects = scene::files(&root.join("objects")).len() as u64;
    if crowd.objects != specs {
        crowd
            .bad
            .push(format!("{} objects for {specs} specs", crowd.objects));
    }
    let left = store.audit().verify().unwrap().defects;
    if !left.is_empty() {
        crowd.bad.push(format!("{left:?}"));
    }
    crowd
}

/// The outcome of reads under gc.
#[derive(Default, Debug, serde::Serialize)]
pub struct Reads {
    pub readers: u64,
    pub reads: u64,
    pub gc_rounds: u64,
    pub deleted: u64,
    pub put_again: u64,
    pub missing: u64,
    /// Readers that were killed while they held leases.
    pub killed: u64,
    pub leases_left: u64,
    pub seconds: f64,
    #[serde(skip)]
    pub bad: Vec<String>,
}

/// Objects that readers take at random; nothing but a lease protects them.
const POOL: u64 = 40;

fn pool(n: u64) -> Vec<u8> {
    scene::content(1000 + n, 500)
}

/// One reader: leases an object, puts it back when it is gone, reads it, lets it go.
pub fn reader(root: &Path) -> Result<(), StoreError> {
    let reads: u64 = std::env::var("PRECAST_ACTOR_READS")
        .unwrap()
        .parse()
        .unwrap();
    let mut random = Random(std::process::id().into());
    let (mut missing, mut again, mut done) = (0, 0, 0);
    let store = Store::open(root)?;
    // As often as asked for, and until there was something for gc to do: it may have got no turn yet.
    let began = Instant::now();
    let collected =
        || root.with_extension("collected").exists() || began.elapsed() > Duration::from_secs(600);
    while done < reads || !collected() {
        let n = random.below(POOL as usize) as u64;
        let content = pool(n);
        let digest = Digest::of(&content);
        let hold: Hold = store.leases().hold(&[digest])?;
        if !store.objects().has(&digest) {
            // Another store handle puts it, so that only our lease holds it afterwards.
            Store::open(root)?.objects().put_bytes(&content)?;
            again += 1;
        }
        // As many reads as a request makes; gc runs all the time between them.
        for _ in 0..50 {
            match store.objects().read(&digest) {
                Ok(bytes) if bytes == content => {}
                _ => missing += 1,
            }
            done += 1;
        }
        drop(hold);
    }
    println!("reads {done} {missing} {again}");
    Ok(())
}

/// One process that runs gc until a file says stop.
pub fn collector(root: &Path) -> Result<(), StoreError> {
    let (mut rounds, mut deleted) = (0, 0);
    while !root.with_extension("stop").exists() {
        let store = Store::open(root)?;
        let (_, done) = store.collector().gc(&Policy::default())?;
        rounds += 1;
        deleted += done.objects;
        if deleted > 10 {
            fs::write(root.with_extension("collected"), "").unwrap();
        }
    }
    println!("gc {rounds} {deleted}");
    Ok(())
}

/// Runs `readers` readers of `reads` reads each while one process collects; kills some of them at the end.
pub fn reads_under_gc(readers: u64, reads: u64, kills: u64) -> Reads {
    let dir = scene::scratch();
    let root = dir.path().join("store");
    Store::create(&root).unwrap();
    let start = Instant::now();
    let spawn = |name: &str, reads: u64| -> Child {
        let mut command = Act {
            name,
            root: &root,
            shim: vec![],
        }
        .command();
        command.env("PRECAST_ACTOR_READS", reads.to_string());
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let gc = spawn("collector", 0);
    let children: Vec<Child> = (0..readers).map(|_| spawn("reader", reads)).collect();
    let mut report = Reads {
        readers,
        ..Reads::default()
    };
    for _ in 0..kills {
        let mut child = spawn("reader", u64::MAX);
        thread::sleep(Duration::from_millis(60));
        child.kill().unwrap();
        child.wait().unwrap();
        report.killed += 1;
    }
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        match numbers(&text, "reads ")[..] {
            [reads, missing, again] => {
                report.reads += reads;
                report.missing += missing;
                report.put_again += again;
            }
            _ => report
                .bad
                .push(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }
    fs::write(root.with_extension("stop"), "").unwrap();
    let output = gc.wait_with_output().unwrap();
    match numbers(&String::from_utf8_lossy(&output.stdout), "gc ")[..] {
        [rounds, deleted] => (report.gc_rounds, report.deleted) = (rounds, deleted),
        _ => report
            .bad
            .push(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
    report.seconds = start.elapsed().as_secs_f64();
    let store = Store::open(&root).unwrap();
    store.collector().gc(&Policy::default()).unwrap();
    drop(store);
    report.leases_left = fs::read_dir(root.join("leases")).unwrap().count() as u64;
    let left = scene::files(&root.join("objects")).len();
    if left != 0 || report.leases_left != 0 || report.missing != 0 {
        report.bad.push(format!(
            "{left} objects, {} leases, {} missing",
            report.leases_left, report.missing
        ));
    }
    report
}

fn numbers(text: &str, prefix: &str) -> Vec<u64> {
    let line = text.lines().find_map(|line| line.split_once(prefix));
    line.map_or(Vec::new(), |(_, rest)| {
        rest.split(' ').filter_map(|n| n.parse().ok()).collect()
    })
}
