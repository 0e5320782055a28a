use serde_json::Value;

use super::*;
use crate::{build::ways::Set, spec::Mode};

const FIRST: Hands = Hands::Ready {
    role: Role::Nothing,
    opened: true,
};

fn ready(role: Role) -> Hands {
    Hands::Ready {
        role,
        opened: false,
    }
}

/// Returns a queue of so many captures whose weights are there.
fn queue(captures: usize, hired: &[Role], opening: Option<(f64, usize)>) -> Queue {
    let captures = (0..captures).map(|job| (job, true));
    let mut queue = Queue::new(captures, 8, hired, opening);
    queue.weights_are_there();
    queue
}

fn compile(name: &str) -> Compile {
    let segment = serde_json::json!({
        "graph": name, "file": "f", "inputs": [], "outputs": [], "constants": [],
    });
    Compile {
        key: Digest::of(name.as_bytes()),
        explained: Value::Null,
        segment: serde_json::from_value(segment).unwrap(),
        set: Set {
            mode: Mode::Default,
            passes: Vec::new(),
            options: BTreeMap::new(),
            name: String::new(),
        },
        name: name.to_owned(),
    }
}

#[test]
fn one_that_got_ready_makes_the_model_before_any_capture_is_over() {
    let roles = [Role::Capture, Role::Capture, Role::Compile];
    let mut queue = queue(3, &roles, Some((9.0, 9)));
    let open = |next: Next| matches!(next, Next::Do(Task::Open));
    assert!(matches!(
        queue.next(true, FIRST),
        Next::Do(Task::Capture(0))
    ));
    assert!(!open(queue.next(false, ready(Role::Compile))));
    assert!(open(queue.next(false, ready(Role::Capture))));
    assert!(open(queue.next(false, ready(Role::Capture))));
    // As many as there are captures left.
    assert!(!open(queue.next(false, ready(Role::Capture))));
    queue.opened(Some(true));
    let opened = Hands::Ready {
        role: Role::Capture,
        opened: true,
    };
    assert!(matches!(
        queue.next(false, opened),
        Next::Do(Task::Capture(1))
    ));
}

#[test]
fn one_that_made_the_model_ahead_takes_the_room_of_one() {
    let open = |next: Next| matches!(next, Next::Do(Task::Open));
    let mut queue = queue(9, &[Role::Open, Role::Capture], Some((9.0, 1)));
    assert!(!open(queue.next(false, Hands::Starting(Role::Open))));
    assert!(!open(queue.next(false, ready(Role::Capture))));
    assert!(open(queue.next(false, ready(Role::Open))));
    // It could not: then another one may.
    queue.opened(None);
    assert!(open(queue.next(false, ready(Role::Capture))));
    queue.opened(Some(true));
    assert!(!open(queue.next(false, ready(Role::Capture))));
}

#[test]
fn who_made_the_model_captures_while_another_writes_the_weights_down() {
    let captures = (0..2).map(|job| (job, true));
    let roles = [Role::Open, Role::Compile];
    let mut queue = Queue::new(captures, 8, &roles, Some((9.0, 9)));
    let weights = |next: Next| matches!(next, Next::Do(Task::Weights));
    let opened = Hands::Ready {
        role: Role::Capture,
        opened: true,
    };
    assert!(!weights(queue.next(false, Hands::Starting(Role::Open))));
    assert!(matches!(
        queue.next(false, ready(Role::Open)),
        Next::Do(Task::Open)
    ));
    queue.opened(Some(true));
    for job in 0..2 {
        let next = queue.next(false, opened);
        assert!(matches!(next, Next::Do(Task::Capture(at)) if at == job));
    }
    // Nothing is left to capture.
    assert!(weights(queue.next(false, opened)));
}

#[test]
fn nobody_opens_what_may_not_spread_or_is_sooner_done_by_the_first() {
    let open = |next: Next| matches!(next, Next::Do(Task::Open));
    let mut large = queue(3, &[Role::Capture], None);
    assert!(!open(large.next(false, ready(Role::Capture))));
    let mut slow = queue(3, &[Role::Capture], Some((9.0, 9)));
    slow.captured_in(1.0);
    assert!(!open(slow.next(false, ready(Role::Capture))));
    slow.captured_in(99.0);
    assert!(open(slow.next(false, ready(Role::Capture))));
}

#[test]
fn no_more_models_than_the_memory_is_for() {
    let open = |next: Next| matches!(next, Next::Do(Task::Open));
    let mut queue = queue(9, &[Role::Capture; 3], Some((9.0, 2)));
    assert!(open(queue.next(false, ready(Role::Capture))));
    queue.opened(Some(true));
    assert!(open(queue.next(false, ready(Role::Capture))));
    assert!(!open(queue.next(false, ready(Role::Capture))));
    queue.opened(Some(true));
    assert!(!open(queue.next(false, ready(Role::Capture))));
}

#[test]
fn a_compile_is_left_to_one_that_has_the_compiler_at_hand() {
    let mut queue = queue(0, &[Role::Capture, Role::Compile], None);
    queue.running = 1;
    for name in ["a", "bb"] {
        queue.compiles.push(compile(name));
    }
    let compiles = |next: Next| matches!(next, Next::Do(Task::Compile(_)));
    // Two for one that is getting ready: the other worker takes one, and leaves the last.
    assert!(compiles(queue.next(false, ready(Role::Capture))));
    assert!(!compiles(queue.next(false, ready(Role::Capture))));
    assert!(!compiles(queue.next(true, FIRST)));
    assert!(!compiles(queue.next(false, Hands::Starting(Role::Compile))));
    assert!(compiles(queue.next(false, ready(Role::Compile))));
    // It is at work now: what comes next is anybody's.
    queue.compiles.push(compile("c"));
    assert!(compiles(queue.next(true, FIRST)));
}

#[test]
fn who_has_the_compiler_at_hand_leaves_what_needs_no_worker_to_others() {
    let weights = |next: Next| matches!(next, Next::Do(Task::Weights));
    let captures = (0..0).map(|job| (job, true));
    // Of five threads the last two have no worker.
    let mut queue = Queue::new(captures, 5, &[Role::Compile; 2], None);
    queue.running = 1;
    assert!(matches!(
        queue.next(false, Hands::Starting(Role::Compile)),
        Next::Wait
    ));
    assert!(weights(queue.next(false, Hands::Empty)));
    queue.weights_are_there();
    queue.gates.push_back(0);
    queue.compiles.push(compile("a"));
    let next = queue.next(false, ready(Role::Compile));
    assert!(matches!(next, Next::Do(Task::Compile(_))));
    let next = queue.next(false, Hands::Empty);
    assert!(matches!(next, Next::Do(Task::Gate(0))));
}

#[test]
fn a_program_is_to_be_gated_until_its_gate_begins_or_its_capture_fails() {
    let mut queue = queue(2, &[], None);
    assert_eq!(queue.to_gate(), 2);
    for job in 0..2 {
        let next = queue.next(true, FIRST);
        assert!(matches!(next, Next::Do(Task::Capture(it)) if it == job));
    }
    assert_eq!(queue.to_gate(), 2);
    queue.capture_over(0);
    assert_eq!(queue.to_gate(), 1);
}
