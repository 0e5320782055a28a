//! The output of `plan` and `build` in a terminal and in a pipe.

use std::{collections::BTreeSet, num::NonZero};

use crate::{
    pty,
    sandbox::{FILTERS, Sandbox},
};

fn shown(sandbox: &Sandbox, args: &[&str], columns: u16, extra: &[(&str, &str)]) -> pty::Shown {
    let mut command = sandbox.command(args);
    command
        .env("TERM", "xterm-256color")
        .envs(extra.iter().copied());
    pty::run(&mut command, columns)
}

fn cells(count: u16) -> NonZero<u16> {
    NonZero::new(count).unwrap()
}

macro_rules! assert_screen {
    ($text:expr, @$snapshot:literal) => {
        insta::with_settings!({ filters => FILTERS.to_vec() }, {
            insta::allow_duplicates! { insta::assert_snapshot!($text, @$snapshot) }
        })
    };
}

#[test]
fn a_plan_in_terminals() {
    let sandbox = Sandbox::new();
    let wide = shown(&sandbox, &["plan"], 120, &[]);
    assert_eq!(wide.code, 0);
    assert_screen!(pty::visible(&wide.text), @r#"
    ‹yellow›build  ‹› affine batch=1  never built
    ‹yellow›build  ‹› affine batch=4  never built
    ‹yellow›build  ‹› affine eager  never built
               answers sizes that no bucket covers; `fail_policy = "raise"` leaves it out
    3 of 3 programs would be built
    "#);
    // Lines break between words.
    let narrow = shown(&sandbox, &["plan"], 40, &[]).text;
    assert!(
        narrow.split_whitespace().eq(wide.text.split_whitespace()),
        "{narrow}"
    );
    let plain = anstream::adapter::strip_str(&narrow).to_string();
    let fits = plain.lines().all(|line| line.chars().count() <= 40);
    assert!(fits, "{plain}");
    let plain = shown(&sandbox, &["plan"], 120, &[("NO_COLOR", "1")]).text;
    assert!(!plain.contains('\x1b'), "{plain}");
    assert_eq!(plain, sandbox.run(&["plan"]).stdout);
}

#[test]
fn a_build_draws_bars_and_leaves_only_what_it_did() {
    for columns in [40, 120] {
        let sandbox = Sandbox::new();
        let build = shown(&sandbox, &["build"], columns, &[]);
        assert_eq!(build.code, 0, "{}", build.text);
        // Bars were drawn, in colours, and are gone.
        for part in ["Building", "/3 programs", "starting Python", "\x1b[32m"] {
            let is_there = build.text.contains(part);
            assert!(is_there, "`{part}` is not in {:?}", build.text);
        }
        let words: Vec<&str> = build.screen.split_whitespace().collect();
        assert_screen!(words.join(" "), @"left out affine eager: the fake model has no dynamic dimensions; requests that no other program covers are refused built 2 programs, 2 artifacts compiled ([TIME]) published fake release 1");
    }
}

#[test]
fn a_build_shows_its_tasks_and_the_remaining_time() {
    // Most of it is waiting for a compile that is slow.
    std::thread::scope(|scope| {
        for columns in [40, 60, 80, 120] {
            scope.spawn(move || says_what_it_does(columns));
        }
    });
}

fn says_what_it_does(columns: u16) {
    let sandbox = Sandbox::new();
    sandbox.buckets("1, 2, 3, 4, 5");
    sandbox.append("model.py", "# fake: compile is slow");
    let colours = [("NO_COLOR", "1")];
    let build = shown(&sandbox, &["build", "-j", "2"], columns, &colours);
    assert_eq!(build.code, 0, "{}", build.text);
    assert!(!coloured(&build.text), "{:?}", build.text);
    // Every line that the screen showed, without spinners and counters.
    let mut screen = vt100::Parser::new(cells(200), cells(columns), 0);
    let mut seen = BTreeSet::new();
    for part in build.text.replace('\n', "\r\n").split_inclusive('m') {
        screen.process(part.as_bytes());
        for row in screen.screen().rows(0, columns) {
            // A wrapped line would continue in the next row.
            let (row, whole) = (row.trim(), row.trim_start().starts_with("Building "));
            let is_whole = whole || !row.ends_with(" left");
            assert!(is_whole, "at {columns} columns: {row}");
            let words = row
                .split_whitespace()
                .filter(|word| !word.starts_with(['[', ']']));
            let words = words.map(|word| match word.ends_with('s') && word.len() < 4 {
                true => "0s",
                false => word.trim_start_matches(|c: char| c > '\u{2800}'),
            });
            seen.insert(words.collect::<Vec<_>>().join(" ").trim().to_owned());
        }
    }
    let has = |start: &str, end: &str| {
        let whole = |line: &&String| line.starts_with(start) && line.ends_with(end);
        seen.iter().any(|line| whole(&line))
    };
    assert!(has("0s compile affine batch=", ""), "{seen:#?}");
    // How long is a matter of the machine.
    assert!(has("Building ", " left"), "{seen:#?}");
}

#[test]
fn bars_are_not_coloured_where_nobody_wants_it() {
    let build = shown(&Sandbox::new(), &["build", "--color", "never"], 100, &[]);
    assert!(!coloured(&build.text), "{:?}", build.text);
}

fn coloured(text: &str) -> bool {
    text.split("\x1b[").skip(1).any(|rest| {
        let end = rest.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(0);
        rest[end..].starts_with('m')
    })
}
