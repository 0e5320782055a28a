//! Columns to sort rows by.

use std::cmp::Ordering;

use super::Row;

/// Compares two rows by one column: the youngest first for ages, the larger bucket last.
pub type Order = fn(&Row, &Row) -> Ordering;

/// The columns to sort by, each with its name.
pub const ORDERS: [(&str, Order); 11] = [
    ("id", |a, b| a.id.cmp(&b.id)),
    ("model", |a, b| a.model.cmp(&b.model)),
    ("module", |a, b| a.module.cmp(&b.module)),
    ("bucket", |a, b| bucket_order(&a.bucket, &b.bucket)),
    ("state", |a, b| a.state.cmp(&b.state)),
    ("target", |a, b| a.target.cmp(&b.target)),
    ("device", |a, b| a.device.cmp(&b.device)),
    ("steps", |a, b| a.steps.cmp(&b.steps)),
    ("size", |a, b| a.bytes.cmp(&b.bytes)),
    ("age", |a, b| b.created.cmp(&a.created)),
    ("used", |a, b| b.used.cmp(&a.used)),
];

/// Compares buckets by name and number: `batch=8` before `batch=16`.
pub fn bucket_order(a: &str, b: &str) -> Ordering {
    bucket_key(a).cmp(&bucket_key(b))
}

/// Returns bytes whose order is the order of the names and numbers of `batch=8 seq=128`, so that 16 comes after 8.
fn bucket_key(bucket: &str) -> Vec<u8> {
    let mut key = Vec::new();
    for part in bucket.split(' ') {
        let (name, size) = part.split_once('=').unwrap_or((part, "0"));
        let size: i64 = size.parse().unwrap_or(0);
        key.extend(name.bytes());
        key.push(0);
        // Negative numbers first.
        key.extend((size as u64 ^ 1 << 63).to_be_bytes());
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_compare_by_name_and_number() {
        let sorted = [
            "batch=-1",
            "batch=1 seq=32",
            "batch=1 seq=128",
            "batch=8",
            "batch=16 seq=1",
            "dynamic",
            "eager",
            "seq=2",
        ];
        for pair in sorted.windows(2) {
            assert_eq!(bucket_order(pair[0], pair[1]), Ordering::Less, "{pair:?}");
        }
        assert_eq!(bucket_order("batch=8", "batch=8"), Ordering::Equal);
    }
}
