//! Columns to sort rows by.

use std::cmp::Ordering;

use super::Row;

/// A column to sort by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// The request key.
    Id,
    /// Name of the model.
    Model,
    /// Name of the module.
    Module,
    /// Sizes of the bucket, as numbers.
    Bucket,
    /// The state's place among [`State::ALL`](super::State::ALL).
    State,
    /// Name of the target.
    Target,
    /// `cpu` or `cuda`.
    Device,
    /// How many artifacts one run calls.
    Steps,
    /// Bytes of the shared objects.
    Size,
    /// When it was built.
    Age,
    /// When it was last used.
    Used,
}

impl Column {
    /// Every column with the word that selects it.
    pub const ALL: [(&'static str, Self); 11] = [
        ("id", Self::Id),
        ("model", Self::Model),
        ("module", Self::Module),
        ("bucket", Self::Bucket),
        ("state", Self::State),
        ("target", Self::Target),
        ("device", Self::Device),
        ("steps", Self::Steps),
        ("size", Self::Size),
        ("age", Self::Age),
        ("used", Self::Used),
    ];

    /// Compares two rows: the youngest first for ages, the larger bucket last.
    pub(super) fn compare(self, a: &Row, b: &Row) -> Ordering {
        match self {
            Self::Id => a.id.cmp(&b.id),
            Self::Model => a.model.cmp(&b.model),
            Self::Module => a.module.cmp(&b.module),
            Self::Bucket => bucket_order(&a.bucket, &b.bucket),
            Self::State => a.state.cmp(&b.state),
            Self::Target => a.target.cmp(&b.target),
            Self::Device => a.device.cmp(&b.device),
            Self::Steps => a.steps.cmp(&b.steps),
            Self::Size => a.bytes.cmp(&b.bytes),
            Self::Age => b.created.cmp(&a.created),
            Self::Used => b.used.cmp(&a.used),
        }
    }
}

/// Compares buckets by name and number: `batch=8` before `batch=16`.
pub fn bucket_order(a: &str, b: &str) -> Ordering {
    bucket_key(a).cmp(&bucket_key(b))
}

/// Returns bytes that compare as the names and numbers of `batch=8 seq=128` do, so that 16 comes after 8.
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
