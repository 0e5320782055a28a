//! An index with as many programs as wanted, without files behind them: for what lists stores of any size.

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

/// Writes `count` programs into the index of the store at `root`.
pub fn write(root: &Path, count: u64) {
    let mut index = rusqlite::Connection::open(root.join("index.sqlite")).unwrap();
    let tx = index.transaction().unwrap();
    let links = sum(&[b"links"]);
    {
        let mut insert = tx
            .prepare("INSERT INTO programs VALUES (?,?,?,?,?,?,?,?,?,?,?)")
            .unwrap();
        for n in 0..count {
            let id = Digest::of(&n.to_le_bytes());
            let (model, module, bucket) =
                (format!("model-{}", n % 50), "encode", format!("batch={n}"));
            let (target, device) = ("torch211-cxx11-cpu-x86_64-linux-native", "cpu");
            let number = |value: i64| value.to_le_bytes();
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
        }
    }
    tx.commit().unwrap();
}
