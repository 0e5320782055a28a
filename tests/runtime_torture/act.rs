//! Child processes: this binary runs itself with a task and reads one JSON answer.

use std::{
    env,
    io::Read,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{exits, memory, races, sessions, values};

const TASK: &str = "PRECAST_TORTURE_TASK";
const WITH: &str = "PRECAST_TORTURE_WITH";
/// An answer's line begins with it.
const MARK: &str = "answer: ";

/// Runs the parent's task; does nothing in a process that is no child.
pub fn act() {
    let Ok(task) = env::var(TASK) else { return };
    let with: Value = serde_json::from_str(&env::var(WITH).unwrap()).unwrap();
    // Transparent huge pages make the resident memory grow by 2 MiB at arbitrary moments.
    // SAFETY: it changes nothing but how memory that is still to come is mapped.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    let answer = match task.as_str() {
        "races" => races::child(&with),
        "sharing" => memory::sharing_child(&with),
        "leaks" => memory::leaks_child(&with),
        "sessions" => sessions::opened_child(&with),
        "exhaustion" => memory::exhaustion_child(&with),
        "exits" => exits::child(&with),
        "values" => values::child(&with),
        other => panic!("no task `{other}`"),
    };
    println!("\n{MARK}{answer}");
}

/// The end of a child.
pub struct Done {
    pub status: ExitStatus,
    pub answer: Option<Value>,
    pub printed: String,
}

/// Starts a child on a task.
pub fn start(task: &str, with: &Value) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    if let Some(library) = with["preload"].as_str() {
        command.env("LD_PRELOAD", library);
    }
    command
        .args(["actor", "--exact", "--nocapture", "--test-threads=1"])
        .env(TASK, task)
        .env(WITH, with.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits for a child, and kills it after `limit`, which shows in its status.
pub fn finish(mut child: Child, limit: Duration) -> Done {
    let begin = Instant::now();
    let mut out = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut printed = String::new();
        let _ = out.read_to_string(&mut printed);
        printed
    });
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begin.elapsed() > limit {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let printed = reader.join().unwrap();
    let answer = printed.lines().find_map(|line| line.strip_prefix(MARK));
    let answer = answer.and_then(|text| serde_json::from_str(text).ok());
    Done {
        status,
        answer,
        printed,
    }
}

/// Runs a child to its end and returns its answer, or its status and output.
pub fn ask(task: &str, with: &Value) -> Result<Value, String> {
    let done = finish(start(task, with), Duration::from_secs(600));
    done.answer
        .ok_or_else(|| format!("{task} {with}: {}: {}", done.status, json!(done.printed)))
}
