//! An index with any number of programs and no files, for tests of listings.

use std::path::Path;

use precast::Digest;

/// The check sum of a row, as the store writes it: each field with its length before it.
fn sum(fields: &[&[u8]]) -> i64 {
    let mut bytes = Vec::new();
    for field in fields {
        bytes.extend((field.len() as u64).to_le_bytes());
        bytes.extend(*field);
    }
    i64::from_le_bytes(Digest::of(&bytes).as_bytes()[..8].try_into().unwrap())
}

/// Four programs call one artifact, which has an object of its own.
const CALLERS: u64 = 4;

/// Writes `count` programs, and the artifacts and objects that they need, into the index of the store at `root`.
pub fn write(root: &Path, count: u64) {
    let mut index = rusqlite::Connection::open(root.join("index.sqlite")).unwrap();
    let tx = index.transaction().unwrap();
    let number = |value: i64| value.to_le_bytes();
    let (target, device) = ("torch211-cxx11-cpu-x86_64-linux-native", "cpu");
    let artifact = |n: u64| Digest::of(format!("artifact {}", n / CALLERS).as_bytes());
    {
        let mut object = tx
            .prepare("INSERT INTO objects VALUES (?,3,2,1,?)")
            .unwrap();
        let mut insert = (tx.prepare("INSERT INTO artifacts VALUES (?,?,3,?,?,1,?,?)")).unwrap();
        let mut link = (tx.prepare("INSERT INTO artifact_objects VALUES (?,?)")).unwrap();
        for n in (0..count).step_by(CALLERS as usize) {
            // An object of its own, named as its artifact is.
            let id = artifact(n);
            let bytes = id.as_bytes();
            let (size, stored, one) = (number(3), number(2), number(1));
            object
                .execute((bytes, sum(&[b"objects", bytes, &size, &stored, &one])))
                .unwrap();
            let links = sum(&[b"links", bytes]);
            let sum = sum(&[
                b"artifacts",
                bytes,
                bytes,
                &size,
                target.as_bytes(),
                device.as_bytes(),
                &one,
                &number(links),
            ]);
            insert
                .execute((bytes, bytes, target, device, links, sum))
                .unwrap();
            link.execute((bytes, bytes)).unwrap();
        }
        let mut link = (tx.prepare("INSERT INTO program_artifacts VALUES (?,?)")).unwrap();
        let mut insert = tx
            .prepare("INSERT INTO programs VALUES (?,?,?,?,?,?,?,?,?,?,?)")
            .unwrap();
        for n in 0..count {
            let id = Digest::of(&n.to_le_bytes());
            let (model, module, bucket) =
                (format!("model-{}", n % 50), "encode", format!("batch={n}"));
            let links = sum(&[b"links", artifact(n).as_bytes()]);
            let sum = sum(&[
                b"programs",
                id.as_bytes(),
                id.as_bytes(),
                model.as_bytes(),
                module.as_bytes(),
                bucket.as_bytes(),
                target.as_bytes(),
                device.as_bytes(),
                &number(1),
                &number(1),
                &number(links),
            ]);
            let blob = id.as_bytes();
            let row = rusqlite::params![
                blob, blob, model, module, bucket, target, device, 1, 1, links, sum
            ];
            insert.execute(row).unwrap();
            link.execute((blob, artifact(n).as_bytes())).unwrap();
        }
    }
    tx.commit().unwrap();
}
