//! Changes unpacked weights between and during starts. No start may use bytes that differ from their digest.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use precast::{
    Digest, Store,
    store::{Options, Unpacked},
};

use crate::{
    report::Tally,
    scene::{self, Random},
};

/// One part of the tree, and several, the last one shorter.
const SIZES: [usize; 3] = [6000, (2 << 20) + 77, 3 << 20];

struct MappedWeights {
    digest: Digest,
    content: Vec<u8>,
    path: PathBuf,
    /// The unpacked file as it should be.
    sound: Vec<u8>,
}

fn weights(store: &Store) -> Vec<MappedWeights> {
    let of = |size: &usize| {
        let content = scene::content(*size as u64, *size);
        let digest = store.objects().put_bytes(&content).unwrap();
        drop(store.objects().map(&digest).unwrap());
        let hex = digest.hex();
        let path = store.path().join("ready").join(&hex[..2]).join(&hex);
        let sound = fs::read(&path).unwrap();
        assert_eq!(sound.len(), size + 88, "content and footer");
        MappedWeights {
            digest,
            content,
            path,
            sound,
        }
    };
    SIZES.iter().map(of).collect()
}

/// Changes a file in place; returns the name of the change.
fn change(file: &File, random: &mut Random, sound: &[u8], other: &[u8]) -> String {
    let length = sound.len();
    let at = random.below(length);
    match random.below(8) {
        0 => {
            file.set_len(at as u64).unwrap();
            format!("cut to {at}")
        }
        1 => {
            let more = random.draw().to_le_bytes();
            file.write_all_at(&more, length as u64).unwrap();
            "extended".to_owned()
        }
        2 => {
            let most = 1 + random.below(4096);
            let others = sound[at..].iter().take(most);
            let zeros: Vec<u8> = others.map(|byte| byte ^ 0x5A).collect();
            file.write_all_at(&zeros, at as u64).unwrap();
            format!("{} bytes from {at}", zeros.len())
        }
        3 => {
            file.set_len(0).unwrap();
            file.write_all_at(other, 0).unwrap();
            "swapped with another".to_owned()
        }
        footer => {
            let at = match footer {
                4 => length - 1 - random.below(88),
                _ => at,
            };
            let changed = [sound[at] ^ (1 << random.below(8))];
            file.write_all_at(&changed, at as u64).unwrap();
            format!("a bit of byte {at}")
        }
    }
}

fn writable(path: &Path) -> File {
    fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
    file
}

fn restore(file: &File, sound: &[u8]) {
    file.write_all_at(sound, 0).unwrap();
    file.set_len(sound.len() as u64).unwrap();
}

/// Renames a new file over the unpacked one: a sound one, once it is changed.
fn replace(of: &MappedWeights, change: impl FnOnce(&File)) {
    let new = of.path.with_extension("new");
    fs::write(&new, &of.sound).unwrap();
    change(&File::options().write(true).open(&new).unwrap());
    fs::rename(new, &of.path).unwrap();
}

/// Starts with this store; returns the failure.
fn start(store: &Store, of: &MappedWeights, sweep: &mut Tally) -> Option<String> {
    match store.objects().map(&of.digest) {
        Ok(map) if map[..] == of.content[..] => None,
        Ok(map) => Some(format!("{} bytes, and other ones", map.len())),
        Err(_) => {
            sweep.add("refused", 1);
            None
        }
    }
}

/// Makes `count` seeded changes between starts, and `during` starts beside changes. A start that is not refused has
/// every byte right.
pub fn sweep(seed: u64, count: u64, during: u64) -> Tally {
    let dir = scene::scratch();
    let store = Store::create(dir.path().join("store")).unwrap();
    let all = weights(&store);
    let with = |unpacked, read_only| {
        let options = Options {
            unpacked,
            read_only,
            ..Options::default()
        };
        Store::open_with(store.path(), options).unwrap()
    };
    let checking = with(Unpacked::Check, true);
    let copying = with(Unpacked::Copy, true);
    let mut random = Random(seed);
    let mut sweep = Tally::of(["mutations", "during", "refused"]);
    for n in 0..count {
        // The small one more often: it costs less.
        let which = [0, 0, 0, 1, 2][random.below(5)];
        let of = &all[which];
        let file = writable(&of.path);
        let what = change(&file, &mut random, &of.sound, &all[(which + 1) % 3].sound);
        sweep.add("mutations", 1);
        let (early, checked) = checking.objects().map_checking(&of.digest).unwrap();
        let wrong = match checked.wait() {
            true if early[..] != of.content[..] => Some("accepted as right".to_owned()),
            _ => None,
        };
        let used = if n % 2 == 0 { &checking } else { &copying };
        let wrong = wrong.or_else(|| start(used, of, &mut sweep));
        restore(&file, &of.sound);
        // A writer unpacks it again, and sets the other aside.
        let wrong = wrong.or_else(|| {
            if n % 50 != 0 {
                return None;
            }
            change(&file, &mut random, &of.sound, &all[(which + 1) % 3].sound);
            let wrong = start(&store, of, &mut sweep);
            for aside in scene::files(&store.path().join("quarantine")) {
                fs::remove_file(aside).unwrap();
            }
            let again = fs::read(&of.path).unwrap() == of.sound;
            wrong.or((!again).then(|| "it was not unpacked again".to_owned()))
        });
        if let Some(wrong) = wrong {
            let size = of.content.len();
            sweep.fail(format!(
                "seed {seed} step {n}: {size} bytes, {what}: {wrong}"
            ));
        }
    }
    beside(&all, &checking, &copying, seed, during, &mut sweep);
    sweep
}

/// Starts while another thread changes the file: copied files in place, mapped files by replacing them (a change of
/// mapped bytes is out of reach).
fn beside(
    all: &[MappedWeights],
    checking: &Store,
    copying: &Store,
    seed: u64,
    count: u64,
    sweep: &mut Tally,
) {
    for (of, other) in all.iter().zip(all.iter().cycle().skip(1)) {
        for (store, in_place) in [(copying, true), (checking, false)] {
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut random = Random(seed);
                    while !over.load(Relaxed) {
                        if in_place {
                            let file = writable(&of.path);
                            change(&file, &mut random, &of.sound, &other.sound);
                            restore(&file, &of.sound);
                        } else {
                            replace(of, |_| {});
                            replace(of, |file| {
                                drop(change(file, &mut random, &of.sound, &other.sound));
                            });
                        }
                    }
                    replace(of, |_| {});
                });
                for n in 0..count / 6 {
                    sweep.add("during", 1);
                    if let Some(wrong) = start(store, of, sweep) {
                        let how = if in_place { "copied" } else { "mapped" };
                        sweep.fail(format!("seed {seed} start {n}, {how}: {wrong}"));
                    }
                }
                over.store(true, Relaxed);
            });
        }
    }
}
