//! Files of states with one changed byte, with another header, and with a position out of bounds.

use std::collections::HashMap;

use super::*;

/// Returns tensors of several dtypes.
fn states() -> Vec<(String, Tensor)> {
    let cache = Tensor::from_slice(&[1.0_f32, -2.5, 3.0], &[3]);
    let done = Tensor::from_slice(&[true, false, true], &[3]);
    let tokens = Tensor::from_slice(&[7_i64, 8], &[1, 2]);
    let all = [("cache", cache), ("done", done), ("tokens", tokens)];
    all.map(|(name, made)| (name.to_owned(), made.unwrap()))
        .into()
}

fn training() -> Holds {
    Holds::Checkpoint(Box::new(Training {
        module: "train".to_owned(),
        optimizer: "adamw".to_owned(),
        programs: Digest::of(b"programs"),
        step: 100,
        seed: 3,
        notes: [("schedule".to_owned(), "cosine".to_owned())].into(),
    }))
}

fn header(position: i64, holds: Holds) -> Header {
    Header::new("gpt", Some(Digest::of(b"weights")), position, holds)
}

/// Writes a file, and returns its bytes.
fn written(header: &Header) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("states");
    write(&path, header, &states(), false).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    fs::read(path).unwrap()
}

fn problem(result: Result<(Header, BTreeMap<String, Tensor>), SavedError>) -> String {
    match result {
        Err(SavedError::Unfit(problem)) => problem,
        Err(SavedError::Io(error)) => panic!("{error}"),
        Ok((header, _)) => panic!("{header:?} is accepted"),
    }
}

#[test]
fn the_same_states_make_the_same_file_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("states");
    for holds in [Holds::Session, training()] {
        let own = header(5, holds);
        assert_eq!(written(&own), written(&own));
        for durable in [false, true] {
            write(&path, &own, &states(), durable).unwrap();
            let (read, states_) = read(&path, |header| header.fits(&own)).unwrap();
            assert_eq!((read.position, &read.holds), (5, &own.holds));
            for (name, tensor) in states() {
                let back = &states_[&name];
                assert_eq!(back.to_bytes().unwrap(), tensor.to_bytes().unwrap());
            }
        }
    }
}

#[test]
fn every_changed_byte_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("states");
    for holds in [Holds::Session, training()] {
        let whole = written(&header(5, holds));
        for at in 0..whole.len() {
            // Each bit, the space and the tab that JSON takes for one another, and the end of a text.
            let bits = (0..8).map(|bit| whole[at] ^ (1 << bit));
            for byte in bits.chain([b' ', b'\t', b'\n', b'"', 0]) {
                if byte == whole[at] {
                    continue;
                }
                let mut changed = whole.clone();
                changed[at] = byte;
                fs::write(&path, &changed).unwrap();
                let read = read(&path, |_| Ok(()));
                assert!(read.is_err(), "byte {at}: {} to {byte}", whole[at]);
            }
        }
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let problem = problem(read(&path, |_| Ok(())));
            assert!(problem.contains("cut off"), "{length}: {problem}");
        }
        fs::write(&path, [&whole[..], b"!"].concat()).unwrap();
        problem(read(&path, |_| Ok(())));
    }
}

#[test]
fn a_file_of_another_model_or_other_weights_is_refused_by_name() {
    let own = header(5, Holds::Session);
    let of = |change: &dyn Fn(&mut Header)| {
        let mut other = own.clone();
        change(&mut other);
        other.fits(&own).unwrap_err()
    };
    insta::assert_snapshot!(of(&|header| header.model = "bert".to_owned()), @"it is of model `bert`, not of `gpt`");
    insta::assert_snapshot!(of(&|header| header.weights = Some(Digest::of(b"tuned"))), @"it was written with the weights `aba407b81ed0`, and these are the weights `9a129038d9a0`");
    insta::assert_snapshot!(of(&|header| header.weights = None), @"it was written with no weights of a release, and these are the weights `9a129038d9a0`");
    insta::assert_snapshot!(of(&|header| header.holds = training()), @"it has a checkpoint of a training, not the states of a session");

    let own = header(5, training());
    let of = |change: &dyn Fn(&mut Training)| {
        let Holds::Checkpoint(mut other) = own.holds.clone() else {
            panic!("it is one");
        };
        change(&mut other);
        let other = header(5, Holds::Checkpoint(other));
        other.fits(&own).unwrap_err()
    };
    insta::assert_snapshot!(of(&|other| other.module = "half".to_owned()), @"it is of module `half`, not of `train`");
    insta::assert_snapshot!(of(&|other| other.optimizer = "sgd".to_owned()), @"it is of optimizer `sgd`, not of `adamw`");
}

#[test]
fn a_position_out_of_bounds_is_refused() {
    let within = |position, most| header(position, Holds::Session).within(most);
    for position in [0, 1, 16] {
        within(position, Some(16)).unwrap();
        within(position, None).unwrap();
    }
    let error = |position| within(position, Some(16)).unwrap_err();
    insta::assert_snapshot!(error(-1), @"its position is -1, below 0");
    insta::assert_snapshot!(error(17), @"its position is 17, and its context has 16");
    error(i64::MAX);
    within(i64::MIN, None).unwrap_err();
}

#[test]
fn other_files_and_those_of_earlier_versions_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("states");
    let refused = |tensors: &[(String, Tensor)], texts: HashMap<String, String>| {
        let draft = Draft::write(&path, tensors, Some(texts)).unwrap();
        draft.publish(&path, false).unwrap();
        problem(read(&path, |_| Ok(())))
    };
    let old = "an earlier version of Precast wrote it, without a digest of its header, and this one reads format 2";
    let mut session = states();
    let position = Tensor::from_slice(&[3_i64], &[1]).unwrap();
    session.push((OLD_POSITION.to_owned(), position));
    assert_eq!(refused(&session, HashMap::new()), old);
    let text = r#"{"format":1,"model":"gpt"}"#.to_owned();
    assert_eq!(refused(&states(), [(OLD_KEY.to_owned(), text)].into()), old);
    let neither = refused(&states(), HashMap::new());
    insta::assert_snapshot!(neither, @"it has neither the states of a session nor a checkpoint");
    let newer = r#"{"format":7}"#.to_owned();
    let newer = refused(&states(), [(KEY.to_owned(), newer)].into());
    insta::assert_snapshot!(newer, @"it has format 7, and this version reads 2");
    let bad = refused(&states(), [(KEY.to_owned(), "{".to_owned())].into());
    assert!(bad.starts_with("its header can't be read"), "{bad}");

    let header = header(0, Holds::Session);
    let device = write(Path::new("/dev/null"), &header, &[], false);
    assert!(matches!(device, Err(SavedError::Unfit(_))));
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
}
