//! Child processes: this test binary runs itself, under the shim.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output},
    sync::OnceLock,
};

use precast::{
    Store,
    store::{Defect, Filter, Needs, Options, Policy},
};

use crate::scene;

/// Exit code of an actor that reported an error.
pub const TOLD: i32 = 7;

/// Compiles the shim, once.
pub fn shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torture/shim.c");
        let library =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shim-{}.so", std::process::id()));
        let flags = ["-O2", "-shared", "-fPIC", "-o"];
        let cc = Command::new("cc")
            .args(flags)
            .arg(&library)
            .arg(&source)
            .arg("-ldl")
            .status();
        assert!(cc.unwrap().success());
        library
    })
}

/// One run of an actor.
pub struct Act<'a> {
    name: &'a str,
    root: &'a Path,
    shim: Vec<(&'a str, String)>,
}

impl<'a> Act<'a> {
    pub fn new(name: &'a str, root: &'a Path) -> Self {
        let shim = Vec::new();
        Self { name, root, shim }
    }

    /// Runs it under the shim, with these `SHIM_…` variables, named without the prefix.
    pub fn under(self, shim: Vec<(&'a str, String)>) -> Self {
        Self { shim, ..self }
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["actor", "--exact", "--nocapture", "--test-threads=1"]);
        command
            .env("PRECAST_ACTOR", self.name)
            .env("PRECAST_ACTOR_STORE", self.root);
        if !self.shim.is_empty() {
            command
                .env("LD_PRELOAD", shim())
                .env("SHIM_ROOT", self.root);
        }
        for (name, value) in &self.shim {
            command.env(format!("SHIM_{name}"), value);
        }
        command
    }

    pub fn run(&self) -> Output {
        self.command().output().unwrap()
    }
}

/// Returns the status and the errors of a process that failed.
pub fn well(output: &Output) -> anyhow::Result<()> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{}: {stderr}", output.status);
    Ok(())
}

/// Runs `name` without the shim and expects it to end well.
pub fn run_well(name: &str, root: &Path) {
    well(&Act::new(name, root).run()).unwrap();
}

/// Counts the write-class calls of an actor.
pub fn count(name: &str, root: &Path) -> u64 {
    let out = root.with_extension("count");
    let shim = vec![("MODE", "count".into()), ("OUT", out.display().to_string())];
    well(&Act::new(name, root).under(shim).run()).unwrap();
    fs::read_to_string(out).unwrap().trim().parse().unwrap()
}

/// Returns whether a process was killed.
pub fn killed(status: ExitStatus) -> bool {
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(9)
}

/// Runs the actor that the environment names; returns in any other process.
pub fn act() {
    let Some(name) = std::env::var_os("PRECAST_ACTOR") else {
        return;
    };
    let root = PathBuf::from(std::env::var_os("PRECAST_ACTOR_STORE").unwrap());
    let done = match name.to_str().unwrap() {
        "build" => build(&root),
        "gc" => gc(&root),
        "repair" => repair(&root),
        "verify" => verify(&root),
        "rollback" => {
            Store::open(&root).and_then(|store| store.releases().rollback("m", None).map(drop))
        }
        "read" => read(&root),
        "builder" => crate::many::builder(&root),
        "reader" => crate::many::reader(&root),
        "collector" => crate::many::collector(&root),
        other => panic!("no actor {other}"),
    };
    match done {
        Ok(()) => std::process::exit(0),
        Err(e) => {
            eprintln!("error: {}", scene::chain(e));
            std::process::exit(TOLD)
        }
    }
}

/// Makes the store and builds the scene, and writes each promise down as soon as it holds.
fn build(root: &Path) -> Result<(), precast::StoreError> {
    let store = Store::create(root)?;
    let mut acks = File::options();
    let acks = acks.create(true).append(true);
    let mut acks = acks.open(root.with_extension("ack")).unwrap();
    let scene = scene::build(&store, &mut |what| writeln!(acks, "{what}").unwrap())?;
    store.objects().map(&scene.weights).map(drop)
}

fn gc(root: &Path) -> Result<(), precast::StoreError> {
    let store = Store::open(root)?;
    store.collector().gc(&scene::newest_only()).map(drop)
}

/// Repairs. With `PRECAST_ACTOR_SOUND` it must find nothing, while other processes work.
fn repair(root: &Path) -> Result<(), precast::StoreError> {
    let store = Store::open_for_repair(root, Options::default())?;
    let done = store.audit().repair()?;
    if std::env::var_os("PRECAST_ACTOR_SOUND").is_some() {
        assert_eq!(harmful(&done.found), [] as [&Defect; 0]);
        assert_eq!(done.left, []);
        let aside = done.set_aside.iter();
        let aside: Vec<_> = aside.filter(|path| !path.starts_with("tmp")).collect();
        assert_eq!(aside, [] as [&PathBuf; 0]);
    }
    Ok(())
}

/// Looks at a sound store while other processes change it.
fn verify(root: &Path) -> Result<(), precast::StoreError> {
    let found = Store::open(root)?.audit().verify()?;
    assert_eq!(harmful(&found.defects), [] as [&Defect; 0]);
    Ok(())
}

fn harmful(defects: &[Defect]) -> Vec<&Defect> {
    let litter = |defect: &&Defect| defect.needs() == Needs::Sweep;
    defects.iter().filter(|one| !litter(one)).collect()
}

/// Everything that only reads.
fn read(root: &Path) -> Result<(), precast::StoreError> {
    let store = Store::open(root)?;
    scene::check(&store).unwrap();
    assert!(store.records().programs(Filter::default()).count() >= 2);
    assert!(store.audit().verify()?.needs().is_none());
    let release = store.releases().get("m", None)?.unwrap();
    store.records().resolve(&release.programs[0].hex()[..12])?;
    store.collector().plan(&Policy::default())?;
    Ok(())
}
