//! The Makefile writes nothing beside the sources: two of its targets at once would disturb each other there.

use std::{fs, path::Path};

use crate::page::{CHECKOUT, page};

/// Commands that write to their last argument, and those that write to all.
const LAST: [&str; 4] = ["cp", "mv", "ln", "install"];
const ALL: [&str; 4] = ["rm", "mkdir", "touch", "strip"];

#[test]
fn no_recipe_writes_into_a_folder_of_sources() {
    let entries = fs::read_dir(CHECKOUT).unwrap().map(Result::unwrap);
    let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    let mut folders: Vec<String> = folders
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    folders.retain(|name| !name.starts_with('.') && name != "target" && name != "dist");
    assert!(folders.contains(&"python".to_owned()), "{folders:?}");
    let text = page("Makefile").replace("\\\n", " ");
    let (mut seen, mut wrong) = (0, Vec::new());
    for line in text.lines().filter_map(|line| line.strip_prefix('\t')) {
        for written in line.split(['&', ';', '|', '(', '{']).flat_map(written) {
            seen += 1;
            let first = Path::new(&written).components().next().unwrap();
            let first = first.as_os_str().to_string_lossy().into_owned();
            // Figures are what these targets are for.
            if folders.contains(&first) && !written.starts_with("benches/results/") {
                wrong.push(written);
            }
        }
    }
    assert!(seen > 20, "{seen}");
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Returns the paths that a command writes.
fn written(command: &str) -> Vec<String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let words: Vec<&str> = (words.iter())
        .map(|word| word.trim_start_matches('@').trim_matches(['"', '\'']))
        .filter(|word| !matches!(*word, "do" | "then" | ""))
        .collect();
    let mut found: Vec<&str> = words
        .windows(2)
        .filter(|pair| pair[0] == ">")
        .map(|pair| pair[1])
        .collect();
    let plain = || {
        words
            .iter()
            .skip(1)
            .copied()
            .filter(|word| !word.starts_with('-'))
    };
    match words.first() {
        Some(first) if LAST.contains(first) => found.extend(plain().next_back()),
        Some(first) if ALL.contains(first) => found.extend(plain()),
        _ => {}
    }
    found.into_iter().map(str::to_owned).collect()
}
