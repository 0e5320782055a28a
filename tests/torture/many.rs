//! Many processes on one store: builders of the same artifacts that are killed at random, and readers while gc runs.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
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
    report::Tally,
    scene::{self, Random},
};

/// The size of each spec's artifact: two compiles of it never give the same bytes.
const SIZE: usize = 2000;

/// One builder: makes every spec that is not there, in an order of its own.
pub fn builder(root: &Path) -> Result<(), StoreError> {
    let store = Store::create(root)?;
    let set = |name| std::env::var(name).ok()?.parse::<usize>().ok();
    let specs = set("PRECAST_ACTOR_SPECS").unwrap();
    let longest = set("PRECAST_ACTOR_COMPILE_MS").unwrap_or(40);
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
            let mut log = File::options();
            let log = log.create(true).append(true);
            let mut log = log.open(logs.join(format!("{spec}"))).unwrap();
            if log.try_lock().is_err() {
                let twice = format!("twice-{spec}-{}", std::process::id());
                fs::write(logs.join(twice), "").unwrap();
            }
            log.write_all(b"begun\n").unwrap();
            thread::sleep(Duration::from_millis(random.below(longest) as u64));
            let content = scene::content(random.draw(), SIZE);
            let object = store.objects().put_bytes(&content)?;
            let artifact = scene::artifact(&name, object, SIZE as u64, None);
            store.records().put_artifact(&artifact)?;
            log.write_all(b"finished\n").unwrap();
        }
        drop(claim);
    }
    Ok(())
}

/// Runs `processes` builders of `specs` specs on one store, each compile at most `longest` milliseconds, and kills one
/// at random again and again. Counts the compiles that were begun (the owner of each unfinished one was killed, and
/// replaced), the artifacts and objects at the end, and the most compiles of one key at once.
pub fn builders(processes: u64, specs: u64, longest: u64, kills: u64, seed: u64) -> Tally {
    let dir = scene::scratch();
    let root = dir.path().join("store");
    Store::create(&root).unwrap();
    let logs = root.with_extension("compiles");
    fs::create_dir(&logs).unwrap();
    let spawn = || -> Child {
        let mut command = Act::new("builder", &root).command();
        command.env("PRECAST_ACTOR_SPECS", specs.to_string());
        command.env("PRECAST_ACTOR_COMPILE_MS", longest.to_string());
        let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut crowd = Tally::of(["kills", "begun", "finished", "artifacts"]);
    crowd.set("processes", processes);
    crowd.set("specs", specs);
    let mut random = Random(seed);
    let mut children: Vec<Child> = (0..processes).map(|_| spawn()).collect();
    while !children.is_empty() {
        if crowd.count("kills") < kills {
            let victim = random.below(children.len());
            if children[victim].try_wait().unwrap().is_none() {
                children[victim].kill().unwrap();
                children[victim].wait().unwrap();
                crowd.add("kills", 1);
                // Somebody else takes its place, as a restarted job would.
                children[victim] = spawn();
            }
        }
        children.retain_mut(|child| match child.try_wait().unwrap() {
            None => true,
            Some(status) => {
                if !status.success() {
                    let text = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
                    crowd.fail(format!("{status}: {text}"));
                }
                false
            }
        });
        thread::sleep(Duration::from_millis(2 + random.below(12) as u64));
    }
    let store = Store::open(&root).unwrap();
    crowd.set("most_at_once", 1);
    for path in scene::files(&logs) {
        let name = path.file_name().unwrap().to_string_lossy();
        if name.starts_with("twice") {
            crowd.set("most_at_once", 2);
            crowd.fail(format!("two compiles at once: {name}"));
        }
        let text = fs::read_to_string(&path).unwrap();
        for word in ["begun", "finished"] {
            crowd.add(word, text.matches(word).count() as u64);
        }
    }
    for spec in 0..specs {
        let key = Digest::of(format!("spec {spec}").as_bytes());
        match store.records().artifact(&key).unwrap() {
            Some(artifact) if store.objects().read(&artifact.object).is_ok() => {
                crowd.add("artifacts", 1)
            }
            _ => crowd.fail(format!("spec {spec} has no artifact")),
        }
    }
    // Leftovers of killed builders go, and one object of each spec stays.
    store.collector().gc(&Policy::default()).unwrap();
    let objects = scene::files(&root.join("objects")).len() as u64;
    crowd.set("objects", objects);
    if objects != specs {
        crowd.fail(format!("{objects} objects for {specs} specs"));
    }
    let left = store.audit().verify().unwrap().defects;
    if !left.is_empty() {
        crowd.fail(format!("{left:?}"));
    }
    crowd
}

/// Objects that readers take at random; nothing but a lease protects them.
const POOL: u64 = 40;

fn pool(n: u64) -> Vec<u8> {
    scene::content(1000 + n, 500)
}

/// One reader: leases an object, puts it back when it is gone, reads it, lets it go.
pub fn reader(root: &Path) -> Result<(), StoreError> {
    let reads = std::env::var("PRECAST_ACTOR_READS").unwrap();
    let reads: u64 = reads.parse().unwrap();
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
        if done == 0 {
            println!("a lease");
        }
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

/// Runs `readers` readers of `reads` reads each while one process collects; kills some more while they hold leases.
pub fn reads_under_gc(readers: u64, reads: u64, kills: u64) -> Tally {
    let dir = scene::scratch();
    let root = dir.path().join("store");
    Store::create(&root).unwrap();
    let spawn = |name: &str, reads: u64| -> Child {
        let mut command = Act::new(name, &root).command();
        command.env("PRECAST_ACTOR_READS", reads.to_string());
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let gc = spawn("collector", 0);
    let children: Vec<Child> = (0..readers).map(|_| spawn("reader", reads)).collect();
    let mut report = Tally::default();
    report.set("readers", readers);
    for _ in 0..kills {
        let mut child = spawn("reader", u64::MAX);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("a lease")));
        child.kill().unwrap();
        child.wait().unwrap();
        report.add("killed", 1);
    }
    let mut note = |child: Child, prefix: &str, names: &[&str]| {
        let output = child.wait_with_output().unwrap();
        let numbers = numbers(&String::from_utf8_lossy(&output.stdout), prefix);
        if numbers.len() != names.len() {
            report.fail(String::from_utf8_lossy(&output.stderr));
        }
        for (name, number) in names.iter().zip(numbers) {
            report.add(name, number);
        }
    };
    for child in children {
        note(child, "reads ", &["reads", "missing", "put_again"]);
    }
    fs::write(root.with_extension("stop"), "").unwrap();
    note(gc, "gc ", &["gc_rounds", "deleted"]);
    let store = Store::open(&root).unwrap();
    store.collector().gc(&Policy::default()).unwrap();
    drop(store);
    let leases = fs::read_dir(root.join("leases")).unwrap().count() as u64;
    report.set("leases_left", leases);
    let left = scene::files(&root.join("objects")).len();
    let missing = report.count("missing");
    if left != 0 || leases != 0 || missing != 0 {
        let what = format!("{left} objects, {leases} leases, {missing} missing");
        report.fail(what);
    }
    report
}

fn numbers(text: &str, prefix: &str) -> Vec<u64> {
    let line = text.lines().find_map(|line| line.split_once(prefix));
    line.map_or(Vec::new(), |(_, rest)| {
        rest.split(' ').filter_map(|n| n.parse().ok()).collect()
    })
}
